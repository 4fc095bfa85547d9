"""What a GPU kernel works for, by its name: the one table behind `bench/breakdown.py`.

A step of decode is a CUDA graph and a chunk of prefill is none (``--disable-prefill-cuda-graph``, and
graphs for as many requests as may run), so kernels that serve both are told apart by that. FlashInfer's
decode with tensor cores, which it takes at four or more query heads a KV head, is its prefill kernel.
"""

import re
from functools import cache
from typing import NamedTuple

PREFILL_GEMM = "prefill matrix products"
PREFILL_ATTENTION = "prefill attention"
COMPRESSION = "compression"
KV_WRITE = "KV write, page table"
DECODE_GEMM = "decode matrix products"
DECODE_ATTENTION = "decode attention"
OTHER = "other"

BY_GRAPH_GEMM = (PREFILL_GEMM, DECODE_GEMM)
BY_GRAPH_ATTENTION = (PREFILL_ATTENTION, DECODE_ATTENTION)

# in the order of the tables
CLASSES = (
    *(PREFILL_GEMM, PREFILL_ATTENTION, COMPRESSION, KV_WRITE),
    *(DECODE_GEMM, DECODE_ATTENTION, OTHER),
)


class Kernels(NamedTuple):
    """Kernels of one purpose.

    Attributes:
        names: the whole name of a Triton kernel, or an expression found in that of another.
        work: the class, or the pair (outside of graphs, in graphs).
        why: what they do.
    """

    names: str
    work: str | tuple[str, str]
    why: str


# whole names: what Triton compiles is called as its function is
TRITON = (
    # ours
    Kernels("prefill_kernel", PREFILL_ATTENTION, "ours, any GPU"),
    Kernels("prefill_hopper_kernel", PREFILL_ATTENTION, "ours, Hopper"),
    Kernels("prefill_merge_kernel", PREFILL_ATTENTION, "parts of a split chunk"),
    Kernels("decode_kernel", DECODE_ATTENTION, "ours, whole pages"),
    Kernels("merge_kernel", DECODE_ATTENTION, "parts, the last page and the token's KV write"),
    Kernels("dispatch_kernel", DECODE_ATTENTION, "cuts the step among programs"),
    Kernels("spans_kernel", DECODE_ATTENTION, "rows and positions of a step's new tokens"),
    Kernels("keydiff_kernel", COMPRESSION, "scores"),
    Kernels("logits_kernel", COMPRESSION, "scores"),
    Kernels("softmax_kernel", COMPRESSION, "scores"),
    Kernels("select_kernel", COMPRESSION, "which tokens stay"),
    Kernels("seal_write_kernel", COMPRESSION, "what stays, to its pages"),
    Kernels("gather_windows_kernel", COMPRESSION, "K and V for scorers without a kernel"),
    Kernels("write_queries_kernel", COMPRESSION, "queries that scorers read later"),
    Kernels("gather_queries_kernel", COMPRESSION, "the same, read"),
    Kernels("write_gates_kernel", COMPRESSION, "gate scores that sealing reads later"),
    Kernels("gather_gates_kernel", COMPRESSION, "the same, read"),
    Kernels("raw_write_kernel", KV_WRITE, "a chunk's raw tail"),
    Kernels("copy_pages_kernel", KV_WRITE, "raw pages out of a step's way"),
    Kernels("table_kernel", KV_WRITE, "changes of the page table"),
    # SGLang's triton backend
    Kernels("_fwd_kernel", PREFILL_ATTENTION, "extend_attention.py"),
    Kernels("_fwd_kernel_unified", PREFILL_ATTENTION, "extend_attention.py"),
    Kernels("_fwd_kernel_stage1", DECODE_ATTENTION, "decode_attention.py"),
    Kernels("_fwd_grouped_kernel_stage1", DECODE_ATTENTION, "decode_attention.py"),
    Kernels("_fwd_kernel_stage2", DECODE_ATTENTION, "decode_attention.py: parts"),
    Kernels("get_num_kv_splits_triton", DECODE_ATTENTION, "cuts a step into parts"),
    Kernels("merge_state_kernel", BY_GRAPH_ATTENTION, "merge_state.py: two parts"),
    Kernels("create_flashinfer_kv_indices_triton", KV_WRITE, "table of tokens, for both backends"),
    Kernels("write_req_to_token_pool_triton", KV_WRITE, "table of tokens"),
    Kernels("assign_req_to_token_pool", KV_WRITE, "table of tokens"),
    Kernels("get_last_loc_kernel", KV_WRITE, "table of tokens"),
    Kernels("_get_last_loc_safe_kernel", KV_WRITE, "table of tokens"),
    Kernels("alloc_extend_kernel", KV_WRITE, "table of tokens, in pages"),
    Kernels("alloc_decode_kernel", KV_WRITE, "table of tokens, in pages"),
)

# the first that is found counts: attention's names have CUTLASS types in them too
COMPILED = (
    Kernels(r"BatchDecodeWith|SingleDecodeWith", DECODE_ATTENTION, "FlashInfer"),
    Kernels(r"PrefillWith\w*KVCache", BY_GRAPH_ATTENTION, "FlashInfer, both on tensor cores"),
    Kernels(r"MergeState|AttentionSum", BY_GRAPH_ATTENTION, "FlashInfer: parts"),
    Kernels(r"flash::|FlashAttn|fmha", BY_GRAPH_ATTENTION, "FlashAttention 3 and TensorRT-LLM"),
    Kernels(r"\bstore_kvcache", KV_WRITE, "SGLang: K and V of new tokens"),
    Kernels(r"\bfused_rope_store", KV_WRITE, "SGLang: rotation and KV write in one"),
    Kernels(r"AppendPagedKVCache", KV_WRITE, "FlashInfer"),
    Kernels(r"nvjet|cublas|splitKreduce", BY_GRAPH_GEMM, "cuBLAS"),
    Kernels(r"(?i)cutlass|gemm|gemv", BY_GRAPH_GEMM, "CUTLASS, and cuBLAS's older ones"),
)

_WHOLE = {kernels.names: kernels.work for kernels in TRITON}
_FOUND = [(re.compile(kernels.names), kernels.work) for kernels in COMPILED]


@cache
def work_of(name: str) -> str | tuple[str, str] | None:
    """The class of a kernel, or the pair (outside of graphs, in graphs); None: none of the table."""
    if name in _WHOLE:
        return _WHOLE[name]
    return next((work for pattern, work in _FOUND if pattern.search(name)), None)
