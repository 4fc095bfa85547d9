"""Request rows: ties SGLang's row life cycle to ours."""

from collections.abc import Callable

import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from tangram_sglang.pool.rows import Rows


class TangramReqToTokenPool(ReqToTokenPool):
    """SGLang's pool of request rows, which opens, grows and closes our rows with its own.

    SGLang's own table of token slots stays and is written to, but nobody reads it.
    """

    def bind(self, rows: Rows) -> None:
        """Attach our rows; called once, when the page pool exists."""
        self.attach_aux_cache(_RowGrowth(self))
        self.rows = rows
        # called once rows have grown or ended, by metrics if there are any
        self.rows_changed: Callable[[], None] = lambda: None
        # the live request of each row, for the prefix cache
        self.request_of: dict[int, object] = {}

    def alloc(self, reqs) -> list[int] | None:
        fresh = [req for req in reqs if not req.kv.holds_kv]
        indices = super().alloc(reqs)
        if indices is not None:
            for req in fresh:
                self._open(req)
        return indices

    def _open(self, req) -> None:
        """Bind a row to the prefix that admission locked for the request."""
        prefix, row = req.last_node, req.kv.req_pool_idx
        if prefix.tokens != req.prefix_len:
            raise RuntimeError(
                f"request {req.rid} starts at token {req.prefix_len}, its cached prefix ends at "
                f"{prefix.tokens}"
            )
        self.request_of[row] = req
        self.rows.tally.admitted(prefix.tokens, prefix.given_up)
        self.rows.open(
            row,
            len(req.full_untruncated_fill_ids),
            [x.pages for x in prefix.windows],
            [x.pages for x in prefix.tail],
            [x.pages for x in prefix.slide],
        )

    def schedulable_token_capacity(self, physical_capacity: int) -> int:
        # the capacity already is in true tokens
        return physical_capacity


class _RowGrowth:
    """SGLang's auxiliary-cache protocol, called when a batch is prepared and when rows end."""

    def __init__(self, pool: TangramReqToTokenPool):
        self._pool = pool

    def alloc_to_lengths(
        self, *, req_pool_indices_cpu: torch.Tensor, target_seq_lens_cpu: torch.Tensor
    ) -> None:
        rows, lengths = req_pool_indices_cpu.tolist(), target_seq_lens_cpu.tolist()
        self._pool.rows.advance(list(zip(rows, lengths, strict=True)))
        self._pool.rows_changed()

    def free(self, row: int) -> None:
        self._pool.rows.close(row)
        self._pool.request_of.pop(row, None)
        self._pool.rows_changed()

    def clear(self) -> None:
        self._pool.rows.clear()
        self._pool.request_of.clear()
        self._pool.rows_changed()

    def reset_allocator(self) -> None:
        pass
