"""Where each layer's heads live, in the form the prefill and sealing kernels take."""

from dataclasses import dataclass

import torch

from tangram_sglang.backend.heads import head_tables
from tangram_sglang.backend.seal_inputs import SealHeads
from tangram_sglang.kernels.raw_rows import HeadIndex
from tangram_sglang.plan.layout import KVLayout


@dataclass(frozen=True, slots=True)
class LayerIndex:
    """KV heads of one layer.

    Attributes:
        kind: index of its kind of groups in ``KVLayout.kinds``.
        sliding_window: tokens a query sees, or None for full attention.
        ring: table entries of its kind's ring.
        seal: the heads.
        order: [H] int32, the heads that keep most first.
    """

    kind: int
    sliding_window: int | None
    ring: int
    seal: SealHeads
    order: torch.Tensor


def head_indices(
    layout: KVLayout, device: torch.device | str
) -> tuple[dict[int, LayerIndex], SealHeads | None]:
    """Each layer by its id, and all full-attention heads together, in global head order."""
    layers, kinds = head_tables(layout, "cpu")
    found = {}
    for layer_id, mine in layers.items():
        kind = kinds[mine.kind].kind
        seal = _heads(layout, mine.groups, mine.columns, kind.first, mine.first, device)
        order = torch.argsort(seal.index.kept, descending=True, stable=True).int()
        found[layer_id] = LayerIndex(mine.kind, kind.sliding_window, kind.ring, seal, order)
    full = kinds[0]
    everyone = None
    if full.kind.sliding_window is None:
        everyone = _heads(layout, full.groups, full.columns, 0, 0, device)
    return found, everyone


def _heads(layout: KVLayout, groups, columns, first_group, first, device) -> SealHeads:
    group = groups.numpy()

    def tensor(values) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(device)

    kept = layout.kept[group]
    index = HeadIndex(
        tensor(group - first_group),
        tensor(columns),
        tensor(kept),
        tensor(layout.table_offset[:-1][group]),
        tensor(layout.ring_offset[group]),
    )
    return SealHeads(index, slice(first, first + len(group)), int(kept.max()))
