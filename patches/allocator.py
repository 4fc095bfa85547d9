"""KVCacheConfigurator._build_token_to_kv_pool_allocator: admission in pages.

SGLang's registry of allocators belongs to platforms and covers page sizes above 1 only.
"""

from tangram_sglang.patches.hook import Hook, selected


def _build_token_to_kv_pool_allocator(original, self, *, token_to_kv_pool, **kwargs):
    if not selected() or self.is_draft_worker:
        return original(self, token_to_kv_pool=token_to_kv_pool, **kwargs)
    from tangram_sglang.backend.allocator import TangramAllocator

    return TangramAllocator(token_to_kv_pool)


HOOK = Hook(
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    "._build_token_to_kv_pool_allocator",
    (
        "sizes",
        "token_to_kv_pool",
        "is_dsv4_model",
        "req_to_token_pool",
        "token_to_kv_pool_allocator",
    ),
    _build_token_to_kv_pool_allocator,
    "the allocator's class is chosen in place",
)
