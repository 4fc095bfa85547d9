"""KeyDiff scores of whole windows (``score/keydiff.py``), fp32.

A program takes one window of one head: once over its keys for the mean unit key, once for the
scores. The sums run in the same order whatever the launch, so scores do not depend on the batch.
"""

import torch
import triton
import triton.language as tl

from tangram_sglang.kernels.raw_rows import HeadIndex, load_rows, raw_offsets

BLOCK = 64


@triton.jit
def keydiff_kernel(
    p_scores,
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
):
    i_head, i_unit = tl.program_id(0), tl.program_id(1)
    p_unit = p_units + i_unit * FIELDS
    start = tl.load(p_unit + 1) * W
    n0 = tl.load(p_unit + 2)
    first = tl.load(p_unit + 3)
    old, old_pages, old_first = tl.load(p_unit + 4), tl.load(p_unit + 5), tl.load(p_unit + 6)
    i_group, i_column = tl.load(p_group + i_head), tl.load(p_column + i_head)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    p_new = p_k + i_head.to(tl.int64) * D
    b_anchor = tl.zeros([BD], tl.float32)
    # the first round sums unit keys, the second scores against their direction
    for i_round in range(0, 2):
        b_mean = b_anchor / W
        norm = tl.sqrt(tl.sum(b_mean * b_mean, 0))
        b_unit_mean = b_mean / tl.maximum(norm, 1e-12)
        b_sum = tl.zeros([BN, BD], tl.float32)
        for i_start in range(0, W, BN):
            o_t = start + i_start + o_n
            m_t = i_start + o_n < W
            m_old, o_pool, o_new = raw_offsets(
                p_old, o_t, m_t, n0, first, old, old_pages, old_first, i_group, i_column,
                page_stride, k_stride, P, D,
            )  # fmt: skip
            b_k = load_rows(p_pool, p_new, m_old, m_t & (o_t >= n0), o_pool, o_new, o_d, m_d).to(
                tl.float32
            )  # [BN, BD]
            b_norm = tl.maximum(tl.sqrt(tl.sum(b_k * b_k, 1)), 1e-12)
            b_k = b_k / b_norm[:, None]
            if i_round == 0:
                b_sum += b_k
            else:
                b_score = -tl.sum(b_k * b_unit_mean[None, :], 1)
                o_score = (i_unit.to(tl.int64) * tl.num_programs(0) + i_head) * W + i_start + o_n
                tl.store(p_scores + o_score, b_score, mask=m_t)
        b_anchor = tl.sum(b_sum, 0)


def score_keydiff(
    scores: torch.Tensor,
    k: torch.Tensor,
    pool: torch.Tensor,
    old: torch.Tensor,
    units: torch.Tensor,
    heads: HeadIndex,
) -> torch.Tensor:
    """Scores of windows of which some tokens lie in old pages and some in the step's own K.

    Args:
        scores: [units, H, W] fp32, written.
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
    keydiff_kernel[(count, units_count)](
        scores, k, pool, old, units, heads.group, heads.column,
        k.stride(0), pool.stride(0), window,
        P=pool.shape[3], D=pool.shape[4], BD=triton.next_power_of_2(pool.shape[4]),
        BN=BLOCK, FIELDS=units.shape[1], num_warps=4,
    )  # fmt: skip
    return scores
