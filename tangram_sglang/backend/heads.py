"""Static tensors that say where each head's entries live; built once per backend."""

from dataclasses import dataclass

import torch

from tangram_sglang.plan.layout import Kind, KVLayout


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """KV heads of one layer.

    Attributes:
        kind: index of its kind of groups in ``KVLayout.kinds``.
        groups: [H] int64, group of each head.
        columns: [H] int64, column in the group's pages.
        first: index of its first head among the heads of its kind.
        alike: heads that keep equally many entries: (K, [h] int64 heads of this layer).
    """

    kind: int
    groups: torch.Tensor
    columns: torch.Tensor
    first: int
    alike: tuple[tuple[int, torch.Tensor], ...]


@dataclass(frozen=True, slots=True)
class KindHeads:
    """All heads of one kind of groups, layer by layer; for full attention: global head order.

    Attributes:
        kind: the run of groups.
        groups, columns: [H] int64, group (of all kinds) and column of each head.
        offset, ring_offset: [G] int64, first table entry of the sealed pages and of the ring of each
            group of the kind.
        kept: [G] int64, K of each group of the kind.
    """

    kind: Kind
    groups: torch.Tensor
    columns: torch.Tensor
    offset: torch.Tensor
    ring_offset: torch.Tensor
    kept: torch.Tensor

    @property
    def is_full(self) -> bool:
        return self.kind.sliding_window is None


def head_tables(
    layout: KVLayout, device: torch.device | str
) -> tuple[dict[int, LayerHeads], tuple[KindHeads, ...]]:
    """``LayerHeads`` by layer id, and ``KindHeads`` in the order of ``layout.kinds``."""
    layers, kinds = {}, []
    for i, kind in enumerate(layout.kinds):
        heads = sorted(h for group in layout.groups[kind.first : kind.end] for h in group.heads)
        places = [layout.place[head] for head in heads]
        groups = torch.tensor([g for g, _ in places], device=device)
        columns = torch.tensor([c for _, c in places], device=device)
        span = slice(kind.first, kind.end)
        kinds.append(
            KindHeads(
                kind,
                groups,
                columns,
                torch.from_numpy(layout.table_offset[:-1][span]).to(device),
                torch.from_numpy(layout.ring_offset[span]).to(device),
                torch.from_numpy(layout.kept[span]).to(device),
            )
        )
        for layer in dict.fromkeys(layer for layer, _ in heads):
            first = next(j for j, head in enumerate(heads) if head[0] == layer)
            count = sum(head[0] == layer for head in heads)
            mine = slice(first, first + count)
            layers[layer] = LayerHeads(
                i, groups[mine], columns[mine], first, alike(layout, groups[mine])
            )
    return layers, tuple(kinds)


def alike(layout: KVLayout, groups: torch.Tensor) -> tuple[tuple[int, torch.Tensor], ...]:
    """Indices into ``groups`` [H] by kept count."""
    kept = torch.from_numpy(layout.kept).to(groups.device)[groups]
    return tuple((int(k), (kept == k).nonzero()[:, 0]) for k in kept.unique())
