"""Request rows: ties SGLang's row life cycle to ours."""

import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from tangram_sglang.pool.rows import Rows


class TangramReqToTokenPool(ReqToTokenPool):
    """SGLang's pool of request rows, which opens, grows and closes our rows with its own.

    SGLang's own table of token slots stays and is written to, but nobody reads it.
    """

    def bind(self, rows: Rows) -> None:
        """Attach our rows; called once, when the page pool exists."""
        self.attach_aux_cache(_RowGrowth(rows))
        self._rows = rows

    def alloc(self, reqs) -> list[int] | None:
        fresh = [req for req in reqs if not req.kv.holds_kv]
        indices = super().alloc(reqs)
        if indices is not None:
            for req in fresh:
                self._rows.open(req.kv.req_pool_idx, len(req.full_untruncated_fill_ids))
        return indices

    def schedulable_token_capacity(self, physical_capacity: int) -> int:
        # the capacity already is in true tokens
        return physical_capacity


class _RowGrowth:
    """SGLang's auxiliary-cache protocol, called when a batch is prepared and when rows end."""

    def __init__(self, rows: Rows):
        self._rows = rows

    def alloc_to_lengths(
        self, *, req_pool_indices_cpu: torch.Tensor, target_seq_lens_cpu: torch.Tensor
    ) -> None:
        rows, lengths = req_pool_indices_cpu.tolist(), target_seq_lens_cpu.tolist()
        self._rows.advance(list(zip(rows, lengths, strict=True)))

    def free(self, row: int) -> None:
        self._rows.close(row)

    def clear(self) -> None:
        self._rows.clear()

    def reset_allocator(self) -> None:
        pass
