"""One decoding request of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tangram_sglang.backend.tails import Tail
from tangram_sglang.kernels.decode_reference import decode_reference
from tangram_sglang.kernels.slots_reference import column_rows, entry_rows
from tangram_sglang.pool.row import Step

if TYPE_CHECKING:
    from tangram_sglang.backend.attention import TangramAttentionBackend


class DecodeRow:
    """Seals what the step before completed, then attends with one token.

    Args:
        backend: pool, tables and compressor.
        step: what the step does to the row.
        tail: raw tail before the step, where a window is to be sealed.
        queries: that window's, where the scorer reads them.
        scores: gate scores of the tail, [heads, tokens], where the scorer reads them.
    """

    tokens = 1

    def __init__(
        self,
        backend: TangramAttentionBackend,
        step: Step,
        tail: Tail | None,
        queries: list[torch.Tensor],
        scores: torch.Tensor | None = None,
    ):
        self._backend, self._step = backend, step
        self._layout = layout = backend.token_to_kv_pool.plan.layout
        table = backend.table[step.row]
        if tail is not None:
            self._seal(step, tail, scores, *queries)
        self._rows, self._lengths = [], []
        for heads in backend.kinds:
            start = layout.tail_start(heads.kind.sliding_window, step.n1, step.floor)
            sealed = step.s1 * heads.kept
            rows = entry_rows(
                table,
                heads.offset,
                heads.ring_offset,
                heads.kind.ring,
                sealed,
                start,
                step.n1,
                layout.per_group,
                layout.rule.page,
            )
            self._rows.append(rows)
            self._lengths.append(sealed + step.n1 - start)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer,
        gate: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [1, HQ, D]; k, v [1, H, D]; gate [H, 1] scores, sinks [HQ] or None; returns [1, HQ, D]."""
        backend, page = self._backend, self._layout.rule.page
        mine = backend.layers[layer.layer_id]
        heads = backend.kinds[mine.kind]
        groups = mine.groups - heads.kind.first
        lengths = self._lengths[mine.kind][groups]
        rows = column_rows(self._rows[mine.kind][groups], mine.columns, page)
        rows = rows[:, : int(lengths.max())]
        pool = backend.token_to_kv_pool.flat
        # the new token is the last entry of every head
        last = rows.gather(1, lengths[:, None] - 1)[:, 0]
        pool[last], pool[last + page] = k[0], v[0]
        if heads.kind.sliding_window is not None:
            # the tail starts on a page border, a few tokens before the window does
            seen = min(heads.kind.sliding_window, rows.shape[1])
            rows, lengths = rows[:, -seen:], lengths.clamp(max=seen)
        else:
            backend.queries.write(
                self._step, mine.first, q.view(1, len(mine.groups), -1, q.shape[-1])
            )
            if gate is not None:
                backend.scores.write(self._step, mine.first, gate)
        return decode_reference(q[0], pool, rows, lengths, page, layer.scaling, sinks)[None]

    def _seal(
        self,
        step: Step,
        tail: Tail,
        scores: torch.Tensor | None,
        q: torch.Tensor | None = None,
    ) -> None:
        window = self._layout.rule.window
        for i, heads in enumerate(self._backend.kinds):
            if heads.kind.sliding_window is None:
                everyone = torch.arange(len(heads.groups), device=heads.groups.device)
                k, v = tail.k[i][:, :window], tail.v[i][:, :window]
                gate = None if scores is None else scores[:, :window]
                self._backend.compressor.seal(
                    step.row, step.s0, k, v, everyone, heads.groups, heads.columns, q, gate
                )
