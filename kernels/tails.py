"""Copies of raw tails: whole pages out of the way of the step's writes, or rows of windows.

A step's old raw pages may be given back and, in the same step, to somebody else. Where that
happens they are copied first, page by page, to spare pages of the same pool, and the step's lists
(``records.Piece.old``) name the copies. A page holds heads of several layers, so the copy serves
all layers at once, and no kernel needs to know whether it reads an original or a copy.
"""

import torch
import triton
import triton.language as tl

from tangram_sglang.kernels.raw_rows import HeadIndex, load_rows, raw_offsets

BLOCK = 32
CHUNK = 2048


@triton.jit
def copy_pages_kernel(p_pool, p_pairs, page_stride, SIZE: tl.constexpr, BN: tl.constexpr):
    i_pair = tl.program_id(0).to(tl.int64)
    i_source = tl.load(p_pairs + i_pair * 2).to(tl.int64)
    i_target = tl.load(p_pairs + i_pair * 2 + 1).to(tl.int64)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    m_n = o_n < SIZE
    b_x = tl.load(p_pool + i_source * page_stride + o_n, mask=m_n, other=0.0)
    tl.store(p_pool + i_target * page_stride + o_n, b_x, mask=m_n)


@triton.jit
def gather_windows_kernel(
    p_out_k,
    p_out_v,
    p_k,
    p_v,
    p_pool,
    p_old,
    p_units,
    p_group,
    p_column,
    k_stride,
    v_stride,
    page_stride,
    W,
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    FIELDS: tl.constexpr,
):
    i_head, i_unit = tl.program_id(1).to(tl.int64), tl.program_id(2)
    p_unit = p_units + i_unit * FIELDS
    n0 = tl.load(p_unit + 2)
    first = tl.load(p_unit + 3)
    o_w = tl.program_id(0) * BN + tl.arange(0, BN)
    m_w = o_w < W
    o_t = tl.load(p_unit + 1) * W + o_w
    m_old, o_pool, o_new = raw_offsets(
        p_old, o_t, m_w, n0, first, tl.load(p_unit + 4), tl.load(p_unit + 5), tl.load(p_unit + 6),
        tl.load(p_group + i_head), tl.load(p_column + i_head), page_stride, k_stride, P, D,
    )  # fmt: skip
    m_new = m_w & (o_t >= n0)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_k = load_rows(p_pool, p_k + i_head * D, m_old, m_new, o_pool, o_new, o_d, m_d)
    o_new = (first + o_t - n0).to(tl.int64) * v_stride
    b_v = load_rows(p_pool + P * D, p_v + i_head * D, m_old, m_new, o_pool, o_new, o_d, m_d)
    o_line = (i_unit.to(tl.int64) * tl.num_programs(1) + i_head) * W + o_w
    o_out = o_line[:, None] * D + o_d[None, :]
    m_out = m_w[:, None] & m_d[None, :]
    tl.store(p_out_k + o_out, b_k, mask=m_out)
    tl.store(p_out_v + o_out, b_v, mask=m_out)


def copy_pages(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy pages within the pool; no page may be source and target.

    Args:
        pool: [pages, H_p, 2, P, D]; page stride is free.
        pairs: [N, 2] int32, source and target page of each copy.
    """
    if not len(pairs):
        return
    size = pool[0].numel()
    copy_pages_kernel[(len(pairs), triton.cdiv(size, CHUNK))](
        pool, pairs, pool.stride(0), SIZE=size, BN=CHUNK, num_warps=4
    )


def gather_windows(
    out_k: torch.Tensor,
    out_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    old: torch.Tensor,
    units: torch.Tensor,
    heads: HeadIndex,
) -> None:
    """K and V of whole windows side by side, for scorers that have no kernel.

    Args:
        out_k, out_v: [units, H, W, D], written.
        k, v, pool, old, units, heads: as in ``seal_write``.
    """
    units_count, count, window, dim = out_k.shape
    if not units_count:
        return
    gather_windows_kernel[(triton.cdiv(window, BLOCK), count, units_count)](
        out_k, out_v, k, v, pool, old, units, heads.group, heads.column,
        k.stride(0), v.stride(0), pool.stride(0), window,
        P=pool.shape[3], D=dim, BD=triton.next_power_of_2(dim), BN=BLOCK,
        FIELDS=units.shape[1], num_warps=4,
    )  # fmt: skip
