"""KVCacheConfigurator._build_token_to_kv_pool: the page pool.

SGLang's registry of pool classes belongs to platforms, and its classes hold one buffer a layer.
"""

from tangram_sglang.patches.hook import Hook, selected


def _build_token_to_kv_pool(original, self, *, sizes, req_to_token_pool, **kwargs):
    if not selected() or self.is_draft_worker:
        return original(self, sizes=sizes, req_to_token_pool=req_to_token_pool, **kwargs)
    from tangram_sglang.backend.build import build_kv_pool

    return build_kv_pool(self, sizes.max_total_num_tokens, req_to_token_pool)


HOOK = Hook(
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool",
    ("sizes", "is_dsa_model", "is_dsv4_model", "req_to_token_pool"),
    _build_token_to_kv_pool,
    "pools of SGLang have one buffer a layer",
)
