"""KVCacheConfigurator._build_default_req_pool: request rows that carry ours.

No registry offers the class of the request pool; a subclass is the only place that sees a
request and its row together.
"""

from tangram_sglang.patches.hook import Hook, selected


def _build_default_req_pool(original, self, *, max_num_reqs, extra_max_context_len):
    if not selected() or self.is_draft_worker:
        return original(
            self, max_num_reqs=max_num_reqs, extra_max_context_len=extra_max_context_len
        )
    from tangram_sglang.backend.build import build_req_pool

    return build_req_pool(self, max_num_reqs, extra_max_context_len)


HOOK = Hook(
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_default_req_pool",
    ("max_num_reqs", "extra_max_context_len"),
    _build_default_req_pool,
    "the class of the request pool is chosen in place",
)
