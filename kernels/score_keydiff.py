"""KeyDiff scores of whole windows (``score/keydiff.py``), fp32.

Two launches over blocks of tokens: sums of unit keys, then scores against the direction of their
sum. The sums of a window's blocks are added in one order, so scores do not depend on the batch.
"""

import torch
import triton
import triton.language as tl

from tangram_sglang.kernels.raw_rows import HeadIndex, load_rows, raw_offsets

BLOCK = 64


@triton.jit
def keydiff_kernel(
    p_scores,
    p_sums,
    p_k,
    p_pool,
    p_old,
    p_units,
    p_group,
    p_column,
    k_stride,
    page_stride,
    W,
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    FIELDS: tl.constexpr,
    SUM: tl.constexpr,
):
    i_head, i_unit = tl.program_id(1).to(tl.int64), tl.program_id(2)
    p_unit = p_units + i_unit * FIELDS
    n0 = tl.load(p_unit + 2)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    o_w = tl.program_id(0) * BN + tl.arange(0, BN)
    m_t = o_w < W
    o_t = tl.load(p_unit + 1) * W + o_w
    m_old, o_pool, o_new = raw_offsets(
        p_old, o_t, m_t, n0, tl.load(p_unit + 3),
        tl.load(p_unit + 4), tl.load(p_unit + 5), tl.load(p_unit + 6),
        tl.load(p_group + i_head), tl.load(p_column + i_head), page_stride, k_stride, P, D,
    )  # fmt: skip
    m_new = m_t & (o_t >= n0)
    b_k = load_rows(p_pool, p_k + i_head * D, m_old, m_new, o_pool, o_new, o_d, m_d)
    b_k = b_k.to(tl.float32)  # [BN, BD]
    b_k = b_k / tl.maximum(tl.sqrt(tl.sum(b_k * b_k, 1)), 1e-12)[:, None]
    i_line = i_unit.to(tl.int64) * tl.num_programs(1) + i_head
    p_line = p_sums + i_line * tl.num_programs(0) * D
    if SUM:
        tl.store(p_line + tl.program_id(0) * D + o_d, tl.sum(b_k, 0), mask=m_d)
    else:
        b_sum = tl.zeros([BD], tl.float32)
        for i_block in range(0, tl.num_programs(0)):
            b_sum += tl.load(p_line + i_block * D + o_d, mask=m_d, other=0.0)
        b_mean = b_sum / W
        b_mean = b_mean / tl.maximum(tl.sqrt(tl.sum(b_mean * b_mean, 0)), 1e-12)
        tl.store(p_scores + i_line * W + o_w, -tl.sum(b_k * b_mean[None, :], 1), mask=m_t)


def score_keydiff(
    scores: torch.Tensor,
    sums: torch.Tensor,
    k: torch.Tensor,
    pool: torch.Tensor,
    old: torch.Tensor,
    units: torch.Tensor,
    heads: HeadIndex,
) -> torch.Tensor:
    """Scores of windows of which some tokens lie in old pages and some in the step's own K.

    Args:
        scores: [units, H, W] fp32, written.
        sums: [units, H, W / BLOCK rounded up, D] fp32 or longer, overwritten.
        k: [T, H, D], the step's own keys; any [*, H, D] tensor where no unit has new tokens.
        pool: [pages, H_p, 2, P, D]; page stride is free.
        old: [N] int32, old raw pages (``records.Piece.old``).
        units: [units, UNIT_FIELDS] int32 (``records.seal_units``).
        heads: [H].

    Returns:
        ``scores``.
    """
    units_count, count, window = scores.shape
    if not units_count:
        return scores
    for is_sum in (True, False):
        keydiff_kernel[(triton.cdiv(window, BLOCK), count, units_count)](
            scores, sums, k, pool, old, units, heads.group, heads.column,
            k.stride(0), pool.stride(0), window,
            P=pool.shape[3], D=pool.shape[4], BD=triton.next_power_of_2(pool.shape[4]),
            BN=BLOCK, FIELDS=units.shape[1], SUM=is_sum, num_warps=4,
        )  # fmt: skip
    return scores
