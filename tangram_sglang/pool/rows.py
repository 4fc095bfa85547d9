"""Request rows: which pages each one holds, and how a forward step changes that.

A row grows from n0 to n1 tokens in one step. In a group of full-attention heads its pages are

    before:  [ sealed windows 0..s0 )  [ tail: tokens s0*W .. n0 )
    after:   [ sealed windows 0..s1 )  [ tail: tokens s1*W .. n1 )

    sealed windows s0..s1   taken now; the step fills them
    tail   s0*W .. s1*W     given back now; the step reads them before it writes anything
    tail   s1*W .. n0       kept where they are
    tail   n0   .. n1       taken now, as whole pages

A sliding-window group has no sealed windows and its tail starts where the window does.

The first pages of a row may belong to the prefix cache: windows 0..cached_windows and tail tokens
before cached_tokens. A row reads them and neither gives them back nor writes to them.

Pages given back may be handed to another row of the same step. That is safe because a step copies the
tails it still needs (``Step.tail``) before any of its writes, and steps run in order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tangram_sglang.plan.layout import Kind, KVLayout
from tangram_sglang.pool.ledger import Ledger

_NO_SLOTS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward step does to a row.

    Attributes:
        row: row of the page table.
        n0, n1: tokens stored before and after.
        s0, s1: sealed windows before and after.
        floor: windows that the row started from.
        tail: page ids of the tail before the step, [groups, pages] int32 per kind of group; empty
            where the step does not move it.
    """

    row: int
    n0: int
    n1: int
    s0: int
    s1: int
    floor: int
    tail: tuple[np.ndarray, ...]


@dataclass(slots=True)
class Row:
    """A live request.

    Attributes:
        n: tokens stored once the steps granted so far have run.
        prompt: tokens of the prompt, whose pages are promised from admission on.
        floor: windows sealed from the start on, whatever ``n`` says.
        cached_windows, cached_tokens: what the prefix cache owns of the row's windows and tail;
            ``cached_tokens`` is a page border.
        step: the last step granted.
    """

    prompt: int
    n: int = 0
    floor: int = 0
    cached_windows: int = 0
    cached_tokens: int = 0
    step: Step | None = None


