"""Gate scores of raw tokens: written to pages beside those of K and V, gathered when a window is sealed.

The tail pages of the score groups (``KVLayout.score_groups``) hold [P, EACH] fp32 each, heads in global
head order. Reference: ``backend/score_pages.py``.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tangram_sglang.kernels.raw_write import BLOCK
from tangram_sglang.plan.layout import KVLayout

# heads of a tile. The same for one layer, which a prefill seals, as for many, which a decode step does, so
# that both take the kernel that the warm-up compiled.
HEADS = 16


@dataclass(frozen=True, slots=True)
class GatePlace:
    """Where the scores of all heads lie.

    Attributes:
        page: P.
        each: scores of one token in a page, EACH.
        group: first score group among the full-attention groups.
        ring_at: first table entry of that group's ring; the other groups' follow.
        ring: table entries of each.
    """

    page: int
    each: int
    group: int
    ring_at: int
    ring: int

    @classmethod
    def of(cls, layout: KVLayout) -> "GatePlace":
        """For a layout with score groups."""
        first = layout.num_full - layout.score_groups
        ring_at = int(layout.ring_offset[first])
        return cls(layout.rule.page, layout.page_scores, first, ring_at, layout.kinds[0].ring)


@triton.jit(do_not_specialize=["first_head"])
def write_gates_kernel(
    p_scores,
    p_lines,
    p_table,
    p_spans,
    first_head,
    ring_at,
    ring,
    scores_stride,
    page_stride,
    table_stride,
    H: tl.constexpr,
    EACH: tl.constexpr,
    P: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    FIELDS: tl.constexpr,
):
    p_span = p_spans + tl.program_id(0) * FIELDS
    i_row = tl.load(p_span).to(tl.int64)
    o_n = tl.arange(0, BN)
    m_n = o_n < tl.load(p_span + 2)
    o_t = tl.load(p_span + 1) + o_n
    o_new = (tl.load(p_span + 3) + o_n).to(tl.int64)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    m = m_n[:, None] & (o_h < H)[None, :]
    b_score = tl.load(p_scores + (o_new * scores_stride)[:, None] + o_h[None, :], mask=m, other=0.0)
    o_head = first_head + o_h
    o_entry = (o_t // P % ring)[:, None] + (ring_at + o_head // EACH * ring)[None, :]
    p_page = p_table + i_row * table_stride + o_entry
    b_page = tl.load(p_page, mask=m, other=0).to(tl.int64)  # [BN, BH]
    o_out = b_page * page_stride + (o_t % P * EACH)[:, None] + (o_head % EACH)[None, :]
    tl.store(p_lines + o_out, b_score, mask=m)


@triton.jit(do_not_specialize=["first_head", "H", "scores_stride"])
def gather_gates_kernel(
    p_out,
    p_scores,
    p_lines,
    p_old,
    p_units,
    first_head,
    first_group,
    H,
    W,
    scores_stride,
    page_stride,
    EACH: tl.constexpr,
    P: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    FIELDS: tl.constexpr,
):
    i_unit = tl.program_id(2).to(tl.int64)
    p_unit = p_units + i_unit * FIELDS
    n0 = tl.load(p_unit + 2)
    o_w = tl.program_id(0) * BN + tl.arange(0, BN)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    o_t = tl.load(p_unit + 1) * W + o_w
    m = (o_w < W)[:, None] & (o_h < H)[None, :]
    m_old, m_new = m & (o_t < n0)[:, None], m & (o_t >= n0)[:, None]
    o_head = first_head + o_h
    o_slot = o_t - tl.load(p_unit + 6)
    o_group = (first_group + o_head // EACH).to(tl.int64) * tl.load(p_unit + 5)
    p_page = p_old + tl.load(p_unit + 4) + (o_slot // P)[:, None] + o_group[None, :]
    b_page = tl.load(p_page, mask=m_old, other=0).to(tl.int64)  # [BN, BH]
    o_held = b_page * page_stride + (o_slot % P * EACH)[:, None] + (o_head % EACH)[None, :]
    b_old = tl.load(p_lines + o_held, mask=m_old, other=0.0)  # [BN, BH]
    o_new = (tl.load(p_unit + 3) + o_t - n0).to(tl.int64) * scores_stride
    b_new = tl.load(p_scores + o_new[:, None] + o_h[None, :], mask=m_new, other=0.0)  # [BN, BH]
    o_out = (i_unit * H + o_h)[None, :] * W + o_w[:, None]
    tl.store(p_out + o_out, tl.where(m_old, b_old, b_new), mask=m)


def write_gates(
    lines: torch.Tensor,
    table: torch.Tensor,
    scores: torch.Tensor,
    spans: torch.Tensor,
    place: GatePlace,
    first_head: int,
) -> None:
    """Keep one layer's scores of the tokens that stay raw.

    Nothing is allocated or read back: the call may be captured in a CUDA graph.

    Args:
        lines: [pages, N] fp32, the page pool, a line a page; written.
        table: [rows, E] int32.
        scores: [T, H] fp32, the step's own. Token stride is free.
        spans: as for ``query_pages.write_queries``.
        place: where they go.
        first_head: the layer's first head among all full-attention heads.
    """
    if not len(spans):
        return
    heads = scores.shape[1]
    write_gates_kernel[(len(spans), triton.cdiv(heads, HEADS))](
        scores, lines, table, spans, first_head, place.ring_at, place.ring,
        scores.stride(0), lines.stride(0), table.stride(0),
        H=heads, EACH=place.each, P=place.page, BH=HEADS, BN=BLOCK, FIELDS=spans.shape[1],
        num_warps=4,
    )  # fmt: skip


def gather_gates(
    out: torch.Tensor,
    scores: torch.Tensor,
    lines: torch.Tensor,
    old: torch.Tensor,
    units: torch.Tensor,
    place: GatePlace,
    first_head: int,
) -> torch.Tensor:
    """Scores of windows that are sealed, for some heads.

    Args:
        out: [units, H, W] fp32, written.
        scores: [T, H] fp32, the step's own of the same heads; anything where no unit has new tokens.
        lines: as for ``write_gates``.
        old, units: as in ``seal_write``; score groups are groups of the kind, last.
        place: where they lie.
        first_head: the first of the heads among all full-attention heads.

    Returns:
        ``out``.
    """
    count, heads, window = out.shape
    if count:
        gather_gates_kernel[(triton.cdiv(window, BLOCK), triton.cdiv(heads, HEADS), count)](
            out, scores, lines, old, units, first_head, place.group, heads, window,
            scores.stride(0), lines.stride(0), EACH=place.each, P=place.page, BH=HEADS, BN=BLOCK,
            FIELDS=units.shape[1], num_warps=4,
        )  # fmt: skip
    return out
