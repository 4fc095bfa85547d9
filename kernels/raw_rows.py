"""Where a step's raw tokens lie: device function shared by the kernels that read them."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class HeadIndex(NamedTuple):
    """Where KV heads live; one entry a head, [H] int32 each.

    Attributes:
        group: index among the groups of the heads' kind.
        column: column in the group's pages.
        kept: K[g], entries of a sealed window.
        offset: first table entry of the group's sealed pages.
        ring_offset: first table entry of the group's raw ring.
    """

    group: torch.Tensor
    column: torch.Tensor
    kept: torch.Tensor
    offset: torch.Tensor
    ring_offset: torch.Tensor


@triton.jit
def raw_offsets(
    p_old,
    o_token,  # positions [N]
    m_token,  # which of them count [N]
    n0,
    first,
    old,
    old_pages,
    old_first,
    i_group,
    i_column,
    page_stride,
    token_stride,
    P: tl.constexpr,
    D: tl.constexpr,
):
    """Which tokens are old [N], their K's offset in the pool and all tokens' offset in k [N]."""
    m_old = m_token & (o_token < n0)
    o_slot = o_token - old_first
    p_list = p_old + old + i_group.to(tl.int64) * old_pages
    b_page = tl.load(p_list + o_slot // P, mask=m_old, other=0).to(tl.int64)
    o_pool = b_page * page_stride + i_column.to(tl.int64) * (2 * P * D) + (o_slot % P) * D
    o_new = (first + o_token - n0).to(tl.int64) * token_stride
    return m_old, o_pool, o_new


@triton.jit
def load_rows(p_pool, p_new, m_old, m_new, o_pool, o_new, o_dim, m_dim):
    """[N, D] rows from the pool where ``m_old`` and from ``p_new`` where ``m_new``, else 0."""
    b_old = tl.load(
        p_pool + o_pool[:, None] + o_dim[None, :],
        mask=m_old[:, None] & m_dim[None, :],
        other=0.0,
    )
    b_new = tl.load(
        p_new + o_new[:, None] + o_dim[None, :], mask=m_new[:, None] & m_dim[None, :], other=0.0
    )
    return tl.where(m_old[:, None], b_old, b_new)
