"""Rows of several lengths in a poisoned pool, as a prefill step finds them."""

import numpy as np
import torch

from tangram_sglang.kernels.raw_rows import HeadIndex
from tangram_sglang.kernels.records import Piece
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.window import WindowRule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class World:
    """One full-attention layer (id 0) and, if asked, one sliding-window layer (id 1).

    Pages are handed out in random order from a slab whose unused part, with guard bands between
    pages, is NaN. ``k`` and ``v`` hold every token of every row, [n1, H, D] each.
    """

    def __init__(
        self,
        rows: list[tuple[int, int, int]],
        *,
        heads: int = 2,
        ratio: int = 2,
        dim: int = 16,
        budgets: list[float] | None = None,
        rule: WindowRule | None = None,
        per_group: int = 2,
        sliding_window: int | None = None,
        dtype: torch.dtype = torch.float32,
        guard: int = 16,
        seed: int = 0,
        sealed: bool = True,
        retention: float = 0.5,
    ):
        """``rows`` are (n0, n1, floor); ``sealed``: the step's own windows are sealed already."""
        self.rule = rule or WindowRule(16, 5, 4, 2)
        layers = [LayerShape(0, heads * ratio, heads, dim, None, dim**-0.5)]
        if sliding_window is not None:
            layers.append(LayerShape(1, heads * ratio, heads, dim, sliding_window, dim**-0.5))
        self.layout = layout = KVLayout.build(
            ModelShape(tuple(layers)),
            self.rule,
            budgets=budgets or [0.25, 0.75, 0.5, 0.25, 1.0, 0.25][:heads],
            retention=retention,
            per_group=per_group,
            grouping="global",
            max_tokens=max(n1 for _, n1, _ in rows) + self.rule.window,
        )
        self.heads, self.ratio, self.dim, self.dtype = heads, ratio, dim, dtype
        self.layer = 0 if sliding_window is None else 1
        self.kind = layout.kinds[self.layer]
        generator = torch.Generator().manual_seed(seed)
        self.k, self.v = (
            [
                torch.randn(n1, heads, dim, generator=generator).to(dtype).to(DEVICE)
                for _, n1, _ in rows
            ]
            for _ in range(2)
        )
        total = sum(n1 - n0 for n0, n1, _ in rows)
        self.q = torch.randn(total, heads * ratio, dim, generator=generator).to(dtype).to(DEVICE)
        self._pool(rows, generator, guard)
        places = [layout.place[self.layer, h] for h in range(heads)]
        group = np.array([g for g, _ in places])
        self.head_index = HeadIndex(
            *(
                torch.tensor(x, dtype=torch.int32, device=DEVICE)
                for x in (
                    group - self.kind.first,
                    np.array([c for _, c in places]),
                    layout.kept[group],
                    layout.table_offset[:-1][group],
                    layout.ring_offset[group],
                )
            )
        )
        self.places = places
        # positions kept: per row, window and head
        self.chosen = [
            [
                [
                    torch.randperm(self.rule.window, generator=generator)[: self.kept(h)]
                    .sort()
                    .values
                    for h in range(heads)
                ]
                for _ in range(self.rule.sealed(n1, floor))
            ]
            for _, n1, floor in rows
        ]
        self._fill(rows, sealed)
        # the step's tokens, packed as the model hands them over: q, k and v side by side
        spare = 3 if dtype == torch.float32 else 8
        flat = torch.full((total, heads * dim * (ratio + 2) + spare), torch.nan, dtype=dtype)
        flat = flat.to(DEVICE)
        self.new_k = flat[:, : heads * dim].view(total, heads, dim)
        self.new_v = flat[:, heads * dim : 2 * heads * dim].view(total, heads, dim)
        for piece, k, v in zip(self.pieces, self.k, self.v, strict=True):
            span = slice(piece.first, piece.first + piece.n1 - piece.n0)
            self.new_k[span], self.new_v[span] = k[piece.n0 :], v[piece.n0 :]

    def kept(self, head: int) -> int:
        return int(self.layout.kept[self.layout.place[0, head][0]])

    def sealed_rows(self, row: int, head: int, windows: int):
        """K and V of the sealed entries of windows 0..windows."""
        at = [self.chosen[row][j][head] + j * self.rule.window for j in range(windows)]
        at = torch.cat([torch.zeros(0, dtype=torch.int64), *at]).to(DEVICE)
        return self.k[row][at, head], self.v[row][at, head]

    def entry(self, row: int, window: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the pool holds of a sealed window in a head."""
        group, column = self.layout.place[0, head]
        pages = self.kept(head) // self.rule.page
        start = self.layout.table_offset[group] + window * pages
        held = self.pool[self.table[row, start : start + pages].long(), column]
        return held[:, 0].flatten(0, 1), held[:, 1].flatten(0, 1)

    def _pool(self, rows, generator, guard):
        layout, page = self.layout, self.rule.page
        count = 1 + sum(
            layout.pages(n1, floor) + sum(len(layout.groups) * k.ring for k in layout.kinds)
            for _, n1, floor in rows
        )
        size = layout.per_group * 2 * page * self.dim
        slab = torch.full((count, size + guard), torch.nan, dtype=self.dtype, device=DEVICE)
        self.slab = slab
        self.pool = slab[:, :size].view(count, layout.per_group, 2, page, self.dim)
        self._free = (torch.randperm(count - 1, generator=generator) + 1).tolist()
        # row 0 is the dummy of padded batches
        self.table = torch.zeros(
            len(rows) + 1, int(layout.table_offset[-1]), dtype=torch.int32, device=DEVICE
        )

    def _take(self, count: int) -> np.ndarray:
        return np.array([self._free.pop() for _ in range(count)], dtype=np.int32)

    def _fill(self, rows, sealed):
        layout, page = self.layout, self.rule.page
        self.pieces, lists, first, old = [], [], 0, 0
        for row, (n0, n1, floor) in enumerate(rows):
            line = self.table[row + 1]
            s0, s1 = self.rule.sealed(n0, floor), self.rule.sealed(n1, floor)
            for head in range(self.heads):
                group, column = layout.place[0, head]
                per_window = self.kept(head) // page
                span = slice(
                    layout.table_offset[group], layout.table_offset[group] + s1 * per_window
                )
                if not line[span].any():
                    line[span] = torch.from_numpy(self._take(s1 * per_window))
                for window in range(s1 if sealed else s0):
                    k, v = self.sealed_rows(row, head, window + 1)
                    at = line[span][window * per_window : (window + 1) * per_window].long()
                    held = (-1, page, self.dim)
                    self.pool[at, column, 0] = k[-self.kept(head) :].view(held)
                    self.pool[at, column, 1] = v[-self.kept(head) :].view(held)
            start = layout.tail_start(self.kind.sliding_window, n0, floor)
            groups = self.kind.end - self.kind.first
            pages = self.rule.pages(n0 - start)
            held = self._take(groups * pages).reshape(groups, pages)
            for head, (group, column) in enumerate(self.places):
                at = torch.from_numpy(held[group - self.kind.first]).long()
                for t in range(start, n0):
                    i, slot = at[(t - start) // page], t % page
                    self.pool[i, column, 0, slot] = self.k[row][t, head]
                    self.pool[i, column, 1, slot] = self.v[row][t, head]
            # ring pages of the tokens that stay raw
            tail = layout.tail_start(self.kind.sliding_window, n1, floor)
            for group in range(self.kind.first, self.kind.end):
                for i in range(max(tail, n0) // page, self.rule.pages(n1)):
                    line[layout.ring_offset[group] + i % self.kind.ring] = int(self._take(1)[0])
            self.pieces.append(Piece(row + 1, n0, n1, floor, first, old, pages, start))
            lists.append(held.ravel())
            first, old = first + n1 - n0, old + held.size
        packed = np.concatenate([*lists, np.zeros(1, np.int32)])
        self.old = torch.from_numpy(packed).to(DEVICE)


def to_device(records: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(records).to(DEVICE)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected; NaN stays NaN."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())
