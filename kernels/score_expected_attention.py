"""Expected Attention scores of whole windows (``score/expected_attention.py``), fp32.

Two launches: the logits z of every query head and the norms |v|, in blocks of tokens; then the
softmax over a window, the mean over query heads and the product with |v|.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tangram_sglang.kernels.raw_rows import HeadIndex, load_rows, raw_offsets
from tangram_sglang.score.expected_attention import HORIZON
from tangram_sglang.score.rotation import mean_rotation

BLOCK = 64


class ExpectedQueries(NamedTuple):
    """Query statistics in the kernel's layout; built once by ``expected_queries``.

    Attributes:
        mean: [H, r, D] fp32.
        factor: [H, r, rank, D] fp32.
        diagonal: [H, r, D] fp32.
        scaling: [H] fp32.
        rotation: [kinds, windows, 2, D] fp32: cosine and signed sine of the mean rotation of the
            HORIZON positions behind each window, per distinct set of frequencies.
        kind: [H] int32, which set of frequencies a head has.
        half: rotary_dim / 2.
    """

    mean: torch.Tensor
    factor: torch.Tensor
    diagonal: torch.Tensor
    scaling: torch.Tensor
    rotation: torch.Tensor
    kind: torch.Tensor
    half: int

    def heads(self, span: slice) -> "ExpectedQueries":
        """Statistics of consecutive heads; views."""
        cut = (x[span] for x in (self.mean, self.factor, self.diagonal, self.scaling))
        return ExpectedQueries(*cut, self.rotation, self.kind[span], self.half)


def expected_queries(
    mean: torch.Tensor,
    factor: torch.Tensor,
    diagonal: torch.Tensor,
    inv_freq: torch.Tensor,
    scaling: torch.Tensor,
    window: int,
    windows: int,
) -> ExpectedQueries:
    """Lay out the fields of ``score.QueryStats`` for windows 0..``windows``."""
    sets, kind = torch.unique(inv_freq, dim=0, return_inverse=True)
    half, dim = sets.shape[1], mean.shape[-1]
    rotation = torch.zeros(len(sets), windows, 2, dim, device=mean.device)
    rotation[:, :, 0] = 1.0
    for j in range(windows):
        cos, sin = mean_rotation(sets, (j + 1) * window, HORIZON)
        rotation[:, j, 0, : 2 * half] = torch.cat([cos, cos], dim=-1)
        rotation[:, j, 1, : 2 * half] = torch.cat([sin, -sin], dim=-1)
    return ExpectedQueries(
        mean.float().contiguous(),
        factor.float().transpose(-1, -2).contiguous(),
        diagonal.float().contiguous(),
        scaling.float().contiguous(),
        rotation,
        kind.int(),
        half,
    )


@triton.jit
def logits_kernel(
    p_logits,
    p_norm,
    p_k,
    p_v,
    p_pool,
    p_old,
    p_units,
    p_group,
    p_column,
    p_mean,
    p_factor,
    p_diagonal,
    p_scaling,
    p_rotation,
    p_kind,
    k_stride,
    v_stride,
    page_stride,
    W,
    windows,
    half,
    rank,
    G,
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    FIELDS: tl.constexpr,
):
    i_head, i_unit = tl.program_id(1).to(tl.int64), tl.program_id(2)
    p_unit = p_units + i_unit * FIELDS
    window = tl.load(p_unit + 1)
    n0 = tl.load(p_unit + 2)
    first = tl.load(p_unit + 3)
    old, old_pages, old_first = tl.load(p_unit + 4), tl.load(p_unit + 5), tl.load(p_unit + 6)
    i_group, i_column = tl.load(p_group + i_head), tl.load(p_column + i_head)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    o_w = tl.program_id(0) * BN + tl.arange(0, BN)
    m_t = o_w < W
    o_t = window * W + o_w
    m_old, o_pool, o_new = raw_offsets(
        p_old, o_t, m_t, n0, first, old, old_pages, old_first, i_group, i_column,
        page_stride, k_stride, P, D,
    )  # fmt: skip
    m_new = m_t & (o_t >= n0)
    # the key and, beside each dim, the one it is rotated with
    o_pair = tl.where(o_d < half, o_d + half, tl.where(o_d < 2 * half, o_d - half, o_d))
    p_new = p_k + i_head * D
    b_k = load_rows(p_pool, p_new, m_old, m_new, o_pool, o_new, o_d, m_d).to(tl.float32)
    b_pair = load_rows(p_pool, p_new, m_old, m_new, o_pool, o_new, o_pair, m_d).to(tl.float32)
    p_turn = p_rotation + (tl.load(p_kind + i_head) * windows + window).to(tl.int64) * (2 * D)
    b_cos = tl.load(p_turn + o_d, mask=m_d, other=0.0)
    b_sin = tl.load(p_turn + D + o_d, mask=m_d, other=0.0)
    b_k = b_k * b_cos[None, :] + b_pair * b_sin[None, :]  # [BN, BD]
    b_square = b_k * b_k

    scaling = tl.load(p_scaling + i_head)
    i_line = i_unit.to(tl.int64) * tl.num_programs(1) + i_head
    for i_query in range(0, G):
        i_stat = i_head * G + i_query
        b_mean = tl.load(p_mean + i_stat * D + o_d, mask=m_d, other=0.0)
        b_diagonal = tl.load(p_diagonal + i_stat * D + o_d, mask=m_d, other=0.0)
        b_z = tl.sum(b_k * b_mean[None, :], 1)
        b_spread = tl.sum(b_square * b_diagonal[None, :], 1)
        for i_rank in range(0, rank):
            b_factor = tl.load(p_factor + (i_stat * rank + i_rank) * D + o_d, mask=m_d, other=0.0)
            b_part = tl.sum(b_k * b_factor[None, :], 1)
            b_spread += b_part * b_part
        b_z = scaling * b_z + scaling * scaling * 0.5 * b_spread
        tl.store(p_logits + (i_line * G + i_query) * W + o_w, b_z, mask=m_t)

    # only the token stride differs between k and v
    o_new = (first + o_t - n0).to(tl.int64) * v_stride
    b_v = load_rows(p_pool + P * D, p_v + i_head * D, m_old, m_new, o_pool, o_new, o_d, m_d).to(
        tl.float32
    )
    tl.store(p_norm + i_line * W + o_w, tl.sqrt(tl.sum(b_v * b_v, 1)), mask=m_t)


@triton.jit
def softmax_kernel(
    p_scores, p_logits, p_units, W, G, sinks, BW: tl.constexpr, FIELDS: tl.constexpr
):
    """scores hold |v| on entry."""
    i_head, i_unit = tl.program_id(0), tl.program_id(1)
    i_line = i_unit.to(tl.int64) * tl.num_programs(0) + i_head
    o_w = tl.arange(0, BW)
    m_w = o_w < W
    # sinks are kept anyway; left inside they would take most of the softmax
    is_first = tl.load(p_units + i_unit * FIELDS + 1) == 0
    m_in = m_w & (o_w >= tl.where(is_first, sinks, 0))
    b_sum = tl.zeros([BW], tl.float32)
    for i_query in range(0, G):
        b_z = tl.load(p_logits + (i_line * G + i_query) * W + o_w, mask=m_in, other=float("-inf"))
        b_p = tl.exp(b_z - tl.max(b_z, 0))
        b_sum += b_p / tl.sum(b_p, 0)
    b_norm = tl.load(p_scores + i_line * W + o_w, mask=m_w, other=0.0)
    tl.store(p_scores + i_line * W + o_w, b_sum / G * b_norm, mask=m_w)


def score_expected_attention(
    scores: torch.Tensor,
    logits: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    old: torch.Tensor,
    units: torch.Tensor,
    heads: HeadIndex,
    stats: ExpectedQueries,
    sinks: int,
) -> torch.Tensor:
    """Scores of windows of which some tokens lie in old pages and some in the step's own K, V.

    Args:
        scores: [units, H, W] fp32, written.
        logits: [units, H, r, W] fp32, overwritten.
        k, v: [T, H, D], the step's own; any [*, H, D] tensors where no unit has new tokens.
        pool: [pages, H_p, 2, P, D]; page stride is free.
        old: [N] int32, old raw pages (``records.Piece.old``).
        units: [units, UNIT_FIELDS] int32 (``records.seal_units``).
        heads: [H].
        stats: of the same heads.
        sinks: tokens of window 0 that are kept anyway.

    Returns:
        ``scores``.
    """
    units_count, count, window = scores.shape
    if not units_count:
        return scores
    ratio, fields = stats.mean.shape[1], units.shape[1]
    logits_kernel[(triton.cdiv(window, BLOCK), count, units_count)](
        logits, scores, k, v, pool, old, units, heads.group, heads.column,
        stats.mean, stats.factor, stats.diagonal, stats.scaling, stats.rotation, stats.kind,
        k.stride(0), v.stride(0), pool.stride(0), window, stats.rotation.shape[1], stats.half,
        stats.factor.shape[2], ratio,
        P=pool.shape[3], D=pool.shape[4], BD=triton.next_power_of_2(pool.shape[4]),
        BN=BLOCK, FIELDS=fields, num_warps=4,
    )  # fmt: skip
    softmax_kernel[(count, units_count)](
        scores, logits, units, window, ratio, sinks,
        BW=triton.next_power_of_2(window), FIELDS=fields, num_warps=4,
    )  # fmt: skip
    return scores
