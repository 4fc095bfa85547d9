"""Prefill attention on Hopper: what ``prefill.py`` computes, with warps that only load.

Two warps keep the copy engine busy, page by page; two groups of four warps hold 64 query rows each
and multiply straight from shared memory. A page of P tokens and 64 dims is one box of the copy
engine, so a block of keys is put together from pages without a gather.

Blocks of keys come in the order of ``prefill.py``. Those that are not full, and the causal ones,
are masked; rows of V that do not count are zeroed, as they may hold anything.
"""

import functools
import math
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tangram_sglang.kernels.hopper_blocks import extent, load_blocks, softmax_step, zero_rows
from tangram_sglang.kernels.prefill_split import Split, merge
from tangram_sglang.kernels.raw_rows import HeadIndex

LOG2E: gl.constexpr = gl.constexpr(math.log2(math.e))
# rows of queries x heads that one group of warps holds, such groups, and dims of one box
ROWS: gl.constexpr = gl.constexpr(64)
CONSUMERS: gl.constexpr = gl.constexpr(2)
COLUMNS = 64


@gluon.jit
def _attend(
    CONSUMER: gl.constexpr,
    p_q, p_out, p_sink, q_smem, k_smem, v_smem, k_ready, k_empty, v_ready, v_empty,
    i_first, n_tokens, position, i_head, q_stride, out_stride, sliding_window, scale,
    entries, sealed, page_start, raw_start, n0, blocks_paged, first, full, blocks,
    p_part, p_lse,
    G: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    SLIDING: gl.constexpr, SINKS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    BM: gl.constexpr = ROWS
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    out_row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

    # queries to shared memory
    o_m = CONSUMER * BM + gl.arange(0, BM, gl.SliceLayout(1, load_layout))
    o_d = gl.arange(0, D, gl.SliceLayout(0, load_layout))
    m_q = o_m // G < n_tokens
    o_q = (i_first + o_m // G).to(gl.int64) * q_stride + (i_head * G + o_m % G) * D
    b_q = gl.load(p_q + o_q[:, None] + o_d[None, :], mask=m_q[:, None], other=0.0)
    q = q_smem.index(CONSUMER)
    q.store(b_q)
    fence_async_shared()

    end = position + n_tokens
    o_row = CONSUMER * BM + gl.arange(0, BM, row_layout)
    b_pos = position + o_row // G
    o_n = gl.arange(0, BN, gl.SliceLayout(0, s_layout))
    b_max = gl.full([BM], float("-inf"), gl.float32, row_layout)
    b_sum = gl.zeros([BM], gl.float32, row_layout)
    b_acc = gl.zeros([BM, D], gl.float32, o_layout)
    b_zero = gl.zeros([BM, BN], gl.float32, s_layout)

    # block 0 has nothing to multiply with V yet
    count, t0, low = extent(
        first, entries, sealed, page_start, raw_start, end, n0, blocks_paged, BN, SLIDING
    )
    mbarrier.wait(k_ready.index(0), 0)
    b_s = warpgroup_mma(q, k_smem.index(0).permute((1, 0)), b_zero, use_acc=False, is_async=True)
    b_s = warpgroup_mma_wait(0, deps=(b_s,))
    mbarrier.arrive(k_empty.index(0), count=1)
    m_score = (o_n < count)[None, :] & (o_n[None, :] <= (b_pos - t0)[:, None])
    if SLIDING:
        m_score = m_score & (o_n[None, :] > (b_pos - t0 - sliding_window)[:, None])
    b_s = gl.where(m_score, b_s, float("-inf"))
    b_p, b_max, b_sum, b_shrink = softmax_step(b_s, b_max, b_sum, scale, True)
    b_w = gl.convert_layout(b_p.to(dtype), p_layout)
    last_count, last_low = count, low
    mbarrier.wait(k_ready.index(1), 0, pred=blocks > 1)

    for i_block in range(1, full):
        stage = i_block % STAGES
        last = (i_block - 1) % STAGES
        last_phase = ((i_block - 1) // STAGES) & 1
        b_s = warpgroup_mma(
            q, k_smem.index(stage).permute((1, 0)), b_zero, use_acc=False, is_async=True
        )
        mbarrier.wait(v_ready.index(last), last_phase)
        b_acc = warpgroup_mma(b_w, v_smem.index(last), b_acc, is_async=True)
        b_s = warpgroup_mma_wait(1, deps=(b_s,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        b_p, b_max, b_sum, b_shrink = softmax_step(b_s, b_max, b_sum, scale, False)
        b_next = gl.convert_layout(b_p.to(dtype), p_layout)
        # this wait ends a basic block: else the assembler moves the next one up, before the
        # exponentials that are to run beside the product with V
        following = i_block + 1
        mbarrier.wait(
            k_ready.index(following % STAGES), (following // STAGES) & 1, pred=following < blocks
        )
        b_acc, b_w, b_next, b_sum = warpgroup_mma_wait(0, deps=(b_acc, b_w, b_next, b_sum))
        mbarrier.arrive(v_empty.index(last), count=1)
        b_acc = b_acc * gl.convert_layout(b_shrink, out_row_layout)[:, None]
        b_w = b_next
        last_count, last_low = BN, 0

    for i_block in range(gl.maximum(1, full), blocks):
        stage = i_block % STAGES
        last = (i_block - 1) % STAGES
        last_phase = ((i_block - 1) // STAGES) & 1
        count, t0, low = extent(
            first + i_block, entries, sealed, page_start, raw_start, end, n0, blocks_paged, BN,
            SLIDING,
        )  # fmt: skip
        b_s = warpgroup_mma(
            q, k_smem.index(stage).permute((1, 0)), b_zero, use_acc=False, is_async=True
        )
        mbarrier.wait(v_ready.index(last), last_phase)
        if (last_count < BN) | (last_low > 0):
            zero_rows(v_smem.index(last), last_count, last_low, load_layout)
        b_acc = warpgroup_mma(b_w, v_smem.index(last), b_acc, is_async=True)
        b_s = warpgroup_mma_wait(1, deps=(b_s,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        # most of the step's tokens lie before every query of the tile
        if SLIDING | (count < BN) | (t0 + BN > position + 1):
            m_score = (o_n < count)[None, :] & (o_n[None, :] <= (b_pos - t0)[:, None])
            if SLIDING:
                m_score = m_score & (o_n[None, :] > (b_pos - t0 - sliding_window)[:, None])
            b_s = gl.where(m_score, b_s, float("-inf"))
        b_p, b_max, b_sum, b_shrink = softmax_step(b_s, b_max, b_sum, scale, SLIDING | SPLIT)
        b_next = gl.convert_layout(b_p.to(dtype), p_layout)
        # this wait ends a basic block: else the assembler moves the next one up, before the
        # exponentials that are to run beside the product with V
        following = i_block + 1
        mbarrier.wait(
            k_ready.index(following % STAGES), (following // STAGES) & 1, pred=following < blocks
        )
        b_acc, b_w, b_next, b_sum = warpgroup_mma_wait(0, deps=(b_acc, b_w, b_next, b_sum))
        mbarrier.arrive(v_empty.index(last), count=1)
        b_acc = b_acc * gl.convert_layout(b_shrink, out_row_layout)[:, None]
        b_w = b_next
        last_count, last_low = count, low

    last = (blocks - 1) % STAGES
    mbarrier.wait(v_ready.index(last), ((blocks - 1) // STAGES) & 1)
    if (last_count < BN) | (last_low > 0):
        zero_rows(v_smem.index(last), last_count, last_low, load_layout)
    b_acc = warpgroup_mma(b_w, v_smem.index(last), b_acc, is_async=True)
    b_acc, b_w = warpgroup_mma_wait(0, deps=(b_acc, b_w))

    o_m = CONSUMER * BM + gl.arange(0, BM, out_row_layout)
    o_d = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    if SPLIT:
        # a split may hold nothing that a query sees
        b_one = gl.where(b_sum > 0, b_sum, 1.0)
        gl.store(p_lse + o_row, gl.where(b_sum > 0, b_max + gl.log2(b_one), float("-inf")))
        b_out = b_acc / gl.convert_layout(b_one, out_row_layout)[:, None]
        gl.store(p_part + o_m[:, None] * D + o_d[None, :], b_out)
    else:
        if SINKS:
            b_sink = gl.load(p_sink + i_head * G + o_row % G).to(gl.float32) * LOG2E
            b_new = gl.maximum(b_max, b_sink)
            b_shrink = gl.exp2(b_max - b_new)
            b_sum = b_sum * b_shrink + gl.exp2(b_sink - b_new)
            b_acc = b_acc * gl.convert_layout(b_shrink, out_row_layout)[:, None]
        b_out = b_acc / gl.convert_layout(b_sum, out_row_layout)[:, None]
        o_out = (i_first + o_m // G).to(gl.int64) * out_stride + (i_head * G + o_m % G) * D
        m_out = (o_m // G < n_tokens)[:, None]
        gl.store(p_out + o_out[:, None] + o_d[None, :], b_out.to(dtype), mask=m_out)


@gluon.jit(do_not_specialize=["target"])
def prefill_hopper_kernel(
    p_q,
    d_k,
    d_v,
    p_out,
    d_pool,
    p_table,
    p_old,
    p_tiles,
    p_order,
    p_group,
    p_column,
    p_kept,
    p_offset,
    p_sink,
    p_part,
    p_lse,
    p_used,
    q_stride,
    out_stride,
    table_stride,
    page_rows,
    sliding_window,
    target,
    scale,
    G: gl.constexpr,
    P: gl.constexpr,
    D: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    FIELDS: gl.constexpr,
    SLIDING: gl.constexpr,
    SINKS: gl.constexpr,
    SPLIT: gl.constexpr,
    num_warps: gl.constexpr,
):
    p_tile = p_tiles + gl.program_id(0) * FIELDS
    i_head = gl.load(p_order + gl.program_id(2))
    i_row = gl.load(p_tile).to(gl.int64)
    i_first = gl.load(p_tile + 1)
    n_tokens = gl.load(p_tile + 2)
    position = gl.load(p_tile + 3)
    n_win = gl.load(p_tile + 4)
    raw_start = gl.load(p_tile + 5)
    n0 = gl.load(p_tile + 6)
    i_new = gl.load(p_tile + 7)
    old_first = gl.load(p_tile + 10)
    p_list = (
        p_old + gl.load(p_tile + 8) + gl.load(p_group + i_head).to(gl.int64) * gl.load(p_tile + 9)
    )
    p_pages = p_table
    sealed = 0
    if not SLIDING:
        sealed = n_win * gl.load(p_kept + i_head)
        p_pages = p_table + i_row * table_stride + gl.load(p_offset + i_head)
    page_start = raw_start // P * P
    entries = sealed + gl.maximum(n0 - page_start, 0)
    blocks_paged = (entries + BN - 1) // BN
    raw_new = gl.maximum(raw_start, n0)
    blocks = blocks_paged + (position + n_tokens - raw_new + BN - 1) // BN
    first = 0
    if SPLIT:
        i_line = gl.program_id(0).to(gl.int64) * gl.num_programs(2) + i_head
        # as in prefill_split.program_blocks
        splits = gl.minimum(gl.cdiv(blocks, target), gl.num_programs(1))
        per = gl.cdiv(blocks, splits)
        first = gl.program_id(1) * per
        if first == 0:
            gl.store(p_used + i_line, gl.cdiv(blocks, per))
        if first >= blocks:
            return
        blocks = gl.minimum(per, blocks - first)
        i_part = i_line * gl.num_programs(1) + gl.program_id(1)
        p_part += i_part * (CONSUMERS * ROWS * D)
        p_lse += i_part * (CONSUMERS * ROWS)
    full = gl.minimum(gl.maximum(sealed // BN - first, 0), blocks)

    dtype: gl.constexpr = d_pool.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, D], layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BN, D], layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BN, D], layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    i_page_row = gl.load(p_column + i_head) * (2 * P)
    i_new_row = i_new + raw_new - n0
    attended = (
        p_q, p_out, p_sink, q_smem, k_smem, v_smem, k_ready, k_empty, v_ready, v_empty,
        i_first, n_tokens, position, i_head, q_stride, out_stride, sliding_window, scale,
        entries, sealed, page_start, raw_start, n0, blocks_paged, first, full, blocks,
        p_part, p_lse, G, D, BN, STAGES, SLIDING, SINKS, SPLIT,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_attend, (0, *attended)),
            (_attend, (1, *attended)),
            (load_blocks, (
                p_pages, p_list, d_pool, d_k, k_smem, k_ready, k_empty,
                sealed, entries, page_start, old_first, page_rows,
                i_page_row, i_new_row, i_head * D, blocks_paged, first, blocks,
                P, D, BN, STAGES,
            )),
            (load_blocks, (
                p_pages, p_list, d_pool, d_v, v_smem, v_ready, v_empty,
                sealed, entries, page_start, old_first, page_rows,
                i_page_row + P, i_new_row, i_head * D, blocks_paged, first, blocks,
                P, D, BN, STAGES,
            )),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """Keys of a block and blocks in flight."""

    block: int
    stages: int


# by head size
CONFIGS = {64: HopperConfig(128, 3), 128: HopperConfig(128, 2), 256: HopperConfig(64, 2)}

# built once: making one costs the host more than a launch's arithmetic
LAYOUT = gl.NVMMASharedLayout(128, 16, 2)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def supported(q: torch.Tensor, pool: torch.Tensor) -> bool:
    """Whether this kernel takes a launch; ``prefill.py`` takes every one."""
    page, dim = pool.shape[3:]
    return (
        q.is_cuda
        and _is_hopper(q.device)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == pool.dtype
        and dim in CONFIGS
        and page in (8, 16, 32, 64)
        and pool.stride(0) % dim == 0
    )


def _rows(x: torch.Tensor, width: int, stride: int, count: int, box: int) -> TensorDescriptor:
    """``x`` as [count, width] rows, read in boxes of [box, COLUMNS]."""
    return TensorDescriptor(x, [count, width], [stride, 1], [box, COLUMNS], LAYOUT)


def _aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def prefill_attention_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    old: torch.Tensor,
    tiles: torch.Tensor,
    heads: HeadIndex,
    order: torch.Tensor,
    scaling: float,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    split: Split | None = None,
    chosen: HopperConfig | None = None,
) -> torch.Tensor:
    """``prefill.prefill_attention`` where ``supported``, on tiles of 128 rows."""
    dim, page = q.shape[2], pool.shape[3]
    # the copy engine reads rows that start on 16 bytes
    k, v = (x if _aligned(x) else x.contiguous() for x in (k, v))
    count, width = len(k), k.shape[1] * dim
    cfg = chosen or CONFIGS[dim]
    if not len(tiles):
        return out
    page_rows = pool.stride(0) // dim
    prefill_hopper_kernel[(len(tiles), split.count if split else 1, k.shape[1])](
        q,
        _rows(k, width, k.stride(0), count, cfg.block),
        _rows(v, width, v.stride(0), count, cfg.block),
        out,
        _rows(pool, dim, dim, len(pool) * page_rows, page),
        table, old, tiles, order, heads.group, heads.column, heads.kept, heads.offset,
        q if sinks is None else sinks,
        split.part if split else q, split.lse if split else q, split.used if split else tiles,
        q.stride(0), out.stride(0), table.stride(0), page_rows,
        sliding_window or 0, split.target if split else 1, scaling * LOG2E.value,
        G=q.shape[1] // k.shape[1], P=page, D=dim, BN=cfg.block, STAGES=cfg.stages,
        FIELDS=tiles.shape[1], SLIDING=sliding_window is not None, SINKS=sinks is not None,
        SPLIT=split is not None, num_warps=4,
    )  # fmt: skip
    if split:
        merge(out, split, tiles, k.shape[1], CONSUMERS.value * ROWS.value, sinks)
    return out
