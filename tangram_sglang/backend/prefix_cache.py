"""The prefix cache SGLang asks for. It holds nothing yet: every prompt is a miss, honestly told."""

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchPrefixParams,
    MatchResult,
)

from tangram_sglang.backend.metrics import KVMetrics


class TangramPrefixCache(BasePrefixCache):
    """Shares nothing between requests; a request's pages end with the request.

    SGLang's default caches cannot stand in: they would own token slots that do not exist.
    """

    def __init__(self, params):
        # not ``disable = True``: that flag selects an admission path that counts token slots
        self.disable = False
        self.page_size = params.page_size
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.root_node = _Root()
        self._pool = params.token_to_kv_pool_allocator.get_kvcache()
        self._metrics = None
        if params.enable_metrics:
            self.init_metrics_collector()
            self._metrics = KVMetrics(self._pool.plan.layout, self._pool.dtype.itemsize)

    def supports_prefix_sharing(self) -> bool:
        return False

    def reset(self) -> None:
        pass

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        return MatchResult(0, self.root_node, self.root_node, self.root_node)

    def checkpoint(self, req: Any, *, up_to: int, **kwargs) -> None:
        pass

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        # pages are given back when the row is
        pass

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        # a retracted request comes back and is counted then
        if checkpointed and self._metrics is not None:
            self._metrics.finished(self._pool.rows.live[req.kv.req_pool_idx].n)

    def evict(self, params: EvictParams) -> EvictResult:
        return EvictResult()

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        return IncLockRefResult()

    def dec_lock_ref(self, node: Any, params: Any = None) -> DecLockRefResult:
        return DecLockRefResult()

    def path_device_indices(self, node: Any) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64)

    def total_size(self) -> int:
        return 0

    def pretty_print(self) -> None:
        print("tangram prefix cache: shares nothing")


class _Root:
    """The one node there is."""

    def __init__(self):
        self.children: dict = {}
