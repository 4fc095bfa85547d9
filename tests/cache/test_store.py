"""Rows, ledger and trie together, driven in any order; what a page holds is tracked beside."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tangram_sglang.cache.store import PrefixStore
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.pool.ledger import Ledger
from tangram_sglang.pool.row import Row
from tangram_sglang.pool.rows import Rows


def shape_of(slide: int) -> ModelShape:
    """Three layers of full attention and, with a sliding window, two more."""
    windows = [None, slide, None, slide, None] if slide else [None] * 3
    return ModelShape(tuple(LayerShape(i, 3, 3, 8, w, 1.0) for i, w in enumerate(windows)))


# drawn once: a cut of one of them is a prompt
TEXTS = [random.Random(seed).choices([1, 2], k=200) for seed in range(2)]


class PoolMachine(RuleBasedStateMachine):
    """Admit, fork, prefill in chunks, decode, publish, finish, abort, retract, evict and flush.

    ``content`` says for which tokens each page was written last: a request must find in every page
    of its table what it would have written there itself.
    """

    @initialize(
        recent=st.integers(0, 20),
        pages=st.sampled_from([60, 100, 400]),
        queries=st.sampled_from([0, 0, 1, 6, 16]),
        scores=st.booleans(),
        slide=st.sampled_from([0, 0, 4, 12, 40]),
    )
    def build(self, recent, pages, queries=0, scores=False, slide=0):
        shape = shape_of(slide)
        layout = KVLayout.build(
            shape,
            WindowRule(16, recent, 4, 2),
            budgets=[i / 9 for i in range(9)],
            retention=0.4,
            per_group=3,
            grouping="global",
            max_tokens=300,
        )
        if queries:
            layout = layout.with_queries(shape, queries)
        if scores:
            layout = layout.with_scores()
        self.rows = Rows(layout, Ledger(pages), 3)
        self.taken = self._note_taken()
        self.rows.tail_left = self._leave_tail
        self.rows.slide_left = lambda row: self._relock(row, self.locks[row].without_slide())
        self.rows.sole_from = lambda row: self.locks[row].sole_from(4)
        self.store = PrefixStore(self.rows)
        self.texts: dict[int, list[int]] = {}
        self.locks = {}
        self.content: dict[int, tuple] = {}
        # texts of all requests so far, and of those that were retracted
        self.said: list[list[int]] = []
        self.retracted: list[list[int]] = []

    @precondition(lambda self: len(self.rows.live) < 3)
    @rule(
        text=st.sampled_from(TEXTS),
        cut=st.integers(1, 200),
        more=st.lists(st.sampled_from([1, 2]), max_size=30),
    )
    def admit(self, text, cut, more):
        """Texts share what they begin with: another user of a document, or a turn."""
        self._admit([*text[:cut], *more])

    @precondition(lambda self: self.said and len(self.rows.live) < 3)
    @rule(data=st.data(), cut=st.integers(1, 250), token=st.integers(1, 2))
    def fork(self, data, cut, token):
        """Go on from anywhere in what a request, live or gone, was given and said."""
        base = data.draw(st.integers(1, min(4, len(self.said))))
        self._admit([*self.said[-base][:cut], token])

    @precondition(lambda self: self.retracted and len(self.rows.live) < 3)
    @rule()
    def resume(self):
        """All that was said before the retraction is prompt now."""
        if self._admit(self.retracted[0]):
            self.retracted.pop(0)

    def _admit(self, text) -> bool:
        row = min({1, 2, 3} - self.rows.live.keys())
        prefix = self.store.trie.match(None, text, len(text) - 1)
        self.store.trie.lock(prefix)
        windows = len(prefix.windows)
        slide = prefix.tokens if prefix.slide else 0
        start = Row(len(text), prefix.tokens, windows, windows, prefix.tokens, slide)
        need = self.rows.needs.demand(start, len(text), prefix.sole_from(4))
        if need > self._unpromised:
            self.store.trie.unlock(prefix)
            return False
        self.rows.open(
            row,
            len(text),
            *([x.pages for x in nodes] for nodes in (prefix.windows, prefix.tail, prefix.slide)),
        )
        rule, queries = self.rows.layout.rule, self.rows.layout.queries
        # no query that will be read lies before the row's first token
        assert queries.begun(rule, prefix.tokens) <= windows
        self.texts[row], self.locks[row] = list(text), prefix
        self.said.append(self.texts[row])
        self._read(row)
        return True

    @precondition(lambda self: self._rows(True))
    @rule(data=st.data(), size=st.sampled_from([1, 7, 16, 40, 200]))
    def chunk(self, data, size):
        """Prefill: its pages were promised, so no one is asked for them."""
        row = data.draw(st.sampled_from(self._rows(True)))
        state = self.rows.live[row]
        self._advance(row, min(state.prompt, state.n + size))

    @precondition(lambda self: self._rows(False))
    @rule(data=st.data(), tokens=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=40))
    def decode(self, data, tokens):
        """Admission has promised nothing for these."""
        row = data.draw(st.sampled_from(self._rows(False)))
        state = self.rows.live[row]
        for token in tokens:
            need = self.rows.row_demand(row, state.n + 1)
            if state.n > 250 or need > self._unpromised:
                return
            self.texts[row].append(token)
            self._advance(row, state.n + 1)

    @precondition(lambda self: self.rows.live)
    @rule(data=st.data())
    def publish(self, data):
        """As at the end of every chunk."""
        self._publish(self._any_row(data))

    @precondition(lambda self: self.rows.live)
    @rule(data=st.data(), how=st.sampled_from(["finish", "finish", "strip", "abort", "retract"]))
    def leave(self, data, how):
        """A finished request publishes; a retracted one does not, and comes back with its text.

        With --strip-thinking-cache it publishes its prompt alone.
        """
        row = self._any_row(data)
        if how == "finish":
            self._publish(row)
        if how == "strip":
            self._publish(row, self.rows.live[row].prompt)
        if how == "retract":
            self.retracted.append(self.texts[row])
        self._close(row)

    @rule(pages=st.integers(1, 50))
    def evict(self, pages):
        self.store.trie.evict(pages)

    @precondition(lambda self: not self.rows.live)
    @rule()
    def flush(self):
        self.store.trie.clear()
        self.rows.clear()
        assert self.rows.ledger.free == self.rows.ledger.num_pages

    @invariant()
    def books_are_right(self):
        if hasattr(self, "store"):
            self.store.check()
            assert all(len(x.key) == 16 for x in self.store.trie.nodes() if x.is_window)

    @property
    def _unpromised(self) -> int:
        """Pages that are free or would be, less those promised to prompts."""
        reachable = self.rows.ledger.free + self.store.trie.unlocked_pages
        return reachable - self.rows.promised

    def _rows(self, in_prompt: bool) -> list[int]:
        live = self.rows.live.items()
        return [row for row, state in live if (state.n < state.prompt) == in_prompt]

    def _any_row(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.rows.live)))

    def _note_taken(self) -> set[int]:
        """Pages that the ledger hands out; the step that takes them writes to them."""
        taken, take = set(), self.rows.ledger.take

        def noting(count, row):
            pages = take(count, row)
            taken.update(pages.tolist())
            return pages

        self.rows.ledger.take = noting
        return taken

    def _advance(self, row, n1):
        partial = self._partial(row)
        self.taken.clear()
        self.rows.advance([(row, n1)])
        self._write(row, partial)
        self._read(row)

    def _publish(self, row, limit=300):
        if self.rows.live[row].n:
            text = self.texts[row][: min(self.rows.live[row].n, limit)]
            prefix = self.store.publish(row, None, text)
            self._relock(row, prefix)
            self._read(row)
            found, rule = self.store.trie.match(None, text, len(text)), self.rows.layout.rule
            back = -(-rule.recent // rule.window)
            windows = len(prefix.windows)
            raw = min(len(prefix.tail) * rule.page, self.rows.layout.queries.reusable(rule))
            exact = not windows or raw >= rule.recent
            least = windows * rule.window + raw if exact else (windows - back) * rule.window
            if self.rows.layout.slide and (prefix.tokens > least or not prefix.slide):
                # the sliding window behind a shorter state may be nobody's
                least = 0
            assert found.tokens >= least

    def _close(self, row):
        self.store.trie.unlock(self.locks.pop(row))
        self.rows.close(row)
        del self.texts[row]

    def _relock(self, row, prefix):
        self.store.trie.lock(prefix)
        self.store.trie.unlock(self.locks[row])
        self.locks[row] = prefix

    def _leave_tail(self, row, start):
        self._relock(row, self.locks[row].behind(start))

    def _pages(self, row, written=False):
        """(page, what it must hold) for all that the row reads, or may have written."""
        state, rule = self.rows.live[row], self.rows.layout.rule
        text, sealed = self.texts[row], rule.sealed(state.n, state.floor)
        for j in range(sealed):
            for i, page in enumerate(self.rows.window_pages(row, j)):
                yield int(page), ("window", i, tuple(text[: (j + 1) * rule.window]))
        for p in range(sealed * rule.window // rule.page, rule.pages(state.n)):
            for g, page in enumerate(self.rows.tail_page(row, p)):
                yield int(page), ("raw", g, tuple(text[: min(state.n, (p + 1) * rule.page)]))
        if slide := self.rows.layout.slide:
            start = self.rows.layout.tail_start(slide, state.n)
            if written:
                start = max(state.cached_slide, self.rows.layout.held_start(slide, state.n))
            for p in range(start // rule.page, rule.pages(state.n)):
                for g, page in enumerate(self.rows.slide_page(row, p)):
                    yield int(page), ("slide", g, tuple(text[: min(state.n, (p + 1) * rule.page)]))
        for j in range(sealed, self.rows.layout.queries.begun(rule, state.n)):
            for i, page in enumerate(self.rows.table[row, self.rows._query_slots((j,))]):
                yield int(page), ("queries", i, tuple(text[: min(state.n, (j + 1) * rule.window)]))

    def _partial(self, row) -> set[int]:
        """The row's last pages, if they have room; they are never shared."""
        n, page = self.rows.live[row].n, self.rows.layout.rule.page
        if not n % page:
            return set()
        pages = self.rows.tail_page(row, n // page).tolist()
        if self.rows.layout.slide:
            pages += self.rows.slide_page(row, n // page).tolist()
        return set(pages)

    def _write(self, row, partial):
        """A step writes to the pages that it takes and to those that had room."""
        for page, held in self._pages(row, written=True):
            # queries are never shared, and a step adds to those it finds
            grown = held[0] == "queries" or page in partial
            if page in self.taken or grown:
                self.content[page] = held

    def _read(self, row):
        for page, held in self._pages(row):
            assert self.content[page] == held


def test_a_prompt_that_seals_a_part_of_its_cached_tail_finds_the_pages_it_was_promised():
    """The pool holds this prompt and no page more; its first chunk is published whole."""
    machine = PoolMachine()
    machine.build(recent=12, pages=25)
    text = TEXTS[0][:47]
    assert machine.rows.layout.peak_pages(len(text)) == 25
    assert machine._admit(text)
    machine._advance(1, 40)
    machine._publish(1)
    # tokens 16..32 are sealed away, tokens 32..40 stay in the tail
    machine._advance(1, 47)
    machine.books_are_right()


@pytest.mark.parametrize("slide", [0, 12])
@pytest.mark.parametrize("more", [17, 80])
def test_a_prompt_that_passes_what_another_request_sealed_finds_the_pages_it_was_promised(
    slide, more
):
    """A seals the first window of a tail that B starts from, and reads on behind it, as B does."""
    admitted = 0
    for pages in range(20, 300):
        machine = PoolMachine()
        machine.build(recent=12, pages=pages, slide=slide)
        text = TEXTS[0][:44]
        if not machine._admit(text):
            continue
        machine._advance(1, 44)
        machine._publish(1)
        if machine.rows.row_demand(1, 45) > machine._unpromised:
            continue
        machine.texts[1].append(1)
        machine._advance(1, 45)
        if machine._admit([*text, *[2] * more]):
            admitted += 1
            assert machine.rows.live[2].cached_tokens == 44
            machine._advance(2, 44 + more)
            machine.books_are_right()
    assert 100 < admitted < 280


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=60)
