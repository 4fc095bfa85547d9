"""One prefilling request of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tangram_sglang.backend.heads import LayerHeads
from tangram_sglang.backend.tails import Tail
from tangram_sglang.kernels.prefill_reference import prefill_reference, sliding_reference
from tangram_sglang.kernels.slots_reference import column_rows, page_rows
from tangram_sglang.pool.row import Step

if TYPE_CHECKING:
    from tangram_sglang.backend.attention import TangramAttentionBackend


class PrefillRow:
    """Attends with tokens n0..n1, sealing on the way what they complete.

    Args:
        backend: pool, tables and compressor.
        step: what the step does to the row.
        tail: raw tail before the step; None for a row that nobody opened (a warm-up batch).
        queries: of the windows that the step seals and found begun, where the scorer reads them.
        scores: gate scores of the tail, [heads, tokens], where the scorer reads them.
    """

    def __init__(
        self,
        backend: TangramAttentionBackend,
        step: Step,
        tail: Tail | None,
        queries: list[torch.Tensor],
        scores: torch.Tensor | None = None,
    ):
        self._backend = backend
        self._pool = backend.token_to_kv_pool
        self._layout = self._pool.plan.layout
        self._table = backend.table[step.row]
        self._step = step
        self._tail = tail
        self._queries = queries
        self._scores = scores
        self.tokens = step.n1 - step.n0

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer,
        gate: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [T, HQ, D]; k, v [T, H, D]; gate [H, T] scores, sinks [HQ] or None; returns [T, HQ, D]."""
        mine = self._backend.layers[layer.layer_id]
        kind = self._backend.kinds[mine.kind].kind
        raw_start = self._layout.tail_start(kind.sliding_window, self._step.n0, self._step.floor)
        raw_k, raw_v = k.transpose(0, 1), v.transpose(0, 1)
        if self._tail is not None:
            old_k, old_v = self._tail.of_layer(mine)
            raw_k, raw_v = torch.cat([old_k, raw_k], 1), torch.cat([old_v, raw_v], 1)
        q = q.view(len(q), len(mine.groups), -1, q.shape[-1]).permute(1, 2, 0, 3)
        if sinks is not None:
            sinks = sinks.view(len(mine.groups), -1)
        if kind.sliding_window is None:
            self._seal(
                layer.layer_id, mine, q, raw_k, raw_v, self._raw_scores(mine, gate), raw_start
            )
            out = self._full(q, mine, raw_k, raw_v, raw_start, layer.scaling, sinks)
            self._backend.queries.write(self._step, mine.first, q.permute(2, 0, 1, 3))
            if gate is not None:
                self._backend.scores.write(self._step, mine.first, gate)
        else:
            out = sliding_reference(q, raw_k, raw_v, kind.sliding_window, layer.scaling, sinks)
        self._write(mine, kind, k, v)
        return out.permute(2, 0, 1, 3).flatten(1, 2)

    def _raw_scores(self, mine: LayerHeads, gate: torch.Tensor | None) -> torch.Tensor | None:
        """Gate scores of the tail and of this step, [H, tokens]."""
        if gate is None or self._scores is None:
            return gate
        return torch.cat([self._scores[mine.first : mine.first + len(gate)], gate], dim=1)

    def _seal(self, layer_id: int, mine: LayerHeads, q, raw_k, raw_v, raw_gate, raw_start) -> None:
        size = self._layout.rule.window
        heads = mine.first + torch.arange(len(mine.groups), device=raw_k.device)
        for window in range(self._step.s0, self._step.s1):
            span = slice(window * size - raw_start, (window + 1) * size - raw_start)
            k, v = raw_k[:, span], raw_v[:, span]
            watcher = self._backend.watcher
            if watcher is not None and watcher.wants(layer_id):
                watcher.window(layer_id, window * size, k, v)
            self._backend.compressor.seal(
                self._step.row,
                window,
                k,
                v,
                heads,
                mine.groups,
                mine.columns,
                self._last_queries(mine, q, window),
                None if raw_gate is None else raw_gate[:, span],
            )

    def _last_queries(self, mine: LayerHeads, q: torch.Tensor, window: int) -> torch.Tensor | None:
        """[H, r, w, D] of the last tokens of a window: from earlier steps, then of this one."""
        count = self._layout.queries.tokens
        if not count:
            return None
        end = (window + 1) * self._layout.rule.window - self._step.n0
        fresh = q[:, :, max(0, end - count) : max(0, end)]
        if fresh.shape[2] == count:
            return fresh
        heads = slice(mine.first, mine.first + len(mine.groups))
        held = self._queries[window - self._step.s0][heads]
        return torch.cat([held[:, :, : count - fresh.shape[2]], fresh], dim=2)

    def _full(self, q, mine: LayerHeads, raw_k, raw_v, raw_start, scaling, sinks):
        out = torch.empty_like(q)
        for kept, heads in mine.alike:
            k, v = self._sealed(mine, kept, heads)
            out[heads] = prefill_reference(
                q[heads],
                k,
                v,
                raw_k[heads],
                raw_v[heads],
                raw_start,
                self._layout.rule,
                scaling,
                self._step.floor,
                None if sinks is None else sinks[heads],
            )
        return out

    def _sealed(self, mine: LayerHeads, kept: int, heads: torch.Tensor):
        """K and V of every sealed window, [h, windows * kept, D]."""
        page = self._layout.rule.page
        groups = mine.groups[heads]
        pages = self._step.s1 * kept // page
        offset = self._backend.kinds[mine.kind].offset[groups]
        entry = offset[:, None] + torch.arange(pages, device=groups.device)
        rows = page_rows(self._table[entry], self._layout.per_group, page)
        rows = column_rows(rows, mine.columns[heads], page)
        return self._pool.flat[rows], self._pool.flat[rows + page]

    def _write(self, mine: LayerHeads, kind, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the new tokens that stay raw to their tail pages."""
        page = self._layout.rule.page
        raw = self._layout.held_start(kind.sliding_window, self._step.n1, self._step.floor)
        start = max(self._step.n0, raw)
        token = torch.arange(start, self._step.n1, device=k.device)
        ring = self._backend.kinds[mine.kind].ring_offset[mine.groups - kind.first]
        pages = self._table[ring[:, None] + token // page % kind.ring].long()
        rows = pages * (2 * self._layout.per_group * page) + token % page
        rows = column_rows(rows, mine.columns, page)
        fresh = slice(start - self._step.n0, None)
        self._pool.flat[rows] = k[fresh].transpose(0, 1)
        self._pool.flat[rows + page] = v[fresh].transpose(0, 1)
