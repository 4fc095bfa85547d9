"""What a scorer will read of raw tokens beside K and V, written on a GPU: queries and gate scores.

Where each token goes follows from its row and position and the page table on the device, so that the
writes of a decode step are the same in every replay of a captured graph.
"""

import torch

from tangram_sglang.backend.kv_pool import TangramKVPool
from tangram_sglang.backend.seal_inputs import SealHeads
from tangram_sglang.kernels.decode_spans import decode_spans
from tangram_sglang.kernels.gate_pages import GatePlace, write_gates
from tangram_sglang.kernels.query_pages import write_queries
from tangram_sglang.kernels.records import SPAN_FIELDS


class ScorerPages:
    """Writes them; does nothing for scorers that read neither.

    Args:
        pool: pages and layout.
        table: [rows, E] int32, the page table on the device.
    """

    def __init__(self, pool: TangramKVPool, table: torch.Tensor):
        self._pool = pool.pages
        self._table = table
        layout = pool.plan.layout
        self._window = layout.rule.window
        self._queries = layout.queries
        self._first_entry = int(layout.table_offset[-1])
        self._gates: GatePlace | None = None
        if layout.score_groups:
            self._gates = GatePlace.of(layout)
            self._lines = pool.lines
        # new tokens of a decode step; captured graphs write and read it
        self._spans = torch.zeros(
            len(table), SPAN_FIELDS, dtype=torch.int32, device=pool.pages.device
        )
        self._batch = 0

    def start_decode(self, batch: int, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Note where the new token of each row stands; once a step, in the graph."""
        self._batch = batch
        if self._queries.tokens or self._gates is not None:
            decode_spans(self._spans[:batch], rows, seq_lens)

    def write_decode(self, q: torch.Tensor, gate: torch.Tensor | None, heads: SealHeads) -> None:
        """``write`` of the tokens that ``start_decode`` noted."""
        self.write(q, gate, self._spans[: self._batch], heads)

    def write(
        self, q: torch.Tensor, gate: torch.Tensor | None, spans: torch.Tensor, heads: SealHeads
    ) -> None:
        """Keep what windows not sealed yet will need of one layer.

        Args:
            q: [T, HQ, D], queries of the step.
            gate: [T, H] fp32, gate scores of the step, where the scorer reads them.
            spans: [spans, SPAN_FIELDS] int32, tokens that stay raw.
            heads: the layer's KV heads.
        """
        if self._queries.tokens:
            write_queries(
                self._pool,
                self._table,
                q,
                spans,
                self._queries,
                self._window,
                self._first_entry,
                heads.span.start,
            )
        if self._gates is not None and gate is not None:
            write_gates(self._lines, self._table, gate, spans, self._gates, heads.span.start)
