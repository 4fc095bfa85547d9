"""Seals windows on a GPU: scores, selection and the write of what is kept, for many at once."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tangram_sglang.backend.device_clock import DeviceClock
from tangram_sglang.backend.kv_pool import TangramKVPool
from tangram_sglang.kernels.raw_rows import HeadIndex
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


@dataclass(frozen=True, slots=True)
class SealHeads:
    """Full-attention heads that are sealed together: those of a layer, or all.

    Attributes:
        index: where they live.
        span: their place among all full-attention heads, in global head order.
        most: largest kept count.
    """

    index: HeadIndex
    span: slice
    most: int


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
        self._scorer = pool.plan.scorer
        self._stats = pool.plan.query_stats
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
        dim = self._pool.shape[-1]
        # fp32 scores, positions and sums of keys; logits of every query head; copies of K and V
        each = 3 * 4
        if isinstance(self._scorer, ExpectedAttention):
            each += 4 * self._queries.mean.shape[1]
        elif self._scorer is not None and not isinstance(self._scorer, KeyDiff):
            each += 2 * dim * self._pool.element_size()
        unit = len(heads.index.kept) * self._rule.window * each
        size = max(1, SCRATCH // unit)
        starts = range(0, len(windows), size)
        return [(units[i : i + size], windows[i : i + size]) for i in starts]

    def seal(
        self,
        units: torch.Tensor,
        old: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: SealHeads,
        windows: Sequence[int],
    ) -> torch.Tensor | None:
        """Seal every window of ``units`` in ``heads``.

        Args:
            units: [units, UNIT_FIELDS] int32.
            old: [N] int32, pages of the raw tails before the step.
            k, v: [T, H, D], the step's own tokens; anything where no unit has new tokens.
            windows: the window of each unit, as ``units`` says on the device.

        Returns:
            [units, H, most] int32, offsets kept (K[h] of each line), or None where all are.
        """
        with self.clock.measure() if self.clock else contextlib.nullcontext():
            positions = None
            if self._scorer is not None:
                scores = self._scores(units, old, k, v, heads, windows)
                positions = scores.new_empty(*scores.shape[:2], heads.most, dtype=torch.int32)
                select(positions, scores, units, heads.index.kept, self._rule.sinks)
            window = self._rule.window
            seal_write(
                self._pool,
                self._table,
                k,
                v,
                old,
                units,
                positions,
                heads.index,
                window,
                heads.most,
            )
        return positions

    def windows(self, units, old, k, v, heads: SealHeads) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of whole windows, [units, H, W, D]."""
        shape = (len(units), len(heads.index.kept), self._rule.window, self._pool.shape[-1])
        out_k, out_v = self._pool.new_empty(shape), self._pool.new_empty(shape)
        gather_windows(out_k, out_v, k, v, self._pool, old, units, heads.index)
        return out_k, out_v

    def _scores(self, units, old, k, v, heads: SealHeads, windows: Sequence[int]) -> torch.Tensor:
        shape = (len(units), len(heads.index.kept), self._rule.window)
        scores = torch.empty(shape, dtype=torch.float32, device=self._pool.device)
        if isinstance(self._scorer, KeyDiff):
            blocks = -(-shape[2] // BLOCK)
            sums = scores.new_empty(*shape[:2], blocks, self._pool.shape[-1])
            return score_keydiff(scores, sums, k, self._pool, old, units, heads.index)
        if isinstance(self._scorer, ExpectedAttention):
            queries = self._queries.heads(heads.span)
            logits = scores.new_empty(*shape[:2], queries.mean.shape[1], shape[2])
            return score_expected_attention(
                scores, logits, k, v, self._pool, old, units, heads.index, queries,
                self._rule.sinks,
            )  # fmt: skip
        return self._any_scores(scores, units, old, k, v, heads, windows)

    def _any_scores(self, scores, units, old, k, v, heads: SealHeads, windows) -> torch.Tensor:
        """Scorers without a kernel see whole windows, one after the other."""
        out_k, out_v = self.windows(units, old, k, v, heads)
        index = torch.arange(heads.span.start, heads.span.stop, device=scores.device)
        stats = None if self._stats is None else self._stats.select(index)
        for i, window in enumerate(windows):
            sinks = self._rule.sinks if window == 0 else 0
            start = window * self._rule.window
            scores[i] = self._scorer.score(Window(out_k[i], out_v[i], start, index, sinks, stats))
        return scores
