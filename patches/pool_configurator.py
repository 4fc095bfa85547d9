"""create_memory_pool_configurator: bytes to capacity through the closed form of pages.

The function picks a configurator by model; nothing registers one.
"""

from tangram_sglang.patches.hook import Hook, selected


def _create_memory_pool_configurator(original, kvc):
    if not selected() or kvc.is_draft_worker:
        return original(kvc)
    from tangram_sglang.backend.build import TangramPoolConfigurator

    return TangramPoolConfigurator(kvc)


HOOK = Hook(
    "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator",
    ("kvc",),
    _create_memory_pool_configurator,
    "SGLang counts bytes of a token, which compressed KV does not have",
)
