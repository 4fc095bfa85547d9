"""The static layout of compressed KV: groups, counts and every closed form over them.

Admission, allocation, kernels and tests all take their lengths from here, so predicted pages are
held pages. Nothing here knows of requests, devices or SGLang.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tangram_sglang.errors import TangramError
from tangram_sglang.plan.counts import kept_counts
from tangram_sglang.plan.grouping import Head, group_heads
from tangram_sglang.plan.queries import NO_QUERIES, QueryRule
from tangram_sglang.plan.shape import ModelShape
from tangram_sglang.plan.window import WindowRule


@dataclass(frozen=True, slots=True)
class Group:
    """Heads that share one page table.

    Attributes:
        heads: (layer_id, kv head) of each column; at most H_p.
        kept: K[g], entries per sealed window; 0 for sliding-window groups.
        sliding_window: tokens a query sees, or None for full attention.
    """

    heads: tuple[Head, ...]
    kept: int
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """A run of groups whose raw tails are alike.

    Attributes:
        first, end: the groups ``first..end``.
        sliding_window: tokens a query sees, or None for full attention.
        ring: table entries for tail pages in each of the groups.
    """

    first: int
    end: int
    sliding_window: int | None
    ring: int


@dataclass(frozen=True)
class KVLayout:
    """Groups of one rank, full-attention groups first.

    A row of the page table is, group by group, ``[sealed pages | ring of tail pages]``; the page
    of tail token t stands at ring slot ``(t // P) % ring``. Behind the groups come the pages of
    queries, window j in slot ``j % slots``.

    The last ``score_groups`` of the full-attention groups have no heads: their raw pages hold the gate
    scores of the tokens whose K and V the others hold, of all heads, and of sealed windows they keep
    nothing. So scores are taken, given back, shared and found again with the raw tokens.
    """

    rule: WindowRule
    groups: tuple[Group, ...]
    per_group: int
    head_dim: int
    max_tokens: int
    queries: QueryRule = NO_QUERIES
    score_groups: int = 0

    @classmethod
    def build(
        cls,
        shape: ModelShape,
        rule: WindowRule,
        *,
        budgets: Sequence[float],
        retention: float,
        per_group: int,
        grouping: str,
        max_tokens: int,
    ) -> "KVLayout":
        """Group the heads of ``shape`` and fix how much each group keeps.

        Args:
            shape: attention layers of this rank.
            rule: W, R, P and sinks.
            budgets: share kept by each head of ``shape.full_heads``.
            retention: share of bytes kept of full-attention KV, (0, 1].
            per_group: H_p.
            grouping: ``global`` or ``layer``.
            max_tokens: longest request.
        """
        heads = shape.full_heads
        # more columns than heads would only be padding
        per_group = min(per_group, len(heads))
        if len(budgets) != len(heads):
            raise TangramError(
                f"{len(budgets)} budgets for {len(heads)} KV heads, expected one for each; calibrate this "
                "model"
            )
        budget_of = dict(zip(heads, budgets, strict=True))
        cut = group_heads(heads, budgets, per_group, grouping)
        tops = [max(budget_of[head] for head in group) for group in cut]
        kept = kept_counts(tops, rule, retention, len(heads), per_group)
        groups = [Group(group, int(k)) for group, k in zip(cut, kept, strict=True)]
        for window, sliding in shape.sliding_heads.items():
            cut = group_heads(sliding, [1.0] * len(sliding), per_group, "global")
            groups += [Group(group, 0, window) for group in cut]
        return cls(rule, tuple(groups), per_group, shape.head_dim, max_tokens)

    def with_queries(self, shape: ModelShape, tokens: int) -> "KVLayout":
        """The same for a scorer that reads the queries of a window's last ``tokens`` tokens."""
        page_rows = 2 * self.rule.page * self.per_group
        return replace(self, queries=QueryRule.build(shape, self.rule, tokens, page_rows))

    def with_scores(self) -> "KVLayout":
        """The same for a scorer that reads gate scores."""
        heads = sum(len(group.heads) for group in self.groups[: self.num_full])
        count = -(-heads // self.page_scores)
        full, sliding = self.groups[: self.num_full], self.groups[self.num_full :]
        return replace(self, groups=(*full, *[Group((), 0)] * count, *sliding), score_groups=count)

    @property
    def page_scores(self) -> int:
        """Scores of one token that a page of P tokens holds.

        Each takes two elements, which are an fp32 even in a pool of half precision.
        """
        return self.per_group * self.head_dim

    @cached_property
    def kept(self) -> np.ndarray:
        """K[g], [G] int64."""
        return np.array([g.kept for g in self.groups], dtype=np.int64)

    @cached_property
    def num_full(self) -> int:
        """Groups of full-attention heads; they come first."""
        return sum(g.sliding_window is None for g in self.groups)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Full-attention groups, then those of each sliding window size."""
        sizes = [g.sliding_window for g in self.groups]
        kinds = []
        for size in dict.fromkeys(sizes):
            tail = self.rule.tail_pages if size is None else self.rule.pages(size) + 1
            first = sizes.index(size)
            kinds.append(Kind(first, first + sizes.count(size), size, tail))
        return tuple(kinds)

    @cached_property
    def slide(self) -> int:
        """Tokens before a cached prefix's end that sliding-window layers must have raw; 0 without any."""
        return max((kind.sliding_window or 0 for kind in self.kinds), default=0)

    @cached_property
    def shares(self) -> bool:
        """Whether requests may start from what others computed.

        A cached prefix ends on a page border, and so must the sliding window behind it start on one;
        windows of several sizes would need pages of several ages.
        """
        sizes = [x.sliding_window for x in self.kinds if x.sliding_window is not None]
        return self.rule.shares and len(sizes) < 2 and not any(x % self.rule.page for x in sizes)

    @cached_property
    def place(self) -> dict[Head, tuple[int, int]]:
        """(group, column) of every (layer_id, kv head)."""
        return {h: (g, c) for g, group in enumerate(self.groups) for c, h in enumerate(group.heads)}

    @property
    def compresses(self) -> bool:
        """Whether any head drops anything."""
        heads = self.num_full - self.score_groups
        return bool((self.kept[:heads] < self.rule.window).any())

    # lengths after n tokens of a request that started from ``floor`` cached windows

    def tail_start(self, sliding_window: int | None, n: int, floor: int = 0) -> int:
        """First token held raw once ``n`` tokens are stored; always on a page border."""
        if sliding_window is None:
            return self.rule.sealed(n, floor) * self.rule.window
        return max(0, n - sliding_window) // self.rule.page * self.rule.page

    def held_start(self, sliding_window: int | None, n: int, floor: int = 0) -> int:
        """First token whose page is held once ``n`` tokens are stored; on a page border.

        A page that leaves a sliding window is held for one token more. By then SGLang has seen whether
        the token before ended the request, and the window behind its last whole page is complete.
        """
        if sliding_window is not None:
            n = max(0, n - 1)
        return self.tail_start(sliding_window, n, floor)

    def steady_until(self, n: int, floor: int = 0) -> int:
        """Most tokens to which a request of ``n`` grows before it does more than take raw pages.

        The next window is sealed, and the next queries are held, where ``rule`` and ``queries`` say; a
        sliding window leaves a page every P tokens.
        """
        rule, ends = self.rule, []
        if self.num_full:
            ends.append(rule.epoch_end(rule.sealed(n, floor), floor))
        if self.queries.tokens:
            ends.append((self.queries.begun(rule, n) + 1) * rule.window - self.queries.tokens)
        for kind in self.kinds:
            if kind.sliding_window is not None:
                left = self.held_start(kind.sliding_window, n)
                ends.append(kind.sliding_window + left + rule.page)
        return min(ends)

    def entries(self, g: int, n: int, floor: int = 0) -> int:
        """Entries that each head of group ``g`` holds after ``n`` tokens."""
        tail = n - self.tail_start(self.groups[g].sliding_window, n, floor)
        return self.rule.sealed(n, floor) * int(self.kept[g]) + tail

    def pages(self, n: int, floor: int = 0) -> int:
        """Pages that a request holds once ``n`` of its tokens are stored, over all groups."""
        sliding = sum(
            (k.end - k.first) * self.rule.pages(n - self.held_start(k.sliding_window, n))
            for k in self.kinds
            if k.sliding_window is not None
        )
        return self.full_pages(n, floor) + sliding

    def peak_pages(self, n: int, start: int = 0, floor: int = 0) -> int:
        """Most pages a request holds on its way from ``start`` to ``n`` tokens; grows with ``n``.

        What the prefix cache took over and the request still holds is counted.
        """
        return self.peak_full(n, start, floor) + self.peak_slide(n)

    def peak_full(self, n: int, start: int, floor: int) -> int:
        """Of that, in full-attention groups, queries included.

        Pages only grow within an epoch; when a window is sealed they may drop. So the most is held at
        the end, or at the last token before one of the sealings on the way, of which the last weighs
        most.
        """
        most = max(self.full_pages(n, floor), self.full_pages(start, floor))
        s0, s1 = self.rule.sealed(start, floor), self.rule.sealed(n, floor)
        if s1 > s0:
            # the first sealing may take all windows of a prompt (``plan.reclaim``)
            ends = {self.rule.epoch_end(s, floor) for s in (s0, s1 - 1)}
            most = max(most, *(self.full_pages(end, floor) for end in ends))
        return most

    def peak_slide(self, n: int) -> int:
        """Of that, in sliding-window groups.

        A request's own are most just before a page is let go. Where prefixes are shared it also
        holds on to the window that it last left with the cache, until it leaves the next.
        """
        rule, most = self.rule, 0
        for kind in self.kinds:
            if kind.sliding_window is not None:
                own = rule.pages(min(n, kind.sliding_window + rule.page))
                left = min(n, kind.sliding_window) // rule.page if self.shares else 0
                most += (kind.end - kind.first) * (own + left)
        return most

    def full_pages(self, n: int, floor: int = 0) -> int:
        """Pages held after ``n`` tokens in full-attention groups, and those of queries."""
        s = self.rule.sealed(n, floor)
        tail = self.num_full * self.rule.pages(n - s * self.rule.window)
        return s * self.window_pages + tail + self.queries.held(self.rule, n, floor)

    def prompt_pages(self, n: int) -> int:
        """Most pages of a request of ``n`` tokens on its way, if all of them are its prompt.

        Never less than those of a shorter prompt and its output.
        """
        return self.peak_pages(n, 0, self.rule.floor(n, 0))

    def capacity(self, pages: int) -> int:
        """Longest request, in true tokens, that ``pages`` pages carry to its end."""
        low, high = 0, 1
        while self.prompt_pages(high) <= pages:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.prompt_pages(middle) <= pages else (low, middle)
        return low

    @cached_property
    def window_pages(self) -> int:
        """Pages of one sealed window over all groups."""
        return int(self.kept.sum()) // self.rule.page

    @cached_property
    def window_entries(self) -> int:
        """K/V pairs of one sealed window over all full-attention heads."""
        return sum(len(group.heads) * group.kept for group in self.groups)

    @cached_property
    def window_tokens(self) -> int:
        """K/V pairs of one window over all full-attention heads before it is sealed."""
        return self.rule.window * sum(len(g.heads) for g in self.groups[: self.num_full])

    # bytes

    def page_bytes(self, itemsize: int) -> int:
        """H_p heads x (K and V) x P tokens x d."""
        return self.per_group * 2 * self.rule.page * self.head_dim * itemsize

    def total_entries(self, n: int, floor: int = 0) -> int:
        """K/V pairs of all heads after ``n`` tokens."""
        groups = enumerate(self.groups)
        return sum(len(group.heads) * self.entries(g, n, floor) for g, group in groups)

    def full_bytes(self, n: int, itemsize: int) -> int:
        """Bytes of an uncompressed cache of ``n`` tokens: every token in every head."""
        heads = sum(len(group.heads) for group in self.groups)
        return n * heads * 2 * self.head_dim * itemsize

    @property
    def retention_held(self) -> float:
        """Bytes of a sealed window over its uncompressed bytes; padding columns included."""
        heads = sum(len(group.heads) for group in self.groups[: self.num_full])
        if not heads:
            return 1.0
        held = int(self.kept[: self.num_full].sum()) * self.per_group
        return held / (self.rule.window * heads)

    @property
    def retention_step(self) -> float:
        """A page of one group as a share of a sealed window's uncompressed bytes."""
        heads = sum(len(group.heads) for group in self.groups[: self.num_full])
        return self.rule.page * self.per_group / (self.rule.window * heads)

    # the page table

    @cached_property
    def sealed_slots(self) -> np.ndarray:
        """Table entries for sealed pages per group, [G] int64."""
        return self.rule.sealed(self.max_tokens) * self.kept // self.rule.page

    @cached_property
    def ring_slots(self) -> np.ndarray:
        """Table entries for tail pages per group, [G] int64."""
        return np.concatenate([np.full(k.end - k.first, k.ring, np.int64) for k in self.kinds])

    @cached_property
    def table_offset(self) -> np.ndarray:
        """First entry of each group in a row and, last, that of the queries, [G + 1] int64."""
        return np.concatenate([[0], np.cumsum(self.sealed_slots + self.ring_slots)])

    @cached_property
    def ring_offset(self) -> np.ndarray:
        """First ring entry of each group in a row, [G] int64."""
        return self.table_offset[:-1] + self.sealed_slots

    @cached_property
    def table_slots(self) -> int:
        """Entries of a row."""
        return int(self.table_offset[-1]) + self.queries.slots * self.queries.pages
