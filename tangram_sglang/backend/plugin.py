"""Entry point ``sglang.srt.plugins``: makes ``--attention-backend tangram`` a choice.

SGLang logs and swallows what a plugin raises, so what can fail runs later: when the backend is
built, which refuses to serve unless everything is in place.
"""

from tangram_sglang.backend.resolution import NAME, register_resolution
from tangram_sglang.patches.hooks import register_hooks


def register() -> None:
    """Called in every SGLang process; changes nothing for servers with another backend."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_create_backend)
    register_radix_cache_backend(NAME, _create_prefix_cache)
    register_resolution()
    register_hooks()


def _create_backend(model_runner):
    from tangram_sglang.backend.create import create_backend

    return create_backend(model_runner)


def _create_prefix_cache(context):
    from tangram_sglang.backend.prefix_cache import TangramPrefixCache

    return TangramPrefixCache(context.params)
