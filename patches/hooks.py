"""All hooks on SGLang, registered together and checked together."""

from tangram_sglang.patches import (
    allocator,
    beam_search,
    fused_kv_write,
    kv_pool,
    pool_configurator,
    req_pool,
)
from tangram_sglang.patches.hook import check_applied, check_signature

HOOKS = (
    pool_configurator.HOOK,
    req_pool.HOOK,
    kv_pool.HOOK,
    allocator.HOOK,
    fused_kv_write.HOOK,
    beam_search.HOOK,
)


def register_hooks() -> None:
    """Hand every hook to SGLang, which applies them once all plugins have run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.wrapper, HookType.AROUND)


def check_hooks() -> None:
    """Raise TangramError unless every target is the known one and every hook is in place."""
    for hook in HOOKS:
        check_signature(hook)
        check_applied(hook)
