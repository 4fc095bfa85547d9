"""SGLang's allocator seam: it answers capacity questions; pages are handed out row by row."""

import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

from tangram_sglang.backend.budget import TangramPrefillBudget
from tangram_sglang.backend.kv_pool import TangramKVPool


class TangramAllocator(BaseTokenToKVPoolAllocator):
    """Token slots mean nothing here: ``alloc`` returns dummies and ``free`` does nothing.

    ``free_pages`` stays None, which tells SGLang's row checks that there are no slots to check.
    """

    def __init__(self, pool: TangramKVPool):
        super().__init__(pool.size, 1, pool.dtype, pool.device, pool, need_sort=False)
        self._pool = pool

    def create_prefill_budget(self, tree_cache, *, num_mixed_decode_tokens=0):
        return TangramPrefillBudget(
            self, tree_cache, self._pool, num_mixed_decode_tokens=num_mixed_decode_tokens
        )

    def max_new_tokens_for_memory(
        self,
        input_tokens: int,
        max_new_tokens: int,
        *,
        token_capacity: int,
        sliding_window_size: int | None,
        chunk_size: int | None,
    ) -> int | None:
        """Output that fits beside the prompt in an empty pool; None, which aborts the request, if not
        even a token does. And if there is no prompt: the tokenizer may make no token of a text.
        """
        room = self._pool.size - input_tokens
        return min(max_new_tokens, room) if room > 0 and input_tokens > 0 else None

    def check_decode_capacity(
        self, *, num_tokens: int, tree_cache, requests=None, spec_algorithm=None
    ) -> bool:
        """Whether one more token of every request fits, prompts in prefill left their promise."""
        rows = self._pool.rows
        live = [req.kv.req_pool_idx for req in requests]
        left = self._pool.reachable_pages - rows.promised
        need, pages = rows.next_needs(live)
        # on a GPU only so many pages can change hands within a step
        spare = len(self._pool.spare)
        return need <= left and (not spare or pages - spare <= left)

    def available_size(self) -> int:
        return self._pool.tokens(self._pool.ledger.free)

    def evict_to_free_tokens(self, tree_cache, num_tokens: int) -> bool | None:
        return None

    def verify_byte_accounting(self) -> list[str]:
        """Run by SGLang whenever it is idle; exact in pages, where token counts are rounded."""
        rows, ledger = self._pool.rows, self._pool.ledger
        private = sum(rows.needs.private(state, state.n) for state in rows.live.values())
        trie = self._pool.store.trie
        cached = trie.locked_pages + trie.unlocked_pages
        if ledger.free + private + cached != ledger.num_pages:
            return [
                f"tangram: free {ledger.free} + private {private} + cached {cached} != "
                f"{ledger.num_pages} pages"
            ]
        return []

    def alloc(self, need_size: int) -> torch.Tensor:
        return torch.zeros(need_size, dtype=torch.int64, device=self.device)

    def free(self, free_index: torch.Tensor) -> None:
        pass

    def clear(self) -> None:
        self.free_group = None
