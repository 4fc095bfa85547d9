"""Prefill attention of a batch of pieces in one launch.

A program holds the queries of a few tokens, all heads that share a KV head, and walks

    [ sealed entries of its windows | old raw tokens | the step's own tokens, causally ]
      pages of the page table         old pages        k and v

The sealed part is ragged per head and needs no mask but for its last block.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tangram_sglang.kernels.prefill_split import LOG2E, Split, merge, program_blocks
from tangram_sglang.kernels.raw_rows import HeadIndex

# queries x heads of a tile on Hopper
HOPPER_ROWS = 128


@triton.jit
def _attend(b_q, b_k, b_v, m_score, b_acc, b_max, b_sum, scale, MASKED: tl.constexpr):
    """One step of the online softmax; b_max is in units of log2."""
    PRECISION: tl.constexpr = "ieee" if b_q.dtype == tl.float32 else "tf32"
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BN]
    if MASKED:
        b_s = tl.where(m_score, b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale)
    b_base = b_new
    if MASKED:
        # a query may have seen nothing so far; -inf minus -inf is no number
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s * scale - b_base[:, None])
    b_shrink = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
    b_acc = b_acc * b_shrink[:, None]
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, b_new, b_sum


@triton.jit(do_not_specialize=["target"])
def prefill_kernel(
    p_q,
    p_k,
    p_v,
    p_out,
    p_pool,
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
    k_stride,
    v_stride,
    out_stride,
    table_stride,
    page_stride,
    sliding_window,
    target,
    scale,
    G: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    FIELDS: tl.constexpr,
    SLIDING: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    p_tile = p_tiles + tl.program_id(0) * FIELDS
    i_head = tl.load(p_order + tl.program_id(2)).to(tl.int64)
    i_row = tl.load(p_tile).to(tl.int64)
    i_first = tl.load(p_tile + 1)
    n_tokens = tl.load(p_tile + 2)
    position = tl.load(p_tile + 3)
    n_win = tl.load(p_tile + 4)
    raw_start = tl.load(p_tile + 5)
    n0 = tl.load(p_tile + 6)
    i_new = tl.load(p_tile + 7)

    p_column_k = p_pool + tl.load(p_column + i_head).to(tl.int64) * (2 * P * D)
    sealed = 0
    p_pages = p_table
    if not SLIDING:
        sealed = n_win * tl.load(p_kept + i_head)
        p_pages = p_table + i_row * table_stride + tl.load(p_offset + i_head)
    page_start = raw_start // P * P
    entries = sealed + tl.maximum(n0 - page_start, 0)
    blocks_paged = tl.cdiv(entries, BN)
    raw_new = tl.maximum(raw_start, n0)
    end = position + n_tokens
    i_block = 0
    last = blocks_paged + tl.cdiv(end - raw_new, BN)
    if SPLIT:
        i_block, last, used = program_blocks(last, target)
        i_line = tl.program_id(0).to(tl.int64) * tl.num_programs(2) + i_head
        if i_block == 0:
            tl.store(p_used + i_line, used)
        if i_block >= last:
            return

    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    o_token = o_m // G
    m_q = o_token < n_tokens
    o_q = (i_first + o_token).to(tl.int64)
    i_query = i_head * G + o_m % G
    b_q = tl.load(
        p_q + (o_q * q_stride + i_query * D)[:, None] + o_d[None, :],
        mask=m_q[:, None] & m_d[None, :],
        other=0.0,
    )  # [BM, BD]
    b_pos = position + o_token
    b_acc = tl.zeros([BM, BD], tl.float32)
    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)

    full = sealed // BN
    if not SLIDING:
        for i_full in range(i_block, tl.minimum(full, last)):
            i_start = i_full * BN
            if P % BN == 0:
                # the whole block lies in one page
                i_page = tl.load(p_pages + i_start // P).to(tl.int64)
                o_pool = i_page * page_stride + (i_start % P + o_n) * D
            else:
                o_entry = i_start + o_n
                b_page = tl.load(p_pages + o_entry // P).to(tl.int64)
                o_pool = b_page * page_stride + (o_entry % P) * D
            p_rows = p_column_k + o_pool[:, None] + o_d[None, :]
            if D == BD:
                b_k = tl.load(p_rows)  # [BN, BD]
                b_v = tl.load(p_rows + P * D)
            else:
                b_k = tl.load(p_rows, mask=m_d[None, :], other=0.0)
                b_v = tl.load(p_rows + P * D, mask=m_d[None, :], other=0.0)
            b_acc, b_max, b_sum = _attend(
                b_q, b_k, b_v, True, b_acc, b_max, b_sum, scale, MASKED=False
            )

    # what is left of the sealed entries, and the old raw tokens behind them
    old_first = tl.load(p_tile + 10)
    p_list = (
        p_old + tl.load(p_tile + 8) + tl.load(p_group + i_head).to(tl.int64) * tl.load(p_tile + 9)
    )
    for i_paged in range(tl.maximum(i_block, full), tl.minimum(blocks_paged, last)):
        o_entry = i_paged * BN + o_n
        m_sealed = o_entry < sealed
        o_t = o_entry - sealed + page_start
        m_old = (o_entry >= sealed) & (o_t < n0) & (o_t >= raw_start)
        b_page = tl.load(p_pages + o_entry // P, mask=m_sealed, other=0)
        b_page += tl.load(p_list + (o_t - old_first) // P, mask=m_old, other=0)
        # sealed entries and page_start are whole pages, so both count slots alike
        o_pool = b_page.to(tl.int64) * page_stride + (o_entry % P) * D
        m_n = m_sealed | m_old
        p_rows = p_column_k + o_pool[:, None] + o_d[None, :]
        m_rows = m_n[:, None] & m_d[None, :]
        b_k = tl.load(p_rows, mask=m_rows, other=0.0)
        b_v = tl.load(p_rows + P * D, mask=m_rows, other=0.0)
        m_score = m_n[None, :]
        if SLIDING:
            m_score = m_score & (o_t[None, :] > b_pos[:, None] - sliding_window)
        b_acc, b_max, b_sum = _attend(
            b_q, b_k, b_v, m_score, b_acc, b_max, b_sum, scale, MASKED=True
        )

    for i_new_block in range(tl.maximum(i_block, blocks_paged), last):
        o_t = raw_new + (i_new_block - blocks_paged) * BN + o_n
        o_row = (i_new + o_t - n0).to(tl.int64)
        m_rows = (o_t < end)[:, None] & m_d[None, :]
        b_k = tl.load(
            p_k + (o_row * k_stride + i_head * D)[:, None] + o_d[None, :], mask=m_rows, other=0.0
        )
        b_v = tl.load(
            p_v + (o_row * v_stride + i_head * D)[:, None] + o_d[None, :], mask=m_rows, other=0.0
        )
        m_score = o_t[None, :] <= b_pos[:, None]
        if SLIDING:
            m_score = m_score & (o_t[None, :] > b_pos[:, None] - sliding_window)
        b_acc, b_max, b_sum = _attend(
            b_q, b_k, b_v, m_score, b_acc, b_max, b_sum, scale, MASKED=True
        )

    if SPLIT:
        i_part = (i_line * tl.num_programs(1) + tl.program_id(1)) * BM
        # a split may hold nothing that a query sees
        b_one = tl.where(b_sum > 0, b_sum, 1.0)
        tl.store(p_lse + i_part + o_m, tl.where(b_sum > 0, b_max + tl.log2(b_one), float("-inf")))
        p_rows = p_part + (i_part + o_m)[:, None] * D + o_d[None, :]
        tl.store(p_rows, b_acc / b_one[:, None], mask=m_d[None, :])
    else:
        if SINKS:
            b_sink = tl.load(p_sink + i_query).to(tl.float32) * LOG2E
            b_new = tl.maximum(b_max, b_sink)
            b_shrink = tl.exp2(b_max - b_new)
            b_sum = b_sum * b_shrink + tl.exp2(b_sink - b_new)
            b_acc = b_acc * b_shrink[:, None]
        tl.store(
            p_out + (o_q * out_stride + i_query * D)[:, None] + o_d[None, :],
            (b_acc / b_sum[:, None]).to(p_out.dtype.element_ty),
            mask=m_q[:, None] & m_d[None, :],
        )


@dataclass(frozen=True, slots=True)
class Config:
    """How the kernel is compiled.

    Attributes:
        rows: queries x heads of a tile.
        block: keys of a block.
        warps, stages: of a program; stages are blocks in flight.
    """

    rows: int
    block: int
    warps: int
    stages: int


def config_for(head_dim: int, dtype: torch.dtype) -> Config:
    """The config for a head size and type."""
    if dtype == torch.float32:
        return Config(32, 32, 4, 2)
    if head_dim <= 128:
        return Config(128, 128, 8, 2)
    return Config(128, 32, 8, 2)


def prefill_attention(
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
    chosen: Config | None = None,
) -> torch.Tensor:
    """Attention of every query of a step over what its row holds.

    Args:
        q: [T, HQ, D]; query heads of a KV head side by side. Token stride is free.
        k, v: [T, H, D], the step's own tokens. Token stride is free.
        out: [T, HQ, D], written where a tile says so.
        pool: [pages, H_p, 2, P, D]; page stride is free.
        table: [rows, E] int32.
        old: [N] int32, old raw pages (``records.Piece.old``).
        tiles: [tiles, TILE_FIELDS] int32 (``records.prefill_tiles``) of up to ``rows // r`` tokens, r
            query heads per KV head.
        heads: of this layer, [H].
        order: [H] int32, heads in the order to start them; most entries first.
        scaling: factor on q.k, above 0.
        sliding_window: tokens a query sees; None for full attention.
        sinks: [HQ], logits that join each softmax without a value.
        split: how keys are split among programs, or None; for full attention.
        chosen: other block sizes, for benchmarks.

    Returns:
        ``out``.
    """
    ratio, dim = q.shape[1] // k.shape[1], q.shape[2]
    cfg = chosen or config_for(dim, q.dtype)
    if not len(tiles):
        return out
    if chosen is None and cfg.rows == HOPPER_ROWS and q.is_cuda:
        # needs Gluon, which not every Triton has
        from tangram_sglang.kernels import prefill_hopper

        if prefill_hopper.supported(q, pool):
            return prefill_hopper.prefill_attention_hopper(
                q, k, v, out, pool, table, old, tiles, heads, order, scaling, sliding_window, sinks,
                split,
            )  # fmt: skip
    prefill_kernel[(len(tiles), split.count if split else 1, k.shape[1])](
        q,
        k,
        v,
        out,
        pool,
        table,
        old,
        tiles,
        order,
        heads.group,
        heads.column,
        heads.kept,
        heads.offset,
        q if sinks is None else sinks,
        split.part if split else q,
        split.lse if split else q,
        split.used if split else tiles,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        table.stride(0),
        pool.stride(0),
        sliding_window or 0,
        split.target if split else 1,
        scaling * LOG2E.value,
        G=ratio,
        P=pool.shape[3],
        D=dim,
        BD=max(16, triton.next_power_of_2(dim)),
        BM=cfg.rows,
        BN=cfg.block,
        FIELDS=tiles.shape[1],
        SLIDING=sliding_window is not None,
        SINKS=sinks is not None,
        SPLIT=split is not None,
        num_warps=cfg.warps,
        num_stages=cfg.stages,
    )
    if split:
        merge(out, split, tiles, k.shape[1], cfg.rows, sinks)
    return out
