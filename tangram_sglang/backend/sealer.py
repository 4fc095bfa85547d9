"""Seals windows on a GPU: scores, selection and the write of what is kept, for many at once."""

import contextlib
from collections.abc import Sequence

import torch

from tangram_sglang.backend.device_clock import DeviceClock
from tangram_sglang.backend.kv_pool import TangramKVPool
from tangram_sglang.backend.seal_inputs import Fresh, SealHeads
from tangram_sglang.kernels.gate_pages import GatePlace, gather_gates
from tangram_sglang.kernels.query_pages import gather_queries
from tangram_sglang.kernels.score_expected_attention import (
    expected_queries,
    score_expected_attention,
)
from tangram_sglang.kernels.score_keydiff import BLOCK, score_keydiff
from tangram_sglang.kernels.seal_write import seal_write
from tangram_sglang.kernels.select import select
from tangram_sglang.kernels.tails import gather_windows
from tangram_sglang.score import Window
from tangram_sglang.score.expected_attention import ExpectedAttention
from tangram_sglang.score.keydiff import KeyDiff

# bytes of scores and copies held at a time: many rows may seal in one decode step, in all layers
SCRATCH = 1 << 28


class Sealer:
    """Sealing over one pool; called on the forward stream only.

    Args:
        pool: pages and plan.
        table: [rows, E] int32, the page table on the device.
    """

    def __init__(self, pool: TangramKVPool, table: torch.Tensor):
        self._pool = pool.pages
        self._table = table
        self._rule = rule = pool.plan.layout.rule
        self._plan = pool.plan
        self._scorer = pool.plan.scorer
        self._stats = pool.plan.query_stats
        self._queries_held = pool.plan.layout.queries
        if pool.plan.layout.score_groups:
            self._gates = GatePlace.of(pool.plan.layout)
            self._lines = pool.lines
        # set once kernels are compiled, which is no compression
        self.clock: DeviceClock | None = None
        if isinstance(self._scorer, ExpectedAttention):
            stats, windows = self._stats, rule.sealed(pool.plan.layout.max_tokens) + 1
            self._queries = expected_queries(
                stats.mean, stats.factor, stats.diagonal, stats.inv_freq, stats.scaling,
                rule.window, windows,
            )  # fmt: skip

    def parts(
        self, units: torch.Tensor, windows: Sequence[int], heads: SealHeads
    ) -> list[tuple[torch.Tensor, Sequence[int]]]:
        """``units`` and ``windows`` in runs sealed with SCRATCH bytes each, a unit at least."""
        size = max(1, SCRATCH // (len(heads.index.kept) * self._head_bytes()))
        starts = range(0, len(windows), size)
        return [(units[i : i + size], windows[i : i + size]) for i in starts]

    def _head_bytes(self) -> int:
        """What scoring takes for one window of one head."""
        window, dim, size = self._rule.window, self._pool.shape[-1], self._pool.element_size()
        # fp32 scores, positions and sums of keys
        total = window * 3 * 4
        if isinstance(self._scorer, ExpectedAttention):
            # logits of every query head
            total += window * 4 * self._queries.mean.shape[1]
        elif self._scorer is not None and not isinstance(self._scorer, KeyDiff):
            # K and V, then K in fp32; queries, in fp32 twice; their attention, twice
            total += window * dim * (2 * size + 4)
            held = self._queries_held
            total += held.ratio * held.tokens * (dim * (size + 8) + window * 8)
        return total

    def seal(
        self,
        units: torch.Tensor,
        old: torch.Tensor,
        fresh: Fresh,
        heads: SealHeads,
        windows: Sequence[int],
    ) -> torch.Tensor | None:
        """Seal every window of ``units`` in ``heads``.

        Args:
            units: [units, UNIT_FIELDS] int32.
            old: [N] int32, pages of the raw tails before the step and of queries.
            fresh: the step's own tokens.
            windows: the window of each unit, as ``units`` says on the device.

        Returns:
            [units, H, most] int32, offsets kept (K[h] of each line), or None where all are.
        """
        with self.clock.measure() if self.clock else contextlib.nullcontext():
            positions = None
            if self._scorer is not None:
                scores = self._scores(units, old, fresh, heads, windows)
                positions = scores.new_empty(*scores.shape[:2], heads.most, dtype=torch.int32)
                select(positions, scores, units, heads.index.kept, self._rule.sinks)
            window = self._rule.window
            seal_write(
                self._pool,
                self._table,
                fresh.k,
                fresh.v,
                old,
                units,
                positions,
                heads.index,
                window,
                heads.most,
            )
        return positions

    def windows(
        self, units, old, fresh: Fresh, heads: SealHeads
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of whole windows, [units, H, W, D]."""
        shape = (len(units), len(heads.index.kept), self._rule.window, self._pool.shape[-1])
        out_k, out_v = self._pool.new_empty(shape), self._pool.new_empty(shape)
        gather_windows(out_k, out_v, fresh.k, fresh.v, self._pool, old, units, heads.index)
        return out_k, out_v

    def _scores(
        self, units, old, fresh: Fresh, heads: SealHeads, windows: Sequence[int]
    ) -> torch.Tensor:
        shape = (len(units), len(heads.index.kept), self._rule.window)
        scores = torch.empty(shape, dtype=torch.float32, device=self._pool.device)
        if isinstance(self._scorer, KeyDiff):
            blocks = -(-shape[2] // BLOCK)
            sums = scores.new_empty(*shape[:2], blocks, self._pool.shape[-1])
            return score_keydiff(scores, sums, fresh.k, self._pool, old, units, heads.index)
        if isinstance(self._scorer, ExpectedAttention):
            queries = self._queries.heads(heads.span)
            logits = scores.new_empty(*shape[:2], queries.mean.shape[1], shape[2])
            return score_expected_attention(
                scores, logits, fresh.k, fresh.v, self._pool, old, units, heads.index, queries,
                self._rule.sinks,
            )  # fmt: skip
        # as many heads at a time as there is room for, of layers as they come
        size = max(1, SCRATCH // (len(windows) * self._head_bytes()))
        # lists of heads that start on 16 bytes, as whole ones do: no kernel is compiled for others
        size -= size % 4 if size > 4 else 0
        for first in range(0, shape[1], size):
            end = min(first + size, shape[1])
            mine, own = heads.part(first, end), fresh.part(first, end)
            self._any_scores(scores[:, first:end], units, old, own, mine, windows)
        return scores

    def _any_scores(self, scores, units, old, fresh: Fresh, heads: SealHeads, windows) -> None:
        """Scorers without a kernel see whole windows, one after the other."""
        k, v = self.windows(units, old, fresh, heads)
        q, scaling = self._window_queries(units, old, fresh, heads)
        gate = self._window_gates(units, old, fresh, heads)
        index = torch.arange(heads.span.start, heads.span.stop, device=scores.device)
        stats = None if self._stats is None else self._stats.select(index)
        inv_freq = None if self._plan.inv_freq is None else self._plan.inv_freq[heads.span]
        for i, window in enumerate(windows):
            scores[i] = self._scorer.score(
                Window(
                    k[i],
                    v[i],
                    window * self._rule.window,
                    index,
                    self._rule.sinks if window == 0 else 0,
                    stats,
                    None if q is None else q[i],
                    scaling,
                    inv_freq,
                    None if gate is None else gate[i],
                )
            )

    def _window_queries(self, units, old, fresh: Fresh, heads: SealHeads):
        """Queries of the last w tokens, [units, H, r, w, D], and the scaling of each head."""
        held, dim = self._queries_held, self._pool.shape[-1]
        if not held.tokens:
            return None, None
        shape = (len(units), len(heads.index.kept), held.ratio, held.tokens, dim)
        out, window, first = self._pool.new_empty(shape), self._rule.window, heads.span.start
        gather_queries(out, fresh.q, self._pool, old, units, window, first)
        return out, self._plan.scaling[heads.span]

    def _window_gates(self, units, old, fresh: Fresh, heads: SealHeads) -> torch.Tensor | None:
        """Gate scores of whole windows, [units, H, W] fp32."""
        if not self._plan.layout.score_groups:
            return None
        shape = (len(units), len(heads.index.kept), self._rule.window)
        out = torch.empty(shape, dtype=torch.float32, device=self._pool.device)
        first = heads.span.start
        return gather_gates(out, fresh.gate, self._lines, old, units, self._gates, first)
