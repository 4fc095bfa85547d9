"""Which tokens of each window stay: the top K of every head, ties to the lower position.

A program holds the scores of one window of one head and builds the K-th largest bit by bit: with
floats mapped to integers of the same order, every answer to "how many are at least this?" is
exact, so the choice is the same on every device and in every run.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def select_kernel(
    p_positions,
    p_scores,
    p_units,
    p_kept,
    positions_stride,
    W,
    sinks,
    BW: tl.constexpr,
    FIELDS: tl.constexpr,
):
    i_head, i_unit = tl.program_id(0), tl.program_id(1)
    i_line = i_unit.to(tl.int64) * tl.num_programs(0) + i_head
    kept = tl.load(p_kept + i_head)
    o_w = tl.arange(0, BW)
    m_w = o_w < W
    is_first = tl.load(p_units + i_unit * FIELDS + 1) == 0
    b_score = tl.load(p_scores + i_line * W + o_w, mask=m_w, other=0.0)
    b_score = tl.where(b_score == b_score, b_score, float("-inf"))
    b_score = tl.where(o_w < tl.where(is_first, sinks, 0), float("inf"), b_score)
    # both zeros are equal
    b_score = tl.where(b_score == 0.0, 0.0, b_score)
    b_bits = b_score.to(tl.int32, bitcast=True)
    # negative floats order backwards; then signed integers become unsigned ones
    b_key = (b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    b_key = tl.where(m_w, b_key, 0)  # every score, -inf too, is above 0
    least = tl.zeros([], tl.int64)
    for i_bit in range(0, 32):
        wanted = least | (tl.full([], 1, tl.int64) << (31 - i_bit))
        enough = tl.sum((b_key >= wanted).to(tl.int32), 0) >= kept
        least = tl.where(enough, wanted, least)
    m_above = b_key > least
    m_equal = b_key == least
    room = kept - tl.sum(m_above.to(tl.int32), 0)
    m_keep = m_above | (m_equal & (tl.cumsum(m_equal.to(tl.int32), 0) <= room))
    o_slot = tl.cumsum(m_keep.to(tl.int32), 0) - 1
    tl.store(p_positions + i_line * positions_stride + o_slot, o_w, mask=m_keep)


def select(
    positions: torch.Tensor,
    scores: torch.Tensor,
    units: torch.Tensor,
    kept: torch.Tensor,
    sinks: int,
) -> torch.Tensor:
    """Positions of the ``kept`` highest scores, ascending.

    Args:
        positions: [units, H, >= max(kept)] int32; the first kept[h] of each line are written.
        scores: [units, H, W] fp32, higher is kept; NaN ranks last.
        units: [units, UNIT_FIELDS] int32 (``records.seal_units``).
        kept: [H] int32, at least ``sinks``, at most W.
        sinks: leading tokens of window 0 that are kept whatever their score.

    Returns:
        ``positions``.
    """
    units_count, heads, window = scores.shape
    if units_count:
        select_kernel[(heads, units_count)](
            positions, scores, units, kept, positions.stride(1), window, sinks,
            BW=triton.next_power_of_2(window), FIELDS=units.shape[1], num_warps=4,
        )  # fmt: skip
    return positions
