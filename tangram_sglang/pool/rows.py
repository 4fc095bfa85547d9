"""Request rows: which pages each one holds, and how a forward step changes that.

A row grows from n0 to n1 tokens in one step. In a group of full-attention heads its pages are

    before:  [ sealed windows 0..s0 )  [ tail: tokens s0*W .. n0 )
    after:   [ sealed windows 0..s1 )  [ tail: tokens s1*W .. n1 )

    sealed windows s0..s1   taken now; the step fills them
    tail   s0*W .. s1*W     given back now; the step reads them before it writes anything
    tail   s1*W .. n0       kept where they are
    tail   n0   .. n1       taken now, as whole pages

A sliding-window group has no sealed windows and its tail starts where the window does. The queries
of windows not sealed yet have pages of their own (``plan.queries``): those of windows s0..s1 are given
back like the tail, those of windows begun since are taken.

The first pages of a row may belong to the prefix cache: windows 0..cached_windows, tail tokens before
cached_tokens, and those of sliding windows before cached_slide. A row reads them and neither gives
them back nor writes to them.

Pages given back may be handed to another row of the same step. That is safe because a step copies the
tails it still needs (``Step.tail``) before any of its writes, and steps run in order.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tangram_sglang.plan.layout import Kind, KVLayout
from tangram_sglang.pool.ledger import Ledger
from tangram_sglang.pool.needs import Needs
from tangram_sglang.pool.row import Row, Step
from tangram_sglang.pool.tally import Tally

_NO_SLOTS = np.empty(0, dtype=np.int64)
_NO_PAGES = np.empty(0, dtype=np.int32)


class Rows:
    """Rows 1..max_rows over one ledger; row 0 is the dummy of padded batches.

    Args:
        layout: closed forms of every length.
        ledger: owner of the pages.
        max_rows: highest row id.

    The prefix cache sets four callbacks. ``evict`` is called with a number of pages that must
    become free; ``tail_left`` with a row and the token before which it now seals its cached tail
    away; ``slide_left`` with a row whose sliding windows lie behind what is cached of them;
    ``sole_from`` with a row, and answers from which token on nobody else reads its cached tail.

    ``pointed`` is called with a row and the table entries of it that have changed; a copy of the
    table elsewhere follows it. ``granted`` holds the steps of the last ``advance``, in its order,
    and ``taken`` the pages it handed out, of which the step still reads ``spare`` at most.
    ``prefixes`` counts the changes of which rows there are and what they have from the prefix cache.
    """

    def __init__(self, layout: KVLayout, ledger: Ledger, max_rows: int):
        self.layout = layout
        self.ledger = ledger
        self.table = np.zeros((max_rows + 1, layout.table_slots), dtype=np.int32)
        self.live: dict[int, Row] = {}
        self.tally = Tally()
        self.evict: Callable[[int], object] = lambda pages: None
        self.tail_left: Callable[[int, int], None] = lambda row, start: None
        self.slide_left: Callable[[int], None] = lambda row: None
        self.sole_from: Callable[[int], int] = lambda row: self.live[row].cached_tokens
        self.pointed: Callable[[int, np.ndarray], None] = lambda row, slots: None
        self.granted: list[Step] = []
        self.taken = _NO_PAGES
        self.spare = 1 << 40
        self.prefixes = 0
        self.needs = Needs(layout)

    def open(
        self,
        row: int,
        prompt: int,
        windows: Sequence[np.ndarray] = (),
        tail: Sequence[np.ndarray] = (),
        slide: Sequence[np.ndarray] = (),
    ) -> None:
        """Start a request of ``prompt`` tokens on ``row`` behind a cached prefix.

        Args:
            windows: pages of each cached window, in the order of ``window_pages``.
            tail: pages of each cached tail page, in the order of ``tail_page``.
            slide: those of the sliding windows that end where the tail does.
        """
        if row in self.live:
            raise RuntimeError(f"row {row} is in use")
        rule, count = self.layout.rule, len(windows)
        n = count * rule.window + len(tail) * rule.page
        floor = rule.floor(prompt, count)
        self.live[row] = Row(prompt, n, floor, count, n, n if slide else 0)
        self.prefixes += 1
        for j, pages in enumerate(windows):
            self._point(row, self._sealed_slots(j, j + 1), pages)
        for i, pages in enumerate(tail, count * rule.window // rule.page):
            self._point(row, self._full_ring(i), pages)
        for i, pages in enumerate(slide, n // rule.page - len(slide)):
            self._point(row, self._sliding_ring(i), pages)

    def advance(self, targets: list[tuple[int, int]]) -> None:
        """Grow each (row, tokens) of one forward step; takes and gives back all pages it needs.

        Raises:
            RuntimeError: the pages are not there, or a row would shrink.
        """
        self.granted = [self._quiet_step(row, n1) or self._step(row, n1) for row, n1 in targets]
        steps = [step for step in self.granted if step is not self.live[step.row].step]
        for step in steps if self.layout.slide else ():
            self._leave_slide(step)
        slots = [self._new_slots(step) for step in steps]
        need = sum(map(len, slots))
        leaving = [step for step in steps if self._leaves_cached_tail(step)]
        # a step reads the tails it moves, so they are handed out last: first what rows give back
        # themselves, then what they leave with the cache
        scarce = need > self.ledger.free
        if scarce:
            # what the cache can do without goes before more than ``spare`` pages change hands
            self.evict(max(0, need - self.ledger.free - self.spare))
            for step in steps:
                self._give_tail(step, last=True)
        while need > self.ledger.free:
            self.evict(need - self.ledger.free)
            if need <= self.ledger.free or not leaving:
                break
            self._leave_cached_tail(leaving.pop())
        taken = [self.ledger.take(len(new), x.row) for x, new in zip(steps, slots, strict=True)]
        if not scarce:
            for step in steps:
                self._give_tail(step)
        for step in leaving:
            self._leave_cached_tail(step)
        for step, new, pages in zip(steps, slots, taken, strict=True):
            self._point(step.row, new, pages)
            state = self.live[step.row]
            state.n, state.step = step.n1, step
            if state.n >= state.prompt:
                if state.n > state.steady:
                    state.steady = self.layout.steady_until(state.n, state.floor)
                rule = self.layout.rule
                state.quiet = min(rule.pages(state.n) * rule.page, state.steady)
            self.tally.windows_sealed += step.s1 - step.s0
        self.taken = np.concatenate(taken) if taken else _NO_PAGES

    def close(self, row: int) -> None:
        """Give back everything the row owns."""
        if row in self.live:
            self.ledger.give(self.private_pages(row), row)
            self.table[row] = 0
            del self.live[row]
            self.prefixes += 1

    def clear(self) -> None:
        """Drop every row."""
        self.live.clear()
        self.prefixes += 1
        self.table[:] = 0
        self.ledger.clear()

    @property
    def promised(self) -> int:
        """Pages that prompts still in prefill will take and no one else may."""
        return sum(
            max(0, self.row_demand(row, state.prompt))
            for row, state in self.live.items()
            if state.n < state.prompt
        )

    def next_needs(self, rows: Sequence[int]) -> tuple[int, int]:
        """Pages of one more token of each row: less those it sets free, and whatever it gives back."""
        demand = pages = 0
        for row in rows:
            state = self.live[row]
            if state.n < state.quiet:
                continue
            if self.needs.turns(state, state.n + 1):
                demand += len(self.layout.groups)
                pages += len(self.layout.groups)
            else:
                demand += self.row_demand(row, state.n + 1)
                pages += self.needs.new_pages(state, state.n + 1)
        return demand, pages

    def row_demand(self, row: int, n: int) -> int:
        """``Needs.demand`` of a live row."""
        state = self.live[row]
        return self.needs.demand(state, n, self.sole_from(row) if state.cached_tokens else 0)

    def check(self) -> None:
        """Ledger consistent; every row owns exactly the pages its table names and predicts."""
        self.ledger.check()
        for row, state in self.live.items():
            held = self.ledger.owned(row)
            predicted = self.needs.private(state, state.n)
            if len(held) != predicted:
                raise RuntimeError(f"row {row} owns {len(held)} pages, predicted {predicted}")
            if not np.array_equal(np.sort(self.private_pages(row)), held):
                raise RuntimeError(f"row {row}: its table names other pages than it owns")

    def private_pages(self, row: int) -> np.ndarray:
        """Page ids the row owns: sealed ones group by group, then the tails, then the queries."""
        state = self.live[row]
        sealed = self.layout.rule.sealed(state.n, state.floor)
        slots = [self._sealed_slots(state.cached_windows, sealed)]
        for kind in self.layout.kinds:
            first, end = self._own_span(kind, state, state.n)
            slots.append(self._ring(kind, first, end).ravel())
        begun = self.layout.queries.begun(self.layout.rule, state.n)
        slots.append(self._query_slots(range(sealed, begun)))
        return self.table[row, np.concatenate(slots)]

    def window_pages(self, row: int, window: int) -> np.ndarray:
        """Pages of a sealed window, group by group."""
        return self.table[row, self._sealed_slots(window, window + 1)]

    def tail_page(self, row: int, page: int) -> np.ndarray:
        """Raw pages of tokens page*P.. in the full-attention groups, a page a group."""
        return self.table[row, self._full_ring(page)]

    def slide_page(self, row: int, page: int) -> np.ndarray:
        """Raw pages of tokens page*P.. in the sliding-window groups, a page a group."""
        return self.table[row, self._sliding_ring(page)]

    def cached_path(self, row: int) -> np.ndarray:
        """One page of each window that the prefix cache owns: equal where the window is the same."""
        kept = self.layout.kept // self.layout.rule.page
        group = int(kept.argmax())
        first, step = int(self.layout.table_offset[group]), int(kept[group])
        return self.table[row, first : first + self.live[row].cached_windows * step : max(1, step)]

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
        self.prefixes += 1

    def share_tail_page(self, row: int, page: int, pages: np.ndarray, owner: int | None) -> None:
        """The same for the raw pages of tokens page*P..; in order of ``page``."""
        self._share(row, self._full_ring(page), pages, owner)
        self.live[row].cached_tokens = (page + 1) * self.layout.rule.page

    def share_slide_page(self, row: int, page: int, pages: np.ndarray, owner: int | None) -> None:
        """The same for those of the sliding windows."""
        self._share(row, self._sliding_ring(page), pages, owner)
        self.live[row].cached_slide = (page + 1) * self.layout.rule.page

    def _share(self, row, slots, pages, owner) -> None:
        mine = self.table[row, slots]
        if owner is None:
            self.ledger.give(mine, row)
            self._point(row, slots, pages)
        else:
            self.ledger.hand_over(mine, row, owner)

    def _point(self, row: int, slots: np.ndarray, pages: np.ndarray) -> None:
        self.table[row, slots] = pages
        self.pointed(row, slots)

    def _full_ring(self, page: int) -> np.ndarray:
        return self._ring(self.layout.kinds[0], page, page + 1)[:, 0]

    def _sliding_ring(self, page: int) -> np.ndarray:
        parts = [self._ring(kind, page, page + 1)[:, 0] for kind in self.layout.kinds[1:]]
        return np.concatenate(parts)

    def _tail_span(self, kind: Kind, n: int, floor: int) -> tuple[int, int]:
        """First and one past the last page that the next step reads, counted from token 0."""
        rule = self.layout.rule
        return self.layout.tail_start(kind.sliding_window, n, floor) // rule.page, rule.pages(n)

    def _held_span(self, kind: Kind, n: int, floor: int) -> tuple[int, int]:
        """First and one past the last page that is held at ``n`` tokens."""
        rule = self.layout.rule
        return self.layout.held_start(kind.sliding_window, n, floor) // rule.page, rule.pages(n)

    def _own_span(self, kind: Kind, state: Row, n: int) -> tuple[int, int]:
        """The same without what the prefix cache owns."""
        first, end = self._held_span(kind, n, state.floor)
        cached = state.cached_tokens if kind.sliding_window is None else state.cached_slide
        return max(first, cached // self.layout.rule.page), end

    def _ring(self, kind: Kind, first: int, end: int) -> np.ndarray:
        """Table entries of tail pages first..end, [groups of the kind, pages]."""
        offset = self.layout.ring_offset[kind.first : kind.end]
        return offset[:, None] + np.arange(first, end) % kind.ring

    def _quiet_step(self, row: int, n1: int) -> Step | None:
        """The step of a row that takes and gives back nothing, as most decode steps are; done here."""
        state = self.live[row]
        if not state.n <= n1 <= state.quiet:
            return None
        sealed = state.step.s1
        state.step = step = Step(row, state.n, n1, sealed, sealed, state.floor, ())
        state.n = n1
        return step

    def _step(self, row: int, n1: int) -> Step:
        state = self.live[row]
        n0 = state.n
        if self.needs.turns(state, n1):
            return Step(row, n0, n1, state.step.s1, state.step.s1, state.floor, ())
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
        queries = tuple(
            self.table[row, self._query_slots((window,))]
            for window in range(s0, min(s1, self.layout.queries.begun(self.layout.rule, n0)))
        )
        return Step(row, n0, n1, s0, s1, state.floor, tail, queries)

    def _leave_slide(self, step: Step) -> None:
        state, slide = self.live[step.row], self.layout.slide
        if state.cached_slide and self.layout.held_start(slide, step.n0) >= state.cached_slide:
            state.cached_slide = 0
            self.slide_left(step.row)

    def _leaves_cached_tail(self, step: Step) -> bool:
        start = step.s0 * self.layout.rule.window
        return step.s1 > step.s0 and self.live[step.row].cached_tokens > start

    def _leave_cached_tail(self, step: Step) -> None:
        self.tail_left(step.row, step.s1 * self.layout.rule.window)

    def _give_tail(self, step: Step, last: bool = False) -> None:
        if self.needs.turns(self.live[step.row], step.n1):
            return
        for kind in self.layout.kinds:
            first, end = self._own_span(kind, self.live[step.row], step.n0)
            end = min(end, self._held_span(kind, step.n1, step.floor)[0])
            gone = self._ring(kind, first, end).ravel()
            if len(gone):
                self.ledger.give(self.table[step.row, gone], step.row, last)
        for pages in step.queries:
            self.ledger.give(pages, step.row, last)

    def _new_slots(self, step: Step) -> np.ndarray:
        if self.needs.turns(self.live[step.row], step.n1):
            page = step.n0 // self.layout.rule.page
            return self.layout.ring_offset + page % self.layout.ring_slots
        slots = [self._sealed_slots(step.s0, step.s1)] if step.s1 > step.s0 else []
        for kind in self.layout.kinds:
            first, end = self._held_span(kind, step.n1, step.floor)
            first = max(first, self.layout.rule.pages(step.n0))
            if first < end:
                slots.append(self._ring(kind, first, end).ravel())
        if begun := self.needs.new_queries(step.n0, step.n1, step.floor):
            slots.append(self._query_slots(begun))
        return np.concatenate(slots) if slots else _NO_SLOTS

    def _query_slots(self, windows: Iterable[int]) -> np.ndarray:
        """Table entries of the pages of queries of ``windows``."""
        queries = self.layout.queries
        first = int(self.layout.table_offset[-1])
        spans = (
            [first + w % queries.slots * queries.pages for w in windows] if queries.pages else []
        )
        return np.concatenate([_NO_SLOTS, *(np.arange(x, x + queries.pages) for x in spans)])

    def _sealed_slots(self, s0: int, s1: int) -> np.ndarray:
        """Table entries of windows s0..s1, group by group."""
        per_window = self.layout.kept // self.layout.rule.page
        starts = self.layout.table_offset[:-1]
        spans = [np.arange(a + s0 * p, a + s1 * p) for a, p in zip(starts, per_window, strict=True)]
        return np.concatenate(spans)
