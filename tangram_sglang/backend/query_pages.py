"""Queries of windows not sealed yet, in pages of the pool (``plan.queries``)."""

import torch

from tangram_sglang.backend.kv_pool import TangramKVPool
from tangram_sglang.pool.row import Step


class QueryPages:
    """Reads and writes them; a window's vectors lie one after another, [heads, r, w, D].

    Args:
        pool: pages and layout.
        table: [rows, E] int32, the page table on the device.
    """

    def __init__(self, pool: TangramKVPool, table: torch.Tensor):
        self._pool = pool
        self._table = table
        self._layout = layout = pool.plan.layout
        self._rule = layout.queries
        self._first = int(layout.table_offset[-1])
        self._heads = sum(len(group.heads) for group in layout.groups[: layout.num_full])

    def read(self, step: Step) -> list[torch.Tensor]:
        """Copies of what the step found of each window it seals, [heads, r, w, D]."""
        shape = (self._heads, self._rule.ratio, self._rule.tokens, self._layout.head_dim)
        count = self._heads * self._rule.ratio * self._rule.tokens
        return [
            self._pool.pages[torch.from_numpy(pages).long()].view(-1, shape[-1])[:count].view(shape)
            for pages in step.queries
        ]

    def write(self, step: Step, first: int, q: torch.Tensor) -> None:
        """Keep what windows not sealed by the step will need.

        Args:
            step: tokens n0..n1 of the row.
            first: the layer's first head among all full-attention heads.
            q: [T, H, r, D], queries of those tokens in one layer, after RoPE.
        """
        size, count = self._layout.rule.window, self._rule.tokens
        if not count:
            return
        token = torch.arange(step.n0, step.n1, device=q.device)
        place = token % size - (size - count)
        mine = (place >= 0) & (token >= step.s1 * size)
        token, place = token[mine], place[mine]
        heads = torch.arange(first, first + q.shape[1], device=q.device)[:, None]
        vector = heads * self._rule.ratio + torch.arange(q.shape[2], device=q.device)
        vector = vector * count + place[:, None, None]
        per_page = self._pool.pages[0].numel() // q.shape[-1]
        slot = token // size % self._rule.slots
        entry = self._first + slot[:, None, None] * self._rule.pages + vector // per_page
        rows = self._table[step.row, entry].long() * per_page + vector % per_page
        self._pool.flat[rows] = q[mine]
