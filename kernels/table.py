"""Changes of the host's page table, applied to the device's copy on the forward stream."""

import torch
import triton
import triton.language as tl

BLOCK = 512


@triton.jit(do_not_specialize=["N"])
def table_kernel(p_table, p_changes, table_stride, N, BN: tl.constexpr):
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    m_n = o_n < N
    p_change = p_changes + o_n.to(tl.int64) * 3
    b_row = tl.load(p_change, mask=m_n, other=0).to(tl.int64)
    b_slot = tl.load(p_change + 1, mask=m_n, other=0)
    b_page = tl.load(p_change + 2, mask=m_n, other=0)
    tl.store(p_table + b_row * table_stride + b_slot, b_page, mask=m_n)


def update_table(table: torch.Tensor, changes: torch.Tensor) -> None:
    """Write pages into the table.

    Args:
        table: [rows, E] int32.
        changes: [N, 3] int32: row, slot, page. A slot named twice must have the same page both
            times; the host takes the page from its own table when it packs the list.
    """
    if len(changes):
        table_kernel[(triton.cdiv(len(changes), BLOCK),)](
            table, changes, table.stride(0), len(changes), BN=BLOCK, num_warps=4
        )
