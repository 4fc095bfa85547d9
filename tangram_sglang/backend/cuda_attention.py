"""The attention backend on a GPU: Triton kernels under SGLang's attention interface.

A forward step, all of it on the forward stream:

    1. one upload of what the host knows: table changes, records of the step, sealed windows, who
       reads windows together
    2. copy old pages that the step gives away and writes to
    3. decode: seal, over all layers at once, the windows that the step before completed
    4. layer by layer. Prefill: seal what completes, attend, write the raw tail.
       Decode, in the CUDA graph: write the token and attend.
       Both write what the scorer will read beside K and V: queries, gate scores.

Nothing in it waits for the device. In the graph lengths come from ``seq_lens`` and ``n_win``;
no kernel reads what the scheduler writes, so the scheduler need not wait for a replay.
"""

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from tangram_sglang.backend.attention import require_own_kv
from tangram_sglang.backend.device_clock import DeviceClock
from tangram_sglang.backend.device_table import DeviceTable
from tangram_sglang.backend.gates import GateScores
from tangram_sglang.backend.head_index import LayerIndex, head_indices
from tangram_sglang.backend.model_shape import model_shape
from tangram_sglang.backend.pieces import step_pieces
from tangram_sglang.backend.scorer_pages import ScorerPages
from tangram_sglang.backend.seal_inputs import Fresh
from tangram_sglang.backend.sealer import Sealer
from tangram_sglang.backend.shared_reads import SharedReads
from tangram_sglang.backend.split_dispatch import SplitDispatch
from tangram_sglang.backend.splitter import Splitter
from tangram_sglang.backend.warm_up import warm_up
from tangram_sglang.kernels.decode import decode_attention
from tangram_sglang.kernels.dispatch import dispatch_step
from tangram_sglang.kernels.layer_tables import LayerTables
from tangram_sglang.kernels.prefill import config_for, prefill_attention
from tangram_sglang.kernels.prefill_split import Split
from tangram_sglang.kernels.raw_write import BLOCK, raw_write
from tangram_sglang.kernels.records import prefill_tiles, raw_spans, seal_units
from tangram_sglang.kernels.tails import copy_pages
from tangram_sglang.kernels.upload import Upload
from tangram_sglang.pool.row import Step


