"""Copies of raw tails that a step must read although their pages are given back."""

import torch

from tangram_sglang.backend.heads import KindHeads, LayerHeads
from tangram_sglang.backend.kv_pool import TangramKVPool
from tangram_sglang.kernels.slots_reference import column_rows, page_rows
from tangram_sglang.pool.row import Step


class Tail:
    """Raw K and V of one request before a step, for every head of every kind.

    Attributes:
        k, v: per kind, [heads of the kind, tokens, D]; tokens start at the kind's tail start.
    """

    def __init__(self, pool: TangramKVPool, kinds: tuple[KindHeads, ...], step: Step):
        layout = pool.plan.layout
        page = layout.rule.page
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        for heads, pages in zip(kinds, step.tail, strict=True):
            start = layout.tail_start(heads.kind.sliding_window, step.n0, step.floor)
            held = torch.from_numpy(pages).to(pool.device)
            rows = page_rows(held, layout.per_group, page)[:, : step.n0 - start]
            rows = column_rows(rows[heads.groups - heads.kind.first], heads.columns, page)
            self.k.append(pool.flat[rows])
            self.v.append(pool.flat[rows + page])

    def of_layer(self, layer: LayerHeads) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the heads of one layer, [H, tokens, D]."""
        mine = slice(layer.first, layer.first + len(layer.groups))
        return self.k[layer.kind][mine], self.v[layer.kind][mine]