class Rows:
    """Rows 1..max_rows over one ledger; row 0 is the dummy of padded batches.

    Args:
        layout: closed forms of every length.
        ledger: owner of the pages.
        max_rows: highest row id.

    ``evict`` is called with a number of pages that must become free; ``tail_left`` with a row
    that seals some of its cached tail away, before it takes pages. The prefix cache sets both.
    """

    def __init__(self, layout: KVLayout, ledger: Ledger, max_rows: int):
        self.layout = layout
        self.ledger = ledger
        self.table = np.zeros((max_rows + 1, int(layout.table_offset[-1])), dtype=np.int32)
        self.live: dict[int, Row] = {}
        self.evict: Callable[[int], object] = lambda pages: None
        self.tail_left: Callable[[int], None] = lambda row: None

    def open(
        self,
        row: int,
        prompt: int,
        windows: Sequence[np.ndarray] = (),
        tail: Sequence[np.ndarray] = (),
    ) -> None:
        """Start a request of ``prompt`` tokens on ``row`` behind a cached prefix.

        Args:
            windows: pages of each cached window, in the order of ``window_pages``.
            tail: pages of each cached tail page, in the order of ``tail_page``.
        """
        if row in self.live:
            raise RuntimeError(f"row {row} is in use")
        rule, floor = self.layout.rule, len(windows)
        n = floor * rule.window + len(tail) * rule.page
        self.live[row] = Row(prompt, n, floor, floor, n)
        for j, pages in enumerate(windows):
            self.table[row, self._sealed_slots(j, j + 1)] = pages
        for i, pages in enumerate(tail, floor * rule.window // rule.page):
            self.table[row, self._full_ring(i)] = pages

    def advance(self, targets: list[tuple[int, int]]) -> None:
        """Grow each (row, tokens) of one forward step; takes and gives back all pages it needs.

        Raises:
            RuntimeError: the pages are not there, or a row would shrink.
        """
        steps = [self._plan_step(row, n1) for row, n1 in targets]
        for step in steps:
            self._give_tail(step)
            state = self.live[step.row]
            state.n, state.step = step.n1, step
            if step.s1 > step.s0 and state.cached_tokens > step.s0 * self.layout.rule.window:
                self.tail_left(step.row)
        slots = [self._new_slots(step) for step in steps]
        short = sum(map(len, slots)) - self.ledger.free
        if short > 0:
            self.evict(short)
        for step, new in zip(steps, slots, strict=True):
            if len(new):
                self.table[step.row, new] = self.ledger.take(len(new), step.row)

    def close(self, row: int) -> None:
        """Give back everything the row owns."""
        if row in self.live:
            self.ledger.give(self.private_pages(row), row)
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
            max(0, self.demand(state, state.prompt))
            for state in self.live.values()
            if state.n < state.prompt
        )

    def demand(self, state: Row, n: int) -> int:
        """Most pages that a row takes, less those it gives back, on its way to ``n`` tokens.

        Cached tail pages count for nothing when they are sealed away: they stay with the cache, and
        others may hold them. They are gone within the windows that W + R raw tokens reach into;
        from there on the most is held where ``KVLayout.peak_pages`` says.
        """
        if not state.cached_windows and not state.cached_tokens:
            peak = self.layout.peak_pages(n, state.n, state.floor)
            return peak - self.layout.pages(state.n, state.floor)
        rule = self.layout.rule
        s0, s1 = rule.sealed(state.n, state.floor), rule.sealed(n, state.floor)
        near = range(s0, min(s1, s0 + 2 + -(-rule.recent // rule.window)))
        ends = [rule.epoch_end(s) for s in {*near, s1 - 1} if s >= s0]
        points = {n, *(e + i for e in ends for i in (0, 1) if state.n <= e + i <= n)}
        return max(self.private(state, x) for x in points) - self.private(state, state.n)

    def private(self, state: Row, n: int) -> int:
        """Pages that a row owns at ``n`` tokens, with what the cache has of it now."""
        return self.layout.pages(n, state.floor) - self.shared(state, n)

    def shared(self, state: Row, n: int) -> int:
        """Pages that a row reads at ``n`` tokens and the prefix cache owns."""
        start = self.layout.tail_start(None, n, state.floor)
        tail = max(0, state.cached_tokens - start) // self.layout.rule.page
        return state.cached_windows * self.layout.window_pages + tail * self.layout.num_full

    def check(self) -> None:
        """Ledger consistent; every row owns exactly the pages its table names and predicts."""
        self.ledger.check()
        for row, state in self.live.items():
            held = self.ledger.owned(row)
            predicted = self.private(state, state.n)
            if len(held) != predicted:
                raise RuntimeError(f"row {row} owns {len(held)} pages, predicted {predicted}")
            if not np.array_equal(np.sort(self.private_pages(row)), held):
                raise RuntimeError(f"row {row}: its table names other pages than it owns")

    def private_pages(self, row: int) -> np.ndarray:
        """Page ids the row owns: sealed ones group by group, then the tails."""
        state, page = self.live[row], self.layout.rule.page
        sealed = self.layout.rule.sealed(state.n, state.floor)
        slots = [self._sealed_slots(state.cached_windows, sealed)]
        for kind in self.layout.kinds:
            first, end = self._tail_span(kind, state.n, state.floor)
            if kind.sliding_window is None:
                first = max(first, state.cached_tokens // page)
            slots.append(self._ring(kind, first, end).ravel())
        return self.table[row, np.concatenate(slots)]

    def window_pages(self, row: int, window: int) -> np.ndarray:
        """Pages of a sealed window, group by group."""
        return self.table[row, self._sealed_slots(window, window + 1)]

    def tail_page(self, row: int, page: int) -> np.ndarray:
        """Raw pages of tokens page*P.. in the full-attention groups, a page a group."""
        return self.table[row, self._full_ring(page)]

    def tail_start(self, row: int) -> int:
        """First token that the row holds raw in the full-attention groups."""
        state = self.live[row]
        return self.layout.tail_start(None, state.n, state.floor)

    def share_window(self, row: int, pages: np.ndarray, owner: int | None) -> None:
        """The row's next private window becomes the cache's.

        Args:
            pages: what the cache owns: the row's own pages, or those of an equal window.
            owner: new owner of the row's own pages, or None to give them back.
        """
        state = self.live[row]
        self._share(
            row, self._sealed_slots(state.cached_windows, state.cached_windows + 1), pages, owner
        )
        state.cached_windows += 1

    def share_tail_page(self, row: int, page: int, pages: np.ndarray, owner: int | None) -> None:
        """The same for the raw pages of tokens page*P..; in order of ``page``."""
        self._share(row, self._full_ring(page), pages, owner)
        self.live[row].cached_tokens = (page + 1) * self.layout.rule.page

    def _share(self, row, slots, pages, owner) -> None:
        mine = self.table[row, slots]
        if owner is None:
            self.ledger.give(mine, row)
            self.table[row, slots] = pages
        else:
            self.ledger.hand_over(mine, row, owner)

    def _full_ring(self, page: int) -> np.ndarray:
        return self._ring(self.layout.kinds[0], page, page + 1)[:, 0]

    def _tail_span(self, kind: Kind, n: int, floor: int) -> tuple[int, int]:
        """First and one past the last tail page, counted from token 0."""
        rule = self.layout.rule
        return self.layout.tail_start(kind.sliding_window, n, floor) // rule.page, rule.pages(n)

    def _ring(self, kind: Kind, first: int, end: int) -> np.ndarray:
        """Table entries of tail pages first..end, [groups of the kind, pages]."""
        offset = self.layout.ring_offset[kind.first : kind.end]
        return offset[:, None] + np.arange(first, end) % kind.ring

    def _plan_step(self, row: int, n1: int) -> Step:
        state = self.live[row]
        n0 = state.n
        if n1 < n0:
            raise RuntimeError(f"row {row} would shrink from {n0} to {n1} tokens")
        s0, s1 = (self.layout.rule.sealed(n, state.floor) for n in (n0, n1))
        tail = ()
        # a decode step that seals nothing reads its tail where it lies
        if n0 < state.prompt or s1 > s0:
            tail = tuple(
                self.table[row, self._ring(kind, *self._tail_span(kind, n0, state.floor))]
                for kind in self.layout.kinds
            )
        return Step(row, n0, n1, s0, s1, state.floor, tail)

    def _give_tail(self, step: Step) -> None:
        cached = self.live[step.row].cached_tokens // self.layout.rule.page
        for kind in self.layout.kinds:
            first, end = self._tail_span(kind, step.n0, step.floor)
            if kind.sliding_window is None:
                first = max(first, cached)
            end = min(end, self._tail_span(kind, step.n1, step.floor)[0])
            gone = self._ring(kind, first, end).ravel()
            if len(gone):
                self.ledger.give(self.table[step.row, gone], step.row)

    def _new_slots(self, step: Step) -> np.ndarray:
        slots = [self._sealed_slots(step.s0, step.s1)] if step.s1 > step.s0 else []
        for kind in self.layout.kinds:
            first, end = self._tail_span(kind, step.n1, step.floor)
            first = max(first, self.layout.rule.pages(step.n0))
            if first < end:
                slots.append(self._ring(kind, first, end).ravel())
        return np.concatenate(slots) if slots else _NO_SLOTS

    def _sealed_slots(self, s0: int, s1: int) -> np.ndarray:
        """Table entries of windows s0..s1, group by group."""
        per_window = self.layout.kept // self.layout.rule.page
        starts = self.layout.table_offset[:-1]
        spans = [np.arange(a + s0 * p, a + s1 * p) for a, p in zip(starts, per_window, strict=True)]
        return np.concatenate(spans)
