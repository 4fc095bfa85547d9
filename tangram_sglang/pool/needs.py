"""What a row takes and gives back on its way: closed forms of its state, no pages and no tables."""

from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.pool.row import Row


class Needs:
    """Of rows under one layout."""

    def __init__(self, layout: KVLayout):
        self.layout = layout

    def turns(self, state: Row, n: int) -> bool:
        """Whether the step to ``n`` tokens takes the next page of each group and does nothing else."""
        end = min(state.n + self.layout.rule.page, state.steady)
        return state.n == state.quiet and state.n < n <= end

    def demand(self, state: Row, n: int, sole_from: int) -> int:
        """Most pages that a row takes, less those it sets free, on its way to ``n`` tokens.

        Cached tail pages that it seals away stay with the cache; those that nobody else reads can
        be evicted from then on. They are gone within the windows that W + R raw tokens reach into;
        from there on the most is held where ``KVLayout.peak_pages`` says.

        Args:
            sole_from: token from which on nobody else reads the row's cached tail.
        """
        slide = self._slide_demand(state, n)
        if not state.cached_windows and not state.cached_tokens:
            peak = self.layout.peak_full(n, state.n, state.floor)
            return peak - self.layout.full_pages(state.n, state.floor) + slide
        rule = self.layout.rule
        s0, s1 = rule.sealed(state.n, state.floor), rule.sealed(n, state.floor)
        near = range(s0, min(s1, s0 + 2 + -(-rule.recent // rule.window)))
        ends = [rule.epoch_end(s) for s in {*near, s1 - 1} if s >= s0]
        points = {n, *(e + i for e in ends for i in (0, 1) if state.n <= e + i <= n)}
        most = max(self._full(state, x) - self._set_free(state, x, sole_from) for x in points)
        return most - self._full(state, state.n) + slide

    def _slide_demand(self, state: Row, n: int) -> int:
        """Of that, in sliding-window groups.

        While a prompt is computed, each chunk's end leaves the window with the cache and holds on to
        it, and the row takes as much again.
        """
        layout, page = self.layout, self.layout.rule.page
        if not layout.slide:
            return 0
        now = self._slide(state, state.n)
        if layout.shares and state.n < state.prompt:
            return layout.peak_slide(n) - self._slide_left(state) - now
        # the most is held right after a page is taken
        taken = max(state.n, (n - 1) // page * page + 1)
        return max(self._slide(state, x) for x in (taken, n)) - now

    def _set_free(self, state: Row, n: int, sole_from: int) -> int:
        """Cached tail pages that can be evicted once the row has ``n`` tokens."""
        page = self.layout.rule.page
        start, end = (self.layout.tail_start(None, x, state.floor) for x in (state.n, n))
        tokens = min(end, state.cached_tokens) - max(start, sole_from)
        return max(0, tokens) // page * self.layout.num_full

    def private(self, state: Row, n: int) -> int:
        """Pages that a row owns at ``n`` tokens, with what the cache has of it now."""
        return self._full(state, n) + self._slide(state, n)

    def _slide_left(self, state: Row) -> int:
        """Pages of sliding windows that a row left with the cache and holds on to."""
        pages = min(state.cached_slide, self.layout.slide) // self.layout.rule.page
        return pages * (len(self.layout.groups) - self.layout.num_full)

    def _full(self, state: Row, n: int) -> int:
        """Pages that a row owns in full-attention groups, and those of queries."""
        return self.layout.full_pages(n, state.floor) - self._shared(state, n)

    def _slide(self, state: Row, n: int) -> int:
        """Pages that a row owns in sliding-window groups."""
        layout, total = self.layout, 0
        for kind in layout.kinds:
            if kind.sliding_window is not None:
                start = max(layout.held_start(kind.sliding_window, n), state.cached_slide)
                total += (kind.end - kind.first) * layout.rule.pages(n - start)
        return total

    def new_pages(self, state: Row, n: int) -> int:
        """Pages that a row takes in a step to ``n`` tokens, whatever it gives back."""
        rule = self.layout.rule
        sealed = rule.sealed(n, state.floor) - rule.sealed(state.n, state.floor)
        tail = rule.pages(n) - max(
            rule.pages(state.n), self.layout.tail_start(None, n, state.floor) // rule.page
        )
        sliding = rule.pages(n) - rule.pages(state.n)
        groups = len(self.layout.groups) - self.layout.num_full
        return (
            sealed * self.layout.window_pages
            + max(0, tail) * self.layout.num_full
            + sliding * groups
            + len(self.new_queries(state.n, n, state.floor)) * self.layout.queries.pages
        )

    def _shared(self, state: Row, n: int) -> int:
        """Pages of full-attention groups that a row reads at ``n`` tokens and the cache owns."""
        start = self.layout.tail_start(None, n, state.floor)
        tail = max(0, state.cached_tokens - start) // self.layout.rule.page
        return state.cached_windows * self.layout.window_pages + tail * self.layout.num_full

    def new_queries(self, n0: int, n1: int, floor: int) -> range:
        """Windows whose queries are held after a step from n0 to n1 tokens and not before it."""
        rule, queries = self.layout.rule, self.layout.queries
        return range(max(queries.begun(rule, n0), rule.sealed(n1, floor)), queries.begun(rule, n1))
