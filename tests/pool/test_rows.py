"""Rows over a ledger, driven as a scheduler would, in random order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.reclaim import ReclaimRule
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.pool.ledger import Ledger
from tangram_sglang.pool.row import Row
from tangram_sglang.pool.rows import Rows

SHAPE = ModelShape(tuple(LayerShape(i, 2, 2, 8, 21 if i == 1 else None, 1.0) for i in range(3)))
FULL = ModelShape(tuple(LayerShape(i, 2, 2, 8, None, 1.0) for i in range(2)))


def layout(rule=None, retention=0.4, queries=0, scores=False, shape=SHAPE):
    form = KVLayout.build(
        shape,
        rule or WindowRule(16, 10, 4, 2),
        budgets=[0.9, 0.1, 0.5, 0.2],
        retention=retention,
        per_group=3,
        grouping="global",
        max_tokens=300,
    )
    form = form.with_queries(shape, queries) if queries else form
    return form.with_scores() if scores else form


class RowMachine(RuleBasedStateMachine):
    """Prefill in chunks, decode, close and clear; the content of pages is tracked beside."""

    @initialize(
        sinks=st.integers(0, 4),
        recent=st.integers(0, 20),
        queries=st.integers(0, 16),
        scores=st.booleans(),
        whole=st.booleans(),
    )
    def build(self, sinks, recent, queries, scores, whole):
        rule = WindowRule(16, recent, 4, sinks)
        if whole:
            rule, queries = ReclaimRule(16, recent, 4, sinks, longest=300), 0
        self.layout = layout(rule, queries=queries, scores=scores)
        self.ledger = Ledger(600)
        self.rows = Rows(self.layout, self.ledger, 4)

    @rule(row=st.integers(1, 4), prompt=st.integers(1, 200))
    def open(self, row, prompt):
        if row not in self.rows.live:
            self.rows.open(row, prompt)

    @precondition(lambda self: self.rows.live)
    @rule(data=st.data())
    def step(self, data):
        targets, need = [], 0
        for row, state in self.rows.live.items():
            if not data.draw(st.booleans()) or state.n >= 290:
                continue
            left = state.prompt - state.n
            n1 = state.n + (data.draw(st.integers(1, left)) if left > 0 else 1)
            targets.append((row, n1))
            need += self.layout.pages(n1, state.floor) - self.layout.pages(state.n, state.floor)
        if need > self.ledger.free:
            return
        tails = {row: self._tail(row) for row, _ in targets}
        kept = {row: self._sealed(row) for row, _ in targets}
        queries = {row: self._queries(row) for row, _ in targets}
        self.rows.advance(targets)
        for row, n1 in targets:
            step = self.rows.live[row].step
            assert step.n1 == n1
            # sealed pages never move
            before = kept[row]
            assert all(
                np.array_equal(new[: len(old)], old)
                for old, new in zip(before, self._sealed(row), strict=True)
            )
            if step.tail:
                assert all(np.array_equal(a, b) for a, b in zip(step.tail, tails[row], strict=True))
            # queries of windows that are sealed go with the step, those of others stay in place
            before, after = queries[row], self._queries(row)
            sealed = [before[j] for j in range(step.s0, step.s1) if j in before]
            assert all(np.array_equal(a, b) for a, b in zip(step.queries, sealed, strict=True))
            stayed = before.keys() - range(step.s0, step.s1)
            assert all(np.array_equal(before[j], after[j]) for j in stayed)

    @precondition(lambda self: self.rows.live)
    @rule(data=st.data())
    def close(self, data):
        row = data.draw(st.sampled_from(sorted(self.rows.live)))
        state = self.rows.live[row]
        held = self.layout.pages(state.n, state.floor)
        free = self.ledger.free
        self.rows.close(row)
        assert self.ledger.free == free + held
        assert not self.rows.table[row].any()

    @rule()
    def clear(self):
        self.rows.clear()
        assert self.ledger.free == self.ledger.num_pages

    @invariant()
    def books_are_right(self):
        if hasattr(self, "rows"):
            self.rows.check()

    def _tail(self, row):
        state = self.rows.live[row]
        spans = [self.rows._tail_span(kind, state.n, state.floor) for kind in self.layout.kinds]
        return [
            self.rows.table[row, self.rows._ring(kind, *span)]
            for kind, span in zip(self.layout.kinds, spans, strict=True)
        ]

    def _queries(self, row):
        n, rule, form = self.rows.live[row].n, self.layout.rule, self.layout.queries
        windows = range(rule.sealed(n), form.begun(rule, n))
        return {j: self.rows.table[row, self.rows._query_slots((j,))] for j in windows}

    def _sealed(self, row):
        state = self.rows.live[row]
        sealed = self.layout.rule.sealed(state.n, state.floor)
        offset, per_window = self.layout.table_offset, self.layout.kept // self.layout.rule.page
        return [
            self.rows.table[row, offset[g] : offset[g] + sealed * per_window[g]].copy()
            for g in range(len(self.layout.groups))
        ]


TestRows = RowMachine.TestCase
TestRows.settings = settings(max_examples=40, stateful_step_count=40)


def test_pages_of_a_prompt_stay_promised_until_its_last_chunk():
    rows = Rows(layout(), Ledger(400), 2)
    rows.open(1, 120)
    peak = rows.layout.peak_pages(120)
    assert rows.promised == peak
    for n in (50, 90):
        rows.advance([(1, n)])
        held = rows.layout.pages(n)
        assert rows.promised + held >= rows.layout.pages(120)
        assert rows.promised + held <= peak
    rows.advance([(1, 120)])
    assert rows.promised == 0


def test_a_row_never_shrinks_and_is_opened_once():
    rows = Rows(layout(), Ledger(400), 2)
    rows.open(1, 50)
    rows.advance([(1, 40)])
    with pytest.raises(RuntimeError, match="shrink from 40 to 30"):
        rows.advance([(1, 30)])
    with pytest.raises(RuntimeError, match="in use"):
        rows.open(1, 5)


def test_check_sees_a_table_that_names_another_page():
    rows = Rows(layout(), Ledger(400), 2)
    rows.open(1, 50)
    rows.advance([(1, 50)])
    rows.table[1, rows.layout.table_offset[0]] += 100
    with pytest.raises(RuntimeError, match="other pages"):
        rows.check()


@given(
    floor=st.integers(0, 6),
    raw=st.integers(0, 26),
    cached=st.booleans(),
    ahead=st.integers(1, 150),
    recent=st.integers(0, 40),
    shared=st.integers(0, 20),
    queries=st.integers(0, 16),
)
def test_demand_bounds_what_a_row_holds_on_every_step_of_its_way(
    floor, raw, cached, ahead, recent, shared, queries
):
    """Of a cached tail, pages from ``sole_from`` on are free once they are sealed away."""
    full = ModelShape(tuple(LayerShape(i, 2, 2, 8, None, 1.0) for i in range(2)))
    form = KVLayout.build(
        full,
        WindowRule(16, recent, 4, 2),
        budgets=[0.9, 0.1, 0.5, 0.2],
        retention=0.4,
        per_group=3,
        grouping="global",
        max_tokens=600,
    )
    if queries:
        form = form.with_queries(full, queries)
    rows = Rows(form, Ledger(10), 1)
    n = floor * 16 + min(raw // 4 * 4, (16 + recent) // 4 * 4)
    if cached:
        state = Row(600, n, floor, floor, n)
    else:
        state = Row(600, n, floor)
    start = form.tail_start(None, n, floor)
    sole_from = min(n, start + shared // 4 * 4)
    held = []
    for x in range(n, n + ahead + 1):
        gone = range(start, min(form.tail_start(None, x, floor), n if cached else 0), 4)
        free = sum(t >= sole_from for t in gone) * form.num_full
        held.append(rows.needs.private(state, x) - free)
    assert rows.needs.demand(state, n + ahead, sole_from) == max(held) - held[0]


@given(
    prompt=st.integers(1, 200),
    start=st.integers(0, 260),
    ahead=st.integers(1, 150),
    recent=st.integers(0, 40),
)
def test_demand_of_a_prompt_held_whole_bounds_its_way(prompt, start, ahead, recent):
    form = layout(ReclaimRule(16, recent, 4, 2, longest=400), shape=FULL)
    rows, floor = Rows(form, Ledger(10), 1), -prompt
    held = [form.pages(x, floor) for x in range(start, start + ahead + 1)]
    assert rows.needs.demand(Row(prompt, start, floor), start + ahead, 0) == max(held) - held[0]
    assert form.prompt_pages(prompt) == max(form.pages(x, floor) for x in range(prompt + 1))


@pytest.mark.parametrize(("shape", "floor"), [(SHAPE, 0), (FULL, 0), (FULL, 3)])
@pytest.mark.parametrize(("queries", "scores"), [(0, False), (5, True), (16, False), (0, True)])
@pytest.mark.parametrize("recent", [0, 4, 16])
def test_quiet_steps_change_no_page_and_the_next_one_does(recent, queries, scores, shape, floor):
    """Layers with and without a sliding window, cached windows; ``advance`` skips what it does for other steps."""
    form = layout(WindowRule(16, recent, 4, 2), queries=queries, scores=scores, shape=shape)
    for n in range(1 + floor * 16, 120 + floor * 16):

        def rows_at(tokens, quiet, n=n):
            rows = Rows(form, Ledger(600), 1)
            cached = [rows.ledger.take(form.window_pages, -1) for _ in range(floor)]
            rows.open(1, n, cached)
            rows.advance([(1, n)])
            if not quiet:
                rows.live[1].quiet = rows.live[1].steady = 0
            rows.advance([(1, tokens)])
            rows.check()
            return rows

        last = rows_at(n, True).live[1].quiet
        assert last >= n
        before = rows_at(n, True).private_pages(1)
        quiet, slow = rows_at(last, True), rows_at(last, False)
        assert np.array_equal(before, quiet.private_pages(1))
        assert np.array_equal(before, slow.private_pages(1))
        assert quiet.granted == slow.granted or slow.granted[0].tail
        assert not np.array_equal(before, rows_at(last + 1, True).private_pages(1))


@pytest.mark.parametrize(("shape", "floor"), [(SHAPE, 0), (FULL, 0), (FULL, 3)])
@pytest.mark.parametrize(("queries", "scores"), [(0, False), (5, True)])
def test_steps_that_turn_a_page_are_those_of_the_long_way(queries, scores, shape, floor):
    """Token by token, and two and five at a time; what the next token needs is foretold."""
    form = layout(WindowRule(16, 4, 4, 2), queries=queries, scores=scores, shape=shape)
    for stride in (1, 2, 5):
        both = []
        for _ in range(2):
            rows = Rows(form, Ledger(600), 1)
            cached = [rows.ledger.take(form.window_pages, -1) for _ in range(floor)]
            rows.open(1, 18 + 16 * floor, cached)
            rows.advance([(1, 18 + 16 * floor)])
            both.append(rows)
        short, long = both
        turned = 0
        for n in range(18 + 16 * floor + stride, 100 + 16 * floor, stride):
            turned += short.needs.turns(short.live[1], n)
            long.live[1].quiet = long.live[1].steady = 0
            if stride == 1:
                assert short.next_needs([1]) == long.next_needs([1])
            for rows in both:
                rows.advance([(1, n)])
                rows.check()
            # the same pages but for their numbers
            owned = [(rows.table[1] > 0).tolist() for rows in both]
            assert owned[0] == owned[1]
            for a, b in zip(short.granted, long.granted, strict=True):
                assert (a.n0, a.n1, a.s0, a.s1, a.floor) == (b.n0, b.n1, b.s0, b.s1, b.floor)
            assert len(short.taken) == len(long.taken)
        assert turned > 3 or shape is SHAPE or stride > 4
