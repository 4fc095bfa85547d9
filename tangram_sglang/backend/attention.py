"""The attention backend: ragged pages under SGLang's attention interface, in plain PyTorch.

A forward step runs in three parts, which makes it safe to reuse pages that the step gives back:

    1. copy the raw tails that the step moves, and the queries it needs (every request of the batch)
    2. seal the windows that a decoding request completed before this step
    3. layer by layer: seal what a prefill completes, attend, write the raw tail
"""

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from tangram_sglang.backend.compressor import Compressor
from tangram_sglang.backend.decode import DecodeRow
from tangram_sglang.backend.gates import GateScores
from tangram_sglang.backend.heads import head_tables
from tangram_sglang.backend.prefill import PrefillRow
from tangram_sglang.backend.query_pages import QueryPages
from tangram_sglang.backend.score_pages import ScorePages
from tangram_sglang.backend.tails import Tail
from tangram_sglang.pool.row import Step


class TangramAttentionBackend(AttentionBackend):
    """Attention over a ``TangramKVPool``.

    Args:
        model_runner: SGLang's, with our pools in place.
        watcher: sees queries and windows of prompts (``calib.observer``, ``backend.drift``), or None.
        gates: scores that hooks take at the projections, where the scorer reads them, else None.
    """

    def __init__(self, model_runner, watcher=None, gates: GateScores | None = None):
        super().__init__()
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.watcher = watcher
        self.gates = gates
        self.layers, self.kinds = head_tables(self.token_to_kv_pool.plan.layout, self.device)
        # on a CPU the device's table is the host's
        self.table = torch.from_numpy(self.token_to_kv_pool.rows.table)
        self.compressor = Compressor(self.token_to_kv_pool, self.table)
        self.queries = QueryPages(self.token_to_kv_pool, self.table)
        self.scores = ScorePages(self.token_to_kv_pool, self.table, self.kinds[0])
        self._batch: list[PrefillRow] | list[DecodeRow] = []

    def support_triton(self) -> bool:
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Take the granted step of each row; RuntimeError where SGLang runs other tokens than granted."""
        if forward_batch.forward_mode.is_idle():
            self._batch = []
            return
        live = self.token_to_kv_pool.rows.live
        rows = forward_batch.req_pool_indices.tolist()
        lengths = forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_decode():
            before = [n - 1 for n in lengths]
        else:
            before = forward_batch.extend_prefix_lens_cpu
        steps = [
            # row 0 is nobody's: warm-up batches run on it
            live[row].step if row else Step(row, n0, n1, 0, 0, 0, ())
            for row, n0, n1 in zip(rows, before, lengths, strict=True)
        ]
        for step, row, n0, n1 in zip(steps, rows, before, lengths, strict=True):
            if (step.n0, step.n1) != (n0, n1):
                raise RuntimeError(
                    f"row {row}: SGLang runs tokens {n0}..{n1}, pages were granted for "
                    f"{step.n0}..{step.n1}"
                )
            if row and n0 and not step.tail and not forward_batch.forward_mode.is_decode():
                raise RuntimeError(f"row {row} extends from token {n0} and has no tail to read")
        tails = [Tail(self.token_to_kv_pool, self.kinds, s) if s.tail else None for s in steps]
        held = [self.queries.read(step) for step in steps]
        scores = [self.scores.read(step) for step in steps]
        kind = DecodeRow if forward_batch.forward_mode.is_decode() else PrefillRow
        self._batch = [kind(self, *row) for row in zip(steps, tails, held, scores, strict=True)]

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        sinks: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """One token a row, q [B, HQ * D] and k, v [B, H, D] after RoPE; returns [B, HQ * D].

        ``sinks``: [HQ], logits that take part in the softmax and carry no value.
        """
        return self._forward(q, k, v, layer, save_kv_cache, sinks, kwargs)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        sinks: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """New tokens of all rows, row by row, q [T, HQ * D] and k, v [T, H, D]; returns [T, HQ * D]."""
        if self.watcher is not None:
            queries = q.view(-1, layer.tp_q_head_num, layer.head_dim)
            self.watcher.queries(layer.layer_id, queries, forward_batch.positions)
            self.watcher.context(layer.layer_id, k, v, sinks)
        return self._forward(q, k, v, layer, save_kv_cache, sinks, kwargs)

    def _forward(self, q, k, v, layer, save_kv_cache, sinks, unknown) -> torch.Tensor:
        require_own_kv(layer, k, save_kv_cache, unknown)
        q = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        out = torch.empty_like(q)
        gate = None
        if self.gates is not None and self.kinds[self.layers[layer.layer_id].kind].is_full:
            gate = self.gates.take(layer.layer_id, len(q)).T
        start = 0
        for row in self._batch:
            end = start + row.tokens
            span = slice(start, end)
            mine = None if gate is None else gate[:, span]
            out[span] = row.attend(q[span], k[span], v[span], layer, mine, sinks)
            start = end
        return out.flatten(1)


def require_own_kv(layer: RadixAttention, k, save_kv_cache: bool, unknown: dict) -> None:
    """Raise where a model asks for what no tangram backend does.

    Args:
        k: keys handed over with the call, or None.
        unknown: further arguments of the call.
    """
    if unknown:
        raise RuntimeError(
            f"layer {layer.layer_id} asks for {sorted(unknown)}, which the tangram attention "
            "backend does not implement"
        )
    if k is None or not save_kv_cache:
        raise RuntimeError(
            f"layer {layer.layer_id} does not hand its K and V to the attention backend: the "
            "model writes them itself, and the tangram pool cannot be written from outside"
        )
