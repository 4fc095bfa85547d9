"""SGLang's prefix cache over the window trie: sealed windows and raw tails, shared by owner."""

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchPrefixParams,
    MatchResult,
    TreeLock,
)

from tangram_sglang.backend.metrics import KVMetrics
from tangram_sglang.cache.node import Node, Prefix
from tangram_sglang.cache.store import PrefixStore


class TangramPrefixCache(BasePrefixCache):
    """Publishes what requests computed and finds it again.

    Shares nothing with ``--disable-radix-cache``, nor where ``KVLayout.shares`` says so.

    Publishing changes the owner of pages and copies nothing. What the trie holds already is taken
    from there and the request's own pages are given back.
    """

    def __init__(self, params):
        self.page_size = params.page_size
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self._pool = pool = params.token_to_kv_pool_allocator.get_kvcache()
        self._layout = pool.plan.layout
        # not ``disable = True``: that flag selects an admission path that counts token slots
        self.disable = False
        self._shares = self._layout.shares and not params.disable
        self._store = pool.store = PrefixStore(pool.rows)
        self.trie = self._store.trie
        pool.rows.tail_left = self._leave_tail
        pool.rows.slide_left = self._leave_slide
        pool.rows.sole_from = self._sole_from
        self._metrics = None
        if params.enable_metrics:
            self.init_metrics_collector()
            self._metrics = KVMetrics(pool)
            self.req_to_token_pool.rows_changed = self._metrics.publish

    def supports_prefix_sharing(self) -> bool:
        return self._shares

    def root_node_handle(self, extra_key: str | None = None) -> Prefix:
        return Prefix(0)

    @property
    def root_node(self) -> Node:
        """Where SGLang starts to walk the trie, for ``--schedule-policy dfs-weight``."""
        return self.trie.top

    def resolve_node_handle(self, node_handle: Prefix) -> Node:
        return node_handle.nodes[-1] if node_handle.tokens else self.trie.top

    def reset(self) -> None:
        """Forget all prefixes; SGLang then clears rows and pages."""
        self.trie.clear()

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        key, prefix = params.key, Prefix(0)
        if self._shares:
            prefix = self.trie.match(self._namespace(key), key.token_ids, len(key))
        self._pool.candidate = prefix
        return MatchResult(prefix.tokens, prefix, prefix, prefix)

    def touch_prefix(self, key: Any) -> None:
        if self._shares:
            self.trie.match(self._namespace(key), key.token_ids, len(key))

    def checkpoint(self, req: Any, *, up_to: int, **kwargs) -> None:
        """Publish the row's sealed windows and whole tail pages below token ``up_to``."""
        if not self._shares:
            return
        tokens = req.full_untruncated_fill_ids[:up_to]
        self._anchor(req, self._store.publish(req.kv.req_pool_idx, self._namespace(req), tokens))
        req.kv.cache_protected_len = req.last_node.tokens

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        # pages are given back when the row is
        pass

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        # a retracted request comes back and is counted then; an aborted one never finished
        aborted = isinstance(req.finished_reason, FINISH_ABORT)
        if checkpointed and not aborted and self._metrics is not None:
            state = self._pool.rows.live[req.kv.req_pool_idx]
            self._metrics.finished(state.n, state.floor)

    def evict(self, params: EvictParams) -> EvictResult:
        pages = -(-params.num_tokens * self._pool.ledger.num_pages // self._pool.size)
        return EvictResult(num_tokens_evicted=self._pool.tokens(self._store.evict(pages)))

    def inc_lock_ref(self, node: Prefix) -> IncLockRefResult:
        self.trie.lock(node)
        return IncLockRefResult()

    def dec_lock_ref(self, node: Prefix, params: Any = None) -> DecLockRefResult:
        self.trie.unlock(node)
        return DecLockRefResult()

    def path_device_indices(self, node: Prefix) -> torch.Tensor:
        # token slots mean nothing here; SGLang copies them into a table nobody reads
        return torch.zeros(node.tokens, dtype=torch.int64, device=self._pool.device)

    def evictable_size(self) -> int:
        free = self._pool.ledger.free
        return self._pool.tokens(free + self.trie.unlocked_pages) - self._pool.tokens(free)

    full_evictable_size = evictable_size

    def protected_size(self) -> int:
        free = self._pool.ledger.free + self.trie.unlocked_pages
        return self._pool.tokens(free + self.trie.locked_pages) - self._pool.tokens(free)

    full_protected_size = protected_size

    def total_size(self) -> int:
        return self._pool.tokens(self.trie.locked_pages + self.trie.unlocked_pages)

    def pretty_print(self) -> None:
        for node in self.trie.nodes():
            kind = "window" if node.is_window else "page"
            print(f"{kind} up to token {node.tokens}: {len(node.pages)} pages, {node.locks} locks")

    def _leave_tail(self, row: int, start: int) -> None:
        """The row seals its tail up to ``start``: hold on to what it still reads."""
        req = self.req_to_token_pool.request_of[row]
        if req.lock is not None:
            self._anchor(req, req.lock.node.behind(start))

    def _leave_slide(self, row: int) -> None:
        """The row's sliding windows have left those of its prefix."""
        req = self.req_to_token_pool.request_of[row]
        if req.lock is not None:
            self._anchor(req, req.lock.node.without_slide())

    def _sole_from(self, row: int) -> int:
        """Token from which on nobody else reads the row's cached tail."""
        return self.req_to_token_pool.request_of[row].last_node.sole_from(self._layout.rule.page)

    def _anchor(self, req: Any, prefix: Prefix) -> None:
        """Move the request's lock."""
        self.trie.lock(prefix)
        self.unlock(req.lock)
        req.lock = TreeLock(prefix, DecLockRefParams())
        req.last_node = prefix

    def _namespace(self, key: Any) -> tuple:
        """What must be equal beside tokens, of a RadixKey or a request; LoRA is in the extra key."""
        return self._pool.plan.digest, key.extra_key, key.cache_salt or None