class TangramCudaBackend(AttentionBackend):
    """Attention over a ``TangramKVPool`` on a GPU.

    Args:
        model_runner: SGLang's, with our pools in place.
        watcher: sees queries and windows of prompts (``calib.observer``, ``backend.drift``), or None.
        gates: scores that hooks take at the projections, where the scorer reads them, else None.
    """

    needs_cpu_seq_lens = False
    # a dummy batch has as many rows as the pool, and ours has tables for no more
    extend_dummy_seqs_capped_by_req_pool = True

    def __init__(self, model_runner, watcher=None, gates: GateScores | None = None):
        super().__init__()
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = pool = model_runner.token_to_kv_pool
        self._rows = pool.rows
        self._layout = pool.plan.layout
        self._table = DeviceTable(pool.rows, self.device)
        self._tables = LayerTables.build(self._layout, self.device)
        self._layers, self._everyone = head_indices(self._layout, self.device)
        self._sealer = Sealer(pool, self._table.tensor)
        self._kept = ScorerPages(pool, self._table.tensor)
        self.gates = gates
        self._upload = Upload(self.device)
        shape = model_shape(model_runner.model).layers[0]
        self._ratio = shape.q_heads // shape.kv_heads
        blocks = config_for(shape.head_dim, pool.dtype)
        self._tile = blocks.rows // self._ratio
        kept = self._tables.kept_pages.cpu().numpy() * self._tables.page
        kept = kept[[window == 0 for window in self._tables.sliding_window]]
        self._splitter = Splitter(kept, blocks.rows, shape.head_dim, blocks.block, self.device)
        self._split: Split | None = None
        self._splits = SplitDispatch(
            self._tables,
            pool.pages,
            self._ratio,
            len(pool.rows.table) - 1,
            pool.plan.splits == "equal",
        )
        window_pages = kept.sum(axis=1).mean() / self._tables.page if len(kept) else 0
        self._shared = SharedReads(pool.rows, self._splits.readers, shape.kv_heads, window_pages)
        self._n_win = torch.zeros(pool.rows.table.shape[0], dtype=torch.int32, device=self.device)
        self._lists: dict[str, torch.Tensor] = {}
        self._sealing: list[list[int]] = []  # row and window of each unit
        self._batch = 0
        # nothing is shown and no time is counted in warm-ups
        self.watcher = None
        warm_up(self, model_runner.model, self._table.tensor)
        self.watcher = watcher
        self._sealer.clock = DeviceClock(self.device, pool.rows.tally.compressed)

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        return SharedReadEnds.PRE_REPLAY if fm.is_decode() else SharedReadEnds.UNKNOWN

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._splits.reserve(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Send what the host knows of the step; RuntimeError where SGLang runs another than was granted."""
        self._batch = forward_batch.batch_size
        if forward_batch.forward_mode.is_idle():
            return
        steps = self._granted()
        _require_granted(steps, forward_batch)
        if not forward_batch.forward_mode.is_decode():
            self.start_prefill(steps or _dummy_steps(forward_batch))
        else:
            self._splits.of(self._batch, in_capture)
            self._start_decode(steps)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Cut the decode step among programs, from rows and lengths on the device."""
        if forward_batch.forward_mode.is_decode():
            dispatch_step(
                self._splits.of(self._batch)[0],
                self._tables,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                self._n_win[: self._batch],
            )
            self._kept.start_decode(
                self._batch, forward_batch.req_pool_indices, forward_batch.seq_lens
            )

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
        require_own_kv(layer, k, save_kv_cache, kwargs)
        q, k, v = _by_head(q, k, v, layer)
        out = q.new_empty(q.shape)
        decode_attention(
            q,
            k,
            v,
            self.token_to_kv_pool.pages,
            self._table.tensor,
            self._tables,
            *self._splits.of(self._batch),
            self._tables.index[layer.layer_id],
            out,
            layer.scaling,
            sinks,
        )
        mine = self._layers[layer.layer_id]
        if mine.sliding_window is None:
            self._kept.write_decode(q, self._gate(layer, q), mine.seal)
        return out.flatten(1)

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
        require_own_kv(layer, k, save_kv_cache, kwargs)
        q, k, v = _by_head(q, k, v, layer)
        out = q.new_empty(q.shape)
        mine, lists = self._layers[layer.layer_id], self._lists
        pool, table, old = self.token_to_kv_pool.pages, self._table.tensor, lists["old"]
        if self.watcher is not None:
            self.watcher.queries(layer.layer_id, q, forward_batch.positions)
            self.watcher.context(layer.layer_id, k, v, sinks)
        fresh = Fresh(k, v, q)
        if mine.sliding_window is None:
            fresh = Fresh(k, v, q, self._gate(layer, q))
            if len(lists["units"]):
                if self.watcher is not None:
                    self._show(layer.layer_id, fresh, mine)
                windows = [window for _, window in self._sealing]
                self._sealer.seal(lists["units"], old, fresh, mine.seal, windows)
        prefill_attention(
            q,
            k,
            v,
            out,
            pool,
            table,
            old,
            lists[f"tiles{mine.kind}"],
            mine.seal.index,
            mine.order,
            layer.scaling,
            mine.sliding_window,
            sinks,
            self._split if mine.sliding_window is None else None,
        )
        spans = lists[f"spans{mine.kind}"]
        raw_write(pool, table, k, v, spans, mine.seal.index, mine.ring)
        if mine.sliding_window is None:
            self._kept.write(q, fresh.gate, spans, mine.seal)
        return out.flatten(1)

    def _gate(self, layer: RadixAttention, q: torch.Tensor) -> torch.Tensor | None:
        """Gate scores of the step's tokens, [T, H]."""
        return None if self.gates is None else self.gates.take(layer.layer_id, len(q))

    def _show(self, layer_id: int, fresh: Fresh, mine: LayerIndex) -> None:
        """Show the watcher those windows that it wants; row 0's are nobody's."""
        units, old = self._lists["units"], self._lists["old"]
        for i, (row, window) in enumerate(self._sealing):
            if row and self.watcher.wants(layer_id):
                seen_k, seen_v = self._sealer.windows(units[i : i + 1], old, fresh, mine.seal)
                start = window * self._layout.rule.window
                self.watcher.window(layer_id, start, seen_k[0], seen_v[0])

    def _granted(self) -> list[Step]:
        """Steps of the batch, in its order; none for batches of SGLang's own warm-up."""
        steps, self._rows.granted = self._rows.granted, []
        return steps

    def start_prefill(self, steps: list[Step]) -> None:
        """Send what the layers of a prefill need to know of its steps, one a row."""
        layout, rule = self._layout, self._layout.rule
        found = step_pieces(layout, steps, self._rows.taken, self.token_to_kv_pool.spare)
        lists = {"changes": self._table.changes(), "old": found.old, "copies": found.copies}
        lists["units"] = seal_units(found.pieces[0] if layout.num_full else [], rule)
        for i, (kind, pieces) in enumerate(zip(layout.kinds, found.pieces, strict=True)):
            window = kind.sliding_window
            mean = float(layout.kept[kind.first : kind.end].mean())
            starts = [layout.held_start(window, p.n1, p.floor) for p in pieces]
            lists[f"tiles{i}"] = prefill_tiles(pieces, rule, self._tile, window, mean)
            lists[f"spans{i}"] = raw_spans(pieces, starts, BLOCK)
        self._sealing = lists["units"][:, :2].tolist()
        self._split = self._splitter.of(lists["tiles0"]) if layout.num_full else None
        self._lists = self._send(lists)

    def _start_decode(self, steps: list[Step]) -> None:
        sealing = [s for s in steps if s.s1 > s.s0] if self._layout.num_full else []
        found = step_pieces(self._layout, sealing, self._rows.taken, self.token_to_kv_pool.spare)
        lists = {
            "changes": self._table.changes(),
            "old": found.old,
            "copies": found.copies,
            "units": seal_units(found.pieces[0], self._layout.rule),
            "n_win": _windows(steps, self._batch),
            "shared": self._shared.of(steps, self._batch),
        }
        sent = self._send(lists)
        self._n_win[: self._batch].copy_(sent["n_win"])
        self._splits.of(self._batch)[0].shared.copy_(sent["shared"])
        if sealing:
            heads = len(self._everyone.index.kept)
            nothing = Fresh.nothing(self.token_to_kv_pool.pages, heads, self._ratio)
            windows = lists["units"][:, 1].tolist()
            for units, mine in self._sealer.parts(sent["units"], windows, self._everyone):
                self._sealer.seal(units, sent["old"], nothing, self._everyone, mine)

    def _send(self, lists) -> dict[str, torch.Tensor]:
        sent = self._upload.send(lists)
        self._table.apply(sent["changes"])
        copy_pages(self.token_to_kv_pool.pages, sent["copies"])
        return sent


def _require_granted(steps: list[Step], forward_batch: ForwardBatch) -> None:
    """Raise where pages were granted for another batch than the one that runs.

    Rows and lengths of a decode step are on the device only, and so are not compared.
    """
    # what SGLang shows of a padded batch that replays a graph; no warm-up does
    padding = getattr(forward_batch, "num_padding", None)
    rows = forward_batch.batch_size - (padding or 0)
    wrong = len(steps) != rows and (steps or padding is not None)
    if steps and not forward_batch.forward_mode.is_decode():
        wrong = wrong or [s.n0 for s in steps] != list(forward_batch.extend_prefix_lens_cpu)
    if wrong:
        raise RuntimeError(
            f"SGLang runs {rows} rows in mode {forward_batch.forward_mode.name}, pages were granted "
            f"for {[(s.row, s.n0, s.n1) for s in steps[:8]]} and {max(0, len(steps) - 8)} more"
        )


def _windows(steps: list[Step], batch: int) -> np.ndarray:
    """Sealed windows of each row, [batch] int32; 0 for padding."""
    n_win = np.zeros(batch, dtype=np.int32)
    n_win[: len(steps)] = [step.s1 for step in steps]
    return n_win


def _dummy_steps(forward_batch: ForwardBatch) -> list[Step]:
    """Steps of a warm-up batch: prompts on row 0, which is nobody's."""
    return [Step(0, 0, int(n), 0, 0, 0, ()) for n in forward_batch.extend_seq_lens_cpu]


def _by_head(q, k, v, layer: RadixAttention):
    """[T, heads, D] views."""
    return (
        q.view(-1, layer.tp_q_head_num, layer.head_dim),
        k.view(-1, layer.tp_k_head_num, layer.head_dim),
        v.view(-1, layer.tp_v_head_num, layer.head_dim),
    )
