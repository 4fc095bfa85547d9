"""Gate scores of raw tokens, in pages beside those of their K and V (``KVLayout.score_groups``)."""

import torch

from tangram_sglang.backend.heads import KindHeads
from tangram_sglang.backend.kv_pool import TangramKVPool
from tangram_sglang.pool.rows import Step


class ScorePages:
    """Reads and writes them; a page holds [P, page_scores] fp32, heads in global head order.

    Args:
        pool: pages and layout.
        table: [rows, E] int32, the page table on the device.
        kind: the full-attention groups, score groups last.
    """

    def __init__(self, pool: TangramKVPool, table: torch.Tensor, kind: KindHeads):
        self._pool = pool
        self._table = table
        self._kind = kind
        self._layout = pool.plan.layout
        self._first = self._layout.num_full - self._layout.score_groups

    def read(self, step: Step) -> torch.Tensor | None:
        """Copy of the scores of the tail before the step, [heads, tokens]; None where it moves none."""
        if not self._layout.score_groups or not step.tail:
            return None
        page, each = self._layout.rule.page, self._layout.page_scores
        pages = torch.from_numpy(step.tail[0][self._first :]).long()
        found = self._pool.lines[pages, : page * each].view(len(pages), -1, each)
        tokens = step.n0 - self._layout.tail_start(None, step.n0, step.floor)
        return found[:, :tokens].transpose(1, 2).flatten(0, 1)[: len(self._kind.groups)]

    def write(self, step: Step, first: int, scores: torch.Tensor) -> None:
        """Keep the scores of the new tokens that stay raw.

        Args:
            step: tokens n0..n1 of the row.
            first: the layer's first head among all full-attention heads.
            scores: [H, T] fp32, of those tokens in one layer.
        """
        page, each = self._layout.rule.page, self._layout.page_scores
        start = max(step.n0, self._layout.tail_start(None, step.n1, step.floor))
        token = torch.arange(start, step.n1, device=scores.device)
        head = torch.arange(first, first + len(scores), device=scores.device)[:, None]
        ring = self._kind.ring_offset[self._first + head // each]
        pages = self._table[step.row, ring + token // page % self._kind.kind.ring].long()
        self._pool.lines[pages, token % page * each + head % each] = scores[:, start - step.n0 :]
