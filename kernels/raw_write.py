"""Writes a prefill's new tokens that stay raw to their tail pages."""

import torch
import triton
import triton.language as tl

from tangram_sglang.kernels.raw_rows import HeadIndex

# tokens of a span; `query_pages` and `gate_pages` take the same spans
BLOCK = 32


@triton.jit
def raw_write_kernel(
    p_k,
    p_v,
    p_pool,
    p_table,
    p_spans,
    p_column,
    p_ring,
    k_stride,
    v_stride,
    page_stride,
    table_stride,
    ring,
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    FIELDS: tl.constexpr,
):
    i_head = tl.program_id(1).to(tl.int64)
    p_span = p_spans + tl.program_id(0) * FIELDS
    i_row = tl.load(p_span).to(tl.int64)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    m_n = o_n < tl.load(p_span + 2)
    o_t = tl.load(p_span + 1) + o_n
    o_new = (tl.load(p_span + 3) + o_n).to(tl.int64)
    m_rows = m_n[:, None] & (o_d < D)[None, :]
    o_head = i_head * D + o_d[None, :]
    b_k = tl.load(p_k + (o_new * k_stride)[:, None] + o_head, mask=m_rows, other=0.0)
    b_v = tl.load(p_v + (o_new * v_stride)[:, None] + o_head, mask=m_rows, other=0.0)
    p_pages = p_table + i_row * table_stride + tl.load(p_ring + i_head)
    b_page = tl.load(p_pages + (o_t // P) % ring, mask=m_n, other=0).to(tl.int64)
    i_column = tl.load(p_column + i_head).to(tl.int64)
    o_out = b_page * page_stride + i_column * (2 * P * D) + (o_t % P) * D
    p_rows = p_pool + o_out[:, None] + o_d[None, :]
    tl.store(p_rows, b_k.to(p_pool.dtype.element_ty), mask=m_rows)
    tl.store(p_rows + P * D, b_v.to(p_pool.dtype.element_ty), mask=m_rows)


def raw_write(
    pool: torch.Tensor,
    table: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: torch.Tensor,
    heads: HeadIndex,
    ring: int,
) -> None:
    """Write K and V of every span into the raw rings of one layer.

    Args:
        pool: [pages, H_p, 2, P, D], written; page stride is free.
        table: [rows, E] int32.
        k, v: [T, H, D], the step's own. Token stride is free.
        spans: [spans, SPAN_FIELDS] int32 of at most BLOCK tokens each (``records.raw_spans``).
        heads: of this layer, [H].
        ring: table entries of the kind's ring.
    """
    if not len(spans):
        return
    raw_write_kernel[(len(spans), k.shape[1])](
        k, v, pool, table, spans, heads.column, heads.ring_offset,
        k.stride(0), v.stride(0), pool.stride(0), table.stride(0), ring,
        P=pool.shape[3], D=pool.shape[4], BD=triton.next_power_of_2(pool.shape[4]), BN=BLOCK,
        FIELDS=spans.shape[1], num_warps=4,
    )  # fmt: skip
