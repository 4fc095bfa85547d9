"""Writes K and V of new tokens to their raw slots: one launch per layer, for any batch of rows.

A token that the step itself seals, or that its sliding window has left behind, has no raw slot
and is not written.
"""

import torch
import triton
import triton.language as tl

from tangram_sglang.kernels.layer_tables import LayerTables

BLOCK = 16

TABLES = ["token_row", "positions", "rows", "seq_lens", "n_win", "ring_offset", "column"]
TABLES += ["sliding", "rings"]


@triton.jit(do_not_specialize=["tokens", "table_stride"], do_not_specialize_on_alignment=TABLES)
def write_kernel(
    k,
    v,
    pool,
    table,
    token_row,
    positions,
    rows,
    seq_lens,
    n_win,
    ring_offset,
    column,
    sliding,
    rings,
    tokens,
    k_stride,
    v_stride,
    page_stride,
    column_stride,
    table_stride,
    D: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    SLIDING: tl.constexpr,
):
    i_h = tl.program_id(1).to(tl.int64)
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    m_t = o_t < tokens
    i_b = tl.load(token_row + o_t, mask=m_t, other=0).to(tl.int64)  # [BT]
    row = tl.load(rows + i_b, mask=m_t, other=0).to(tl.int64)  # [BT]
    position = tl.load(positions + o_t, mask=m_t, other=0).to(tl.int32)  # [BT]
    if SLIDING:
        n = tl.load(seq_lens + i_b, mask=m_t, other=0).to(tl.int32)
        tail_start = tl.maximum(n - tl.load(sliding), 0) // P * P
    else:
        tail_start = tl.load(n_win + i_b, mask=m_t, other=0).to(tl.int32) * W
    m_t = m_t & (row > 0) & (position >= tail_start)
    slot = tl.load(ring_offset + i_h) + position // P % tl.load(rings)
    page = tl.load(table + row * table_stride + slot, mask=m_t, other=0).to(tl.int64)  # [BT]
    m_td = m_t[:, None] & (o_d < D)[None, :]
    o_slot = page * page_stride + tl.load(column + i_h).to(tl.int64) * column_stride
    p_k = pool + (o_slot + position % P * D)[:, None] + o_d[None, :]
    p_token = o_t[:, None] * k_stride + i_h * D + o_d[None, :]
    b_k = tl.load(k + p_token, mask=m_td, other=0.0)  # [BT, BD]
    p_token = o_t[:, None] * v_stride + i_h * D + o_d[None, :]
    b_v = tl.load(v + p_token, mask=m_td, other=0.0)  # [BT, BD]
    tl.store(p_k, b_k.to(pool.dtype.element_ty), mask=m_td)
    tl.store(p_k + P * D, b_v.to(pool.dtype.element_ty), mask=m_td)


def write_raw(
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    token_row: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    n_win: torch.Tensor,
    tables: LayerTables,
    layer: int,
) -> None:
    """Store K and V of tokens that stay raw.

    Args:
        k, v: [T, H, D]; each token's heads contiguous.
        pool: [pages, H_p, 2, P, D]; the last three dimensions contiguous.
        table: [rows, E] int32, page table.
        token_row: [T] int, index of each token's request in ``rows``.
        positions: [T] int, each token's position; below its request's seq_len.
        rows: [B] int, rows of the page table; nothing is written for 0.
        seq_lens, n_win: [B] int, tokens and sealed windows of each request after the step.
        tables: where heads lie; ``layer`` is the index of this layer.
    """
    tokens, heads, dim = k.shape
    if (
        heads != tables.heads
        or v.shape != k.shape
        or pool.shape[2:] != (2, tables.page, dim)
        or pool.stride()[2:] != (tables.page * dim, dim, 1)
        or any(x.stride()[1:] != (dim, 1) for x in (k, v))
        or not len(token_row) == len(positions) == tokens
    ):
        raise ValueError(
            f"KV write of {tables.heads} heads, pages of {tables.page}: got k {tuple(k.shape)}, "
            f"v {tuple(v.shape)}, pool {tuple(pool.shape)} with strides {pool.stride()}, "
            f"{len(token_row)} token rows, {len(positions)} positions"
        )
    write_kernel[(triton.cdiv(tokens, BLOCK), heads)](
        k=k,
        v=v,
        pool=pool,
        table=table,
        token_row=token_row,
        positions=positions,
        rows=rows,
        seq_lens=seq_lens,
        n_win=n_win,
        ring_offset=tables.ring_offset[layer],
        column=tables.column[layer],
        sliding=tables.sliding[layer:],
        rings=tables.ring[layer:],
        tokens=tokens,
        k_stride=k.stride(0),
        v_stride=v.stride(0),
        page_stride=pool.stride(0),
        column_stride=pool.stride(1),
        table_stride=table.stride(0),
        D=dim,
        W=tables.window,
        P=tables.page,
        BT=BLOCK,
        BD=triton.next_power_of_2(dim),
        SLIDING=tables.sliding_window[layer] > 0,
        num_warps=4,
    )
