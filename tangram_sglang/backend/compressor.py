"""Seals windows: scores them, picks what each head keeps and writes it to its final pages."""

import time

import torch

from tangram_sglang.backend.heads import alike
from tangram_sglang.backend.kv_pool import TangramKVPool
from tangram_sglang.kernels.select_reference import select_reference
from tangram_sglang.kernels.slots_reference import column_rows, page_rows
from tangram_sglang.score import Window


class Compressor:
    """Sealing over one pool; called on the forward stream only.

    Args:
        pool: pages and plan.
        table: [rows, E] int32, the page table on the device.
    """

    def __init__(self, pool: TangramKVPool, table: torch.Tensor):
        self._pool = pool
        self._table = table
        self._plan = pool.plan
        self._layout = pool.plan.layout
        self._offset = torch.from_numpy(self._layout.table_offset).to(pool.device)

    def seal(
        self,
        row: int,
        window: int,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: torch.Tensor,
        groups: torch.Tensor,
        columns: torch.Tensor,
        q: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Seal one window in some heads of full-attention layers.

        Args:
            row: the request's row of the page table, which names the window's pages.
            window: j; its tokens are jW..(j+1)W.
            k, v: [H, W, D], every token of the window.
            heads: [H] int64 in global head order.
            groups, columns: [H] int64, where those heads live.
            q: [H, r, w, D], queries of the window's last w tokens, for scorers that read them.
            gate: [H, W] fp32, gate scores of the window, likewise.

        Returns:
            For heads that keep equally many: ([h] indices into ``heads``, [h, K] offsets kept).
        """
        started = time.perf_counter()
        scores = self._scores(window, k, v, heads, q, gate)
        sinks = self._sinks(window)
        kept = []
        for count, mine in alike(self._layout, groups):
            if count == self._layout.rule.window:
                offsets = torch.arange(count, device=k.device).expand(len(mine), -1)
            else:
                offsets = select_reference(scores[mine], count, sinks)
            rows = self._rows(row, window, count, groups[mine], columns[mine])
            at = offsets[..., None].expand(-1, -1, k.shape[-1])
            self._pool.flat[rows] = k[mine].gather(1, at)
            self._pool.flat[rows + self._layout.rule.page] = v[mine].gather(1, at)
            kept.append((mine, offsets))
        self._pool.rows.tally.compressed(time.perf_counter() - started)
        return kept

    def _scores(self, window, k, v, heads, q, gate) -> torch.Tensor | None:
        plan, start = self._plan, window * self._layout.rule.window
        if plan.scorer is None:
            return None
        stats = None if plan.query_stats is None else plan.query_stats.select(heads)
        scaling = None if q is None else plan.scaling[heads]
        inv_freq = None if plan.inv_freq is None else plan.inv_freq[heads]
        return plan.scorer.score(
            Window(k, v, start, heads, self._sinks(window), stats, q, scaling, inv_freq, gate)
        )

    def _sinks(self, window: int) -> int:
        return self._layout.rule.sinks if window == 0 else 0

    def _rows(self, row, window, count, groups, columns) -> torch.Tensor:
        """Pool rows of the window's K entries in each head, [h, K]."""
        page = self._layout.rule.page
        pages = count // page
        entry = self._offset[groups][:, None] + torch.arange(pages, device=groups.device)
        rows = page_rows(self._table[row, entry + window * pages], self._layout.per_group, page)
        return column_rows(rows, columns, page)
