"""Where the entries of every head lie, as static tensors that the kernels read.

Built once per backend from the layout; nothing here depends on requests. A layer is named by its
index among the attention layers, ``index[layer_id]``.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tangram_sglang.errors import TangramError
from tangram_sglang.plan.layout import KVLayout


@dataclass(frozen=True, slots=True)
class LayerTables:
    """L attention layers of H KV heads each.

    Attributes:
        kept_pages: [L, H] int32, pages of a sealed window; 0 in sliding-window layers.
        pages_before: [L, H] int32, the same summed over the heads before this one.
        table_offset, ring_offset: [L, H] int32, where the head's sealed pages and its ring of
            tail pages start in a row of the page table.
        column: [L, H] int32, the head's column in the pages of its group.
        sliding: [L] int32, tokens that a query sees, 0 for full attention.
        ring: [L] int32, ring entries.
        sliding_window: the same as ``sliding``, on the host.
        index: layer id -> layer index.
        window, page: W and P, in tokens.
    """

    kept_pages: torch.Tensor
    pages_before: torch.Tensor
    table_offset: torch.Tensor
    ring_offset: torch.Tensor
    column: torch.Tensor
    sliding: torch.Tensor
    ring: torch.Tensor
    sliding_window: tuple[int, ...]
    index: dict[int, int]
    window: int
    page: int

    @property
    def heads(self) -> int:
        """H."""
        return self.kept_pages.shape[1]

    @staticmethod
    def build(layout: KVLayout, device: torch.device | str) -> "LayerTables":
        """Tables of every layer that ``layout`` places."""
        by_layer: dict[int, list[tuple[int, int]]] = {}
        for head in sorted(layout.place):
            by_layer.setdefault(head[0], []).append(layout.place[head])
        counts = {len(places) for places in by_layer.values()}
        if len(counts) != 1:
            raise TangramError(
                f"layers have {sorted(counts)} KV heads; the Triton kernels need equally many in "
                "every layer: serve this model on the CPU backend or with another "
                "--attention-backend"
            )
        place = np.array(list(by_layer.values()))
        group, column = place[..., 0], place[..., 1]
        kept = layout.kept[group] // layout.rule.page
        kind = np.searchsorted([k.end for k in layout.kinds], group[:, 0], side="right")
        sliding = [layout.kinds[i].sliding_window or 0 for i in kind]
        ring = [layout.kinds[i].ring for i in kind]

        def tensor(values) -> torch.Tensor:
            return torch.tensor(np.asarray(values), dtype=torch.int32, device=device)

        return LayerTables(
            kept_pages=tensor(kept),
            pages_before=tensor(kept.cumsum(axis=1) - kept),
            table_offset=tensor(layout.table_offset[group]),
            ring_offset=tensor(layout.ring_offset[group]),
            column=tensor(column),
            sliding=tensor(sliding),
            ring=tensor(ring),
            sliding_window=tuple(sliding),
            index={layer_id: i for i, layer_id in enumerate(by_layer)},
            window=layout.rule.window,
            page=layout.rule.page,
        )
