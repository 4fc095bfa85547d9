"""One prefill chunk of a Llama-3.1-8B shape on real pages: all layers, groups, a shuffled pool.

Everything lies as the server lays it. K and V are random numbers; zeros would run faster than real
ones.
"""

import numpy as np
import torch

from bench.llama import DIM, DTYPE, HEADS, LAYERS, PER_GROUP, RATIO, RECENT, SINKS, layout_of
from tangram_sglang.kernels.raw_rows import HeadIndex
from tangram_sglang.kernels.raw_write import BLOCK
from tangram_sglang.kernels.records import Piece, prefill_tiles, raw_spans, seal_units
from tangram_sglang.plan.window import WindowRule


class Chunk:
    """A request that grows from ``before`` to ``before + tokens`` tokens in one step.

    ``old`` are the raw pages of its tail before the step. ``k`` and ``v`` are views of a fused
    projection, as the model hands them over.
    """

    def __init__(
        self,
        before: int,
        tokens: int,
        *,
        window: int,
        page: int,
        retention: float = 0.25,
        layers: int = LAYERS,
        tile: int = 32,
        device: str = "cuda",
    ):
        torch.manual_seed(0)
        self.before, self.tokens, self.device = before, tokens, device
        self.rule = rule = WindowRule(window, RECENT, page, SINKS)
        n1 = before + tokens
        self.layout = layout = layout_of(rule, retention, n1, layers)
        kind, groups = layout.kinds[0], len(layout.groups)
        s1, tail = rule.sealed(n1), layout.tail_start(None, n1)
        old_first = layout.tail_start(None, before)
        old_pages = rule.pages(before - old_first)
        slots = [
            np.arange(layout.table_offset[g], layout.table_offset[g] + s1 * k // page)
            for g, k in enumerate(layout.kept)
        ]
        ring = np.arange(tail // page, rule.pages(n1)) % kind.ring
        slots.append((layout.ring_offset[:, None] + ring).ravel())
        slots = np.concatenate(slots)
        total = len(slots) + groups * old_pages
        shuffled = (np.random.default_rng(0).permutation(total) + 1).astype(np.int32)
        table = np.zeros((2, int(layout.table_offset[-1])), np.int32)
        table[1, slots] = shuffled[: len(slots)]
        self.pool = torch.empty(total + 1, PER_GROUP, 2, page, DIM, dtype=DTYPE, device=device)
        self.pool.normal_()
        self.table = torch.from_numpy(table).to(device)
        self.old = torch.from_numpy(shuffled[len(slots) :]).to(device)
        pieces = [Piece(1, before, n1, 0, 0, 0, old_pages, old_first)]
        kept = float(layout.kept.mean())
        self.tiles = self._send(prefill_tiles(pieces, rule, tile, kept=kept))
        self.units = self._send(seal_units(pieces, rule))
        self.spans = self._send(raw_spans(pieces, [tail], BLOCK))
        self.ring = kind.ring
        qkv = torch.empty(tokens, (RATIO + 2) * HEADS * DIM, dtype=DTYPE, device=device).normal_()
        self.q, self.k, self.v = (
            x.unflatten(1, (-1, DIM))
            for x in qkv.split([RATIO * HEADS * DIM, HEADS * DIM, HEADS * DIM], dim=1)
        )
        self.out = torch.empty(tokens, RATIO * HEADS, DIM, dtype=DTYPE, device=device)
        self.heads = [self._head_index(layer) for layer in range(layers)]
        self.order = [torch.argsort(h.kept, descending=True).int() for h in self.heads]

    def flops(self) -> float:
        """Multiply-adds of attention times 2, a mean layer."""
        rule, layout = self.rule, self.layout
        position = np.arange(self.before, self.before + self.tokens)
        windows = np.maximum(0, (position - rule.recent) // rule.window)
        columns = len(layout.groups) * layout.per_group
        kept = layout.kept.sum() * layout.per_group / columns
        seen = windows * kept + position + 1 - windows * rule.window
        return float(4 * seen.sum() * RATIO * HEADS * DIM)

    def _head_index(self, layer: int) -> HeadIndex:
        layout = self.layout
        places = [layout.place[layer, h] for h in range(HEADS)]
        group = np.array([g for g, _ in places])
        fields = (
            group,
            np.array([c for _, c in places]),
            layout.kept[group],
            layout.table_offset[:-1][group],
            layout.ring_offset[group],
        )
        return HeadIndex(*(self._send(x.astype(np.int32)) for x in fields))

    def _send(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x).to(self.device)


def check(chunk: Chunk, layer: int) -> float:
    """Largest relative error of a few outputs against fp32, sealed as the pool holds it."""
    rule, heads, worst = chunk.rule, chunk.heads[layer], 0.0
    page = rule.page
    for head in (0, HEADS - 1):
        group, column, kept, offset, _ = (int(x[head]) for x in heads)
        for i in (0, chunk.tokens // 2 + 3, chunk.tokens - 1):
            position = chunk.before + i
            windows = rule.sealed(position + 1)
            pages = chunk.table[1, offset : offset + windows * kept // page].long()
            start = windows * rule.window
            parts = []
            for part, new in ((0, chunk.k), (1, chunk.v)):
                rows = [chunk.pool[pages, column, part].flatten(0, 1)]
                first = chunk.layout.tail_start(None, chunk.before)
                if start < chunk.before:
                    count = rule.pages(chunk.before - first)
                    held = chunk.old[group * count : (group + 1) * count].long()
                    old = chunk.pool[held, column, part].flatten(0, 1)
                    rows.append(old[start - first : chunk.before - first])
                rows.append(new[max(0, start - chunk.before) : i + 1, head])
                parts.append(torch.cat(rows).float())
            q = chunk.q[i, head * RATIO : (head + 1) * RATIO].float()
            expected = (q @ parts[0].T * DIM**-0.5).softmax(-1) @ parts[1]
            found = chunk.out[i, head * RATIO : (head + 1) * RATIO].float()
            worst = max(worst, float((found - expected).norm() / expected.norm()))
    return worst
