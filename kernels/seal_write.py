"""Writes what each head keeps of a window to its final pages."""

import torch
import triton
import triton.language as tl

from tangram_sglang.kernels.raw_rows import HeadIndex, load_rows, raw_offsets

BLOCK = 32


@triton.jit
def seal_write_kernel(
    p_k,
    p_v,
    p_pool,
    p_table,
    p_old,
    p_units,
    p_positions,
    p_group,
    p_column,
    p_kept,
    p_offset,
    k_stride,
    v_stride,
    page_stride,
    table_stride,
    positions_stride,
    W,
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    FIELDS: tl.constexpr,
    ALL: tl.constexpr,
):
    i_head, i_unit = tl.program_id(1).to(tl.int64), tl.program_id(2)
    kept = tl.load(p_kept + i_head)
    o_slot = tl.program_id(0) * BN + tl.arange(0, BN)
    m_slot = o_slot < kept
    if tl.program_id(0) * BN < kept:
        p_unit = p_units + i_unit * FIELDS
        i_row = tl.load(p_unit).to(tl.int64)
        window = tl.load(p_unit + 1)
        n0 = tl.load(p_unit + 2)
        first = tl.load(p_unit + 3)
        old, old_pages, old_first = tl.load(p_unit + 4), tl.load(p_unit + 5), tl.load(p_unit + 6)
        i_group, i_column = tl.load(p_group + i_head), tl.load(p_column + i_head).to(tl.int64)
        if ALL:
            o_w = o_slot
        else:
            i_line = i_unit.to(tl.int64) * tl.num_programs(1) + i_head
            o_w = tl.load(p_positions + i_line * positions_stride + o_slot, mask=m_slot, other=0)
        o_t = window * W + o_w
        m_old, o_pool, o_new = raw_offsets(
            p_old, o_t, m_slot, n0, first, old, old_pages, old_first, i_group, i_column,
            page_stride, k_stride, P, D,
        )  # fmt: skip
        m_new = m_slot & (o_t >= n0)
        o_d = tl.arange(0, BD)
        m_d = o_d < D
        b_k = load_rows(p_pool, p_k + i_head * D, m_old, m_new, o_pool, o_new, o_d, m_d)
        o_new = (first + o_t - n0).to(tl.int64) * v_stride
        b_v = load_rows(p_pool + P * D, p_v + i_head * D, m_old, m_new, o_pool, o_new, o_d, m_d)

        o_entry = window.to(tl.int64) * kept + o_slot
        p_pages = p_table + i_row * table_stride + tl.load(p_offset + i_head)
        b_page = tl.load(p_pages + o_entry // P, mask=m_slot, other=0).to(tl.int64)
        o_out = b_page * page_stride + i_column * (2 * P * D) + (o_entry % P) * D
        p_rows = p_pool + o_out[:, None] + o_d[None, :]
        m_rows = m_slot[:, None] & m_d[None, :]
        tl.store(p_rows, b_k.to(p_pool.dtype.element_ty), mask=m_rows)
        tl.store(p_rows + P * D, b_v.to(p_pool.dtype.element_ty), mask=m_rows)


def seal_write(
    pool: torch.Tensor,
    table: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    old: torch.Tensor,
    units: torch.Tensor,
    positions: torch.Tensor | None,
    heads: HeadIndex,
    window: int,
    most: int,
) -> None:
    """Copy kept tokens, in order of position, to the pages that the table names for the window.

    No page written here may be an old page of any unit: another program may read it later.

    Args:
        pool: [pages, H_p, 2, P, D], written; page stride is free.
        table: [rows, E] int32.
        k, v: [T, H, D], the step's own; any [*, H, D] tensors where no unit has new tokens.
        old: [N] int32, old raw pages (``records.Piece.old``).
        units: [units, UNIT_FIELDS] int32 (``records.seal_units``).
        positions: [units, H, N] int32 from ``select``, or None where every token stays.
        heads: [H].
        window: W.
        most: largest kept count among the heads, known on the host.
    """
    if not len(units):
        return
    seal_write_kernel[(triton.cdiv(most, BLOCK), len(heads.kept), len(units))](
        k, v, pool, table, old, units, units if positions is None else positions,
        heads.group, heads.column, heads.kept, heads.offset,
        k.stride(0), v.stride(0), pool.stride(0), table.stride(0),
        0 if positions is None else positions.stride(1), window,
        P=pool.shape[3], D=pool.shape[4], BD=triton.next_power_of_2(pool.shape[4]), BN=BLOCK,
        FIELDS=units.shape[1], ALL=positions is None, num_warps=4,
    )  # fmt: skip
