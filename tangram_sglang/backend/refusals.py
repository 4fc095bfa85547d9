"""What SGLang can do and this backend cannot yet: refused by name before anything is loaded."""

from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.model_override_base import attention_backends_of

from tangram_sglang.errors import TangramError

# (flag as the user writes it, whether the resolved arguments ask for it, what to do instead)
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "--device",
        lambda a: a.device not in ("cpu", "cuda"),
        "tangram serves on NVIDIA GPUs (--device cuda) and on CPUs (--device cpu)",
    ),
    (
        "--prefill-attention-backend / --decode-attention-backend",
        lambda a: set(attention_backends_of(a)) != {"tangram"},
        "no other backend can read the tangram pool: pass --attention-backend tangram alone",
    ),
    ("--page-size", lambda a: a.page_size not in (None, 1), "set TANGRAM_PAGE instead"),
    (
        "--cuda-graph-backend-prefill",
        lambda a: a.cuda_graph_backend_prefill == "full",
        "the host plans each prefill: pass breakable or disabled",
    ),
    ("--enable-mixed-chunk", lambda a: a.enable_mixed_chunk, "drop the flag"),
    (
        "--speculative-algorithm",
        lambda a: a.speculative_algorithm is not None,
        "drop the flag",
    ),
    (
        "--disaggregation-mode",
        lambda a: a.disaggregation_mode not in (None, "null"),
        "serve prefill and decode in one process",
    ),
    ("--enable-hierarchical-cache", lambda a: a.enable_hierarchical_cache, "drop the flag"),
    (
        "--hicache-storage-backend",
        lambda a: a.hicache_storage_backend is not None,
        "drop the flag",
    ),
    (
        "--radix-eviction-policy",
        lambda a: a.radix_eviction_policy != "lru",
        "the tangram cache evicts what was least recently used: pass lru or drop the flag",
    ),
    (
        "--kv-events-config",
        lambda a: bool(a.kv_events_config),
        "the tangram cache publishes no events: drop the flag",
    ),
    (
        "--swa-full-tokens-ratio",
        lambda a: a._swa_full_tokens_ratio_explicitly_set,
        "sliding-window layers get what their windows need: drop the flag",
    ),
    ("--swa-prefix-tails", lambda a: a.swa_prefix_tails is not None, "drop the flag"),
    ("--enable-lmcache", lambda a: a.enable_lmcache, "drop the flag"),
    ("--enable-flexkv", lambda a: a.enable_flexkv, "drop the flag"),
    (
        "--enable-unified-cache-external-linker",
        lambda a: a.enable_unified_cache_external_linker,
        "drop the flag",
    ),
    ("--enable-hisparse", lambda a: a.enable_hisparse, "drop the flag"),
    ("--enable-unified-memory", lambda a: a.enable_unified_memory, "drop the flag"),
    ("--enable-page-major-kv-layout", lambda a: a.enable_page_major_kv_layout, "drop the flag"),
    ("--enable-session-radix-cache", lambda a: a.enable_session_radix_cache, "drop the flag"),
    ("--enable-streaming-session", lambda a: a.enable_streaming_session, "drop the flag"),
    ("--enable-kv-cache-sharding", lambda a: a.enable_kv_cache_sharding, "drop the flag"),
    (
        "--enable-return-routed-experts",
        lambda a: a.enable_return_routed_experts,
        "it reads token slots, which the pool does not have: drop the flag",
    ),
    ("--enable-return-indexer-topk", lambda a: a.enable_return_indexer_topk, "drop the flag"),
    ("--enable-memory-saver", lambda a: a.enable_memory_saver, "drop the flag"),
    ("--tp-size", lambda a: a.tp_size > 1, "use one rank"),
    ("--pp-size", lambda a: a.pp_size > 1, "use one rank"),
    ("--dp-size", lambda a: a.dp_size > 1, "start one server per replica"),
    ("--enable-dp-attention", lambda a: a.enable_dp_attention, "drop the flag"),
    ("--dcp-size", lambda a: a.dcp_size > 1, "drop the flag"),
    ("--attn-cp-size", lambda a: a.attn_cp_size > 1, "drop the flag"),
    ("--enable-two-batch-overlap", lambda a: a.enable_two_batch_overlap, "drop the flag"),
    ("--enable-pdmux", lambda a: a.enable_pdmux, "drop the flag"),
    ("--dllm-algorithm", lambda a: a.dllm_algorithm is not None, "drop the flag"),
    (
        "--kv-cache-dtype",
        lambda a: a.kv_cache_dtype not in ("auto", "float32", "bfloat16", "bf16", "float16"),
        "the pool holds K and V in the model's type: drop the flag",
    ),
    (
        "--radix-cache-backend",
        lambda a: a.radix_cache_backend not in (None, "tangram"),
        "the tangram pool brings its own prefix cache: drop the flag",
    ),
    (
        "--prefill-only-disable-kv-cache",
        lambda a: a.prefill_only_disable_kv_cache,
        "drop the flag",
    ),
    (
        "--kv-canary",
        lambda a: a.kv_canary not in (None, "none", False),
        "drop the flag; the pool checks its own books when idle",
    ),
    (
        "--cpu-offload-gb / --offload-mode",
        lambda a: bool(a.cpu_offload_gb),
        "drop the flag",
    ),
)


def refuse_unsupported(args: Any) -> None:
    """Raise TangramError naming every unsupported flag of the resolved server arguments."""
    found = [f"{flag} ({remedy})" for flag, asked, remedy in _REFUSED if asked(args)]
    if found:
        raise TangramError("--attention-backend tangram does not work with: " + "; ".join(found))
