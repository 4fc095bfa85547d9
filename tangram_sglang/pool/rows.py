"""Request rows: which pages each one holds, and how a forward step changes that.

A row grows from n0 to n1 tokens in one step. In a group of full-attention heads its pages are

    before:  [ sealed windows 0..s0 )  [ tail: tokens s0*W .. n0 )
    after:   [ sealed windows 0..s1 )  [ tail: tokens s1*W .. n1 )

    sealed windows s0..s1   taken now; the step fills them
    tail   s0*W .. s1*W     given back now; the step reads them before it writes anything
    tail   s1*W .. n0       kept where they are
    tail   n0   .. n1       taken now, as whole pages

A sliding-window group has no sealed windows and its tail starts where the window does. Pages
given back may be handed to another row of the same step. That is safe because a step copies the
tails it still needs (``Step.tail``) before any of its writes, and steps run in order.
"""

from dataclasses import dataclass

import numpy as np

from tangram_sglang.plan.layout import Kind, KVLayout
from tangram_sglang.pool.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward step does to a row.

    Attributes:
        row: row of the page table.
        n0, n1: tokens stored before and after.
        s0, s1: sealed windows before and after.
        tail: page ids of the tail before the step, [groups, pages] int32 per kind of group; empty
            where the step does not move it.
    """

    row: int
    n0: int
    n1: int
    s0: int
    s1: int
    tail: tuple[np.ndarray, ...]


@dataclass(slots=True)
class Row:
    """A live request.

    Attributes:
        n: tokens stored once the steps granted so far have run.
        prompt: tokens of the prompt, whose pages are promised from admission on.
        step: the last step granted.
    """

    prompt: int
    n: int = 0
    step: Step | None = None


class Rows:
    """Rows 1..max_rows over one ledger; row 0 is the dummy of padded batches.

    Args:
        layout: closed forms of every length.
        ledger: owner of the pages.
        max_rows: highest row id.
    """

    def __init__(self, layout: KVLayout, ledger: Ledger, max_rows: int):
        self.layout = layout
        self.ledger = ledger
        self.table = np.zeros((max_rows + 1, int(layout.table_offset[-1])), dtype=np.int32)
        self.live: dict[int, Row] = {}

    def open(self, row: int, prompt: int) -> None:
        """Start a request of ``prompt`` tokens on ``row``."""
        if row in self.live:
            raise RuntimeError(f"row {row} is in use")
        self.live[row] = Row(prompt)

    def advance(self, targets: list[tuple[int, int]]) -> None:
        """Grow each (row, tokens) of one forward step; takes and gives back all pages it needs.

        Raises:
            RuntimeError: the pages are not there, or a row would shrink.
        """
        steps = [self._plan_step(row, n1) for row, n1 in targets]
        for step in steps:
            self._give_tail(step)
        for step in steps:
            self._take(step)
            state = self.live[step.row]
            state.n, state.step = step.n1, step

    def close(self, row: int) -> None:
        """Give back everything the row holds."""
        if row in self.live:
            self.ledger.give(self.pages_of(row), row)
            self.table[row] = 0
            del self.live[row]

    def clear(self) -> None:
        """Drop every row."""
        self.live.clear()
        self.table[:] = 0
        self.ledger.clear()

    @property
    def promised(self) -> int:
        """Pages that prompts still in prefill will take and no one else may."""
        return sum(
            max(0, self.layout.peak_pages(r.prompt, r.n) - self.layout.pages(r.n))
            for r in self.live.values()
            if r.n < r.prompt
        )

    def check(self) -> None:
        """Ledger consistent, and every row owns exactly the pages its table names and predicts."""
        self.ledger.check()
        for row, state in self.live.items():
            held = self.ledger.owned(row)
            predicted = self.layout.pages(state.n)
            if len(held) != predicted:
                raise RuntimeError(f"row {row} holds {len(held)} pages, predicted {predicted}")
            if not np.array_equal(np.sort(self.pages_of(row)), held):
                raise RuntimeError(f"row {row}: its table names other pages than it owns")

    def pages_of(self, row: int) -> np.ndarray:
        """All page ids of a row: sealed ones group by group, then the tails."""
        n = self.live[row].n
        tails = [self._ring(kind, *self._tail_span(kind, n)).ravel() for kind in self.layout.kinds]
        slots = [self._sealed_slots(0, self.layout.rule.sealed(n)), *tails]
        return self.table[row, np.concatenate(slots)]

    def _tail_span(self, kind: Kind, n: int) -> tuple[int, int]:
        """First and one past the last tail page, counted from token 0."""
        rule = self.layout.rule
        return self.layout.tail_start(kind.sliding_window, n) // rule.page, rule.pages(n)

    def _ring(self, kind: Kind, first: int, end: int) -> np.ndarray:
        """Table entries of tail pages first..end, [groups of the kind, pages]."""
        offset = self.layout.ring_offset[kind.first : kind.end]
        return offset[:, None] + np.arange(first, end) % kind.ring

    def _plan_step(self, row: int, n1: int) -> Step:
        n0, prompt = self.live[row].n, self.live[row].prompt
        if n1 < n0:
            raise RuntimeError(f"row {row} would shrink from {n0} to {n1} tokens")
        s0, s1 = self.layout.rule.sealed(n0), self.layout.rule.sealed(n1)
        tail = ()
        # a decode step that seals nothing reads its tail where it lies
        if n0 < prompt or s1 > s0:
            tail = tuple(
                self.table[row, self._ring(kind, *self._tail_span(kind, n0))]
                for kind in self.layout.kinds
            )
        return Step(row, n0, n1, s0, s1, tail)

    def _give_tail(self, step: Step) -> None:
        for kind in self.layout.kinds:
            first, end = self._tail_span(kind, step.n0)
            gone = self._ring(kind, first, min(end, self._tail_span(kind, step.n1)[0])).ravel()
            if len(gone):
                self.ledger.give(self.table[step.row, gone], step.row)

    def _take(self, step: Step) -> None:
        slots = [self._sealed_slots(step.s0, step.s1)] if step.s1 > step.s0 else []
        for kind in self.layout.kinds:
            first, end = self._tail_span(kind, step.n1)
            first = max(first, self.layout.rule.pages(step.n0))
            if first < end:
                slots.append(self._ring(kind, first, end).ravel())
        if slots:
            slots = np.concatenate(slots)
            self.table[step.row, slots] = self.ledger.take(len(slots), step.row)

    def _sealed_slots(self, s0: int, s1: int) -> np.ndarray:
        """Table entries of windows s0..s1, group by group."""
        per_window = self.layout.kept // self.layout.rule.page
        starts = self.layout.table_offset[:-1]
        spans = [np.arange(a + s0 * p, a + s1 * p) for a, p in zip(starts, per_window, strict=True)]
        return np.concatenate(spans)
