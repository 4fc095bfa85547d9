"""Queries of windows not sealed yet: written to their pages, and gathered when a window is sealed.

A window's vectors lie one after another in its pages, [heads, r, w, D] over all full-attention heads
(``plan.queries``); its pages stand in slot ``window % slots`` behind the groups of a row of the page
table. Reference: ``backend/query_pages.py``.
"""

import torch
import triton
import triton.language as tl

from tangram_sglang.kernels.raw_write import BLOCK
from tangram_sglang.plan.queries import QueryRule


@triton.jit(do_not_specialize=["first_head"])
def write_queries_kernel(
    p_q,
    p_pool,
    p_table,
    p_spans,
    first_head,
    first_entry,
    q_stride,
    page_stride,
    table_stride,
    W,
    R: tl.constexpr,
    COUNT: tl.constexpr,
    PAGES: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    FIELDS: tl.constexpr,
):
    p_span = p_spans + tl.program_id(0) * FIELDS
    o_n = tl.arange(0, BN)
    o_t = tl.load(p_span + 1) + o_n
    o_place = o_t % W - (W - COUNT)
    m_n = (o_n < tl.load(p_span + 2)) & (o_place >= 0)
    if tl.max(m_n.to(tl.int32), 0) > 0:
        i_head = tl.program_id(1).to(tl.int64)
        i_row = tl.load(p_span).to(tl.int64)
        o_new = (tl.load(p_span + 3) + o_n).to(tl.int64)
        o_d = tl.arange(0, BD)
        m_rows = m_n[:, None] & (o_d < D)[None, :]
        p_pages = p_table + i_row * table_stride + first_entry + o_t // W % SLOTS * PAGES
        for i_g in range(0, R):
            o_vector = ((first_head + i_head) * R + i_g) * COUNT + o_place
            b_page = tl.load(p_pages + o_vector // ROWS, mask=m_n, other=0).to(tl.int64)  # [BN]
            p_new = p_q + (o_new * q_stride)[:, None] + (i_head * R + i_g) * D + o_d[None, :]
            b_q = tl.load(p_new, mask=m_rows, other=0.0)  # [BN, BD]
            o_out = b_page * page_stride + o_vector % ROWS * D
            p_out = p_pool + o_out[:, None] + o_d[None, :]
            tl.store(p_out, b_q.to(p_pool.dtype.element_ty), mask=m_rows)


@triton.jit(do_not_specialize=["first_head"])
def gather_queries_kernel(
    p_out,
    p_q,
    p_pool,
    p_old,
    p_units,
    first_head,
    q_stride,
    page_stride,
    W,
    R: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    FIELDS: tl.constexpr,
):
    i_head, i_unit = tl.program_id(1).to(tl.int64), tl.program_id(2)
    p_unit = p_units + i_unit * FIELDS
    n0 = tl.load(p_unit + 2)
    o_x = tl.program_id(0) * BN + tl.arange(0, BN)
    m_x = o_x < R * COUNT
    o_t = (tl.load(p_unit + 1) + 1) * W - COUNT + o_x % COUNT
    m_old, m_new = m_x & (o_t < n0), m_x & (o_t >= n0)
    o_d = tl.arange(0, BD)
    m_d = (o_d < D)[None, :]
    o_vector = (first_head + i_head) * (R * COUNT) + o_x
    p_pages = p_old + tl.load(p_unit + 7)
    b_page = tl.load(p_pages + o_vector // ROWS, mask=m_old, other=0).to(tl.int64)  # [BN]
    p_held = p_pool + (b_page * page_stride + o_vector % ROWS * D)[:, None] + o_d[None, :]
    b_old = tl.load(p_held, mask=m_old[:, None] & m_d, other=0.0)  # [BN, BD]
    o_new = (tl.load(p_unit + 3) + o_t - n0).to(tl.int64) * q_stride
    o_new += (i_head * R + o_x // COUNT) * D
    p_new = p_q + o_new[:, None] + o_d[None, :]
    b_new = tl.load(p_new, mask=m_new[:, None] & m_d, other=0.0)  # [BN, BD]
    i_line = i_unit.to(tl.int64) * tl.num_programs(1) + i_head
    p_line = p_out + (i_line * (R * COUNT) + o_x)[:, None] * D + o_d[None, :]
    tl.store(p_line, tl.where(m_old[:, None], b_old, b_new), mask=m_x[:, None] & m_d)


def write_queries(
    pool: torch.Tensor,
    table: torch.Tensor,
    q: torch.Tensor,
    spans: torch.Tensor,
    rule: QueryRule,
    window: int,
    first_entry: int,
    first_head: int,
) -> None:
    """Keep those queries of one layer that windows not sealed yet will need.

    Nothing is allocated or read back: the call may be captured in a CUDA graph.

    Args:
        pool: [pages, H_p, 2, P, D], written; page stride is free.
        table: [rows, E] int32.
        q: [T, HQ, D], the step's own, query heads of a KV head side by side. Token stride is free.
        spans: [spans, SPAN_FIELDS] int32 of at most BLOCK tokens each, none of a sealed window
            (``records.raw_spans``, ``decode_spans``).
        rule: which queries are held.
        window: W.
        first_entry: table entry of the first page of queries.
        first_head: the layer's first head among all full-attention heads.
    """
    if not len(spans):
        return
    dim = pool.shape[4]
    write_queries_kernel[(len(spans), q.shape[1] // rule.ratio)](
        q, pool, table, spans, first_head, first_entry,
        q.stride(0), pool.stride(0), table.stride(0), window,
        R=rule.ratio, COUNT=rule.tokens, PAGES=rule.pages, SLOTS=rule.slots,
        ROWS=pool[0].numel() // dim, D=dim, BD=triton.next_power_of_2(dim), BN=BLOCK,
        FIELDS=spans.shape[1], num_warps=4,
    )  # fmt: skip


def gather_queries(
    out: torch.Tensor,
    q: torch.Tensor,
    pool: torch.Tensor,
    old: torch.Tensor,
    units: torch.Tensor,
    window: int,
    first_head: int,
) -> torch.Tensor:
    """Queries of the last w tokens of windows that are sealed, for some heads.

    Args:
        out: [units, H, r, w, D], written.
        q: [T, H * r, D], the step's own of the same heads; anything where no unit has new tokens.
        pool: [pages, H_p, 2, P, D]; page stride is free.
        old: [N] int32, pages of queries, a window's one after another, where ``units`` says.
        units: [units, UNIT_FIELDS] int32 (``records.seal_units``).
        window: W.
        first_head: the first of the heads among all full-attention heads.

    Returns:
        ``out``.
    """
    count, heads, ratio, tokens, dim = out.shape
    if count:
        gather_queries_kernel[(triton.cdiv(ratio * tokens, BLOCK), heads, count)](
            out, q, pool, old, units, first_head, q.stride(0), pool.stride(0), window,
            R=ratio, COUNT=tokens, ROWS=pool[0].numel() // dim,
            D=dim, BD=triton.next_power_of_2(dim), BN=BLOCK, FIELDS=units.shape[1], num_warps=4,
        )  # fmt: skip
    return out
