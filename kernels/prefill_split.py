"""Prefill of few tokens after many: a head's keys are split among programs and merged.

A short message in a long conversation makes a handful of tiles, and the heads that keep most would
be walked by one program each. Whether and how finely to split is decided once per step from the
tiles, which the host has anyway, for all layers together.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
# the least a program should walk, in blocks of keys, and programs per place on the GPU
LEAST = 8
WAVES = 3
# partial results held at once; 64 KiB each for 128 rows of 128 dims
CAPACITY = 1024


class Split(NamedTuple):
    """How a step's tiles are split, and where partial results go.

    Attributes:
        count: most programs per tile and head.
        target: blocks of keys per program, where ``count`` allows it.
        part: [tiles * H * count * rows * D] fp32 or longer.
        lse: [tiles * H * count * rows] fp32 or longer; log2 of each softmax's sum.
        used: [tiles * H] int32 or longer; programs that each tile and head really has.
    """

    count: int
    target: int
    part: torch.Tensor
    lse: torch.Tensor
    used: torch.Tensor


def split_counts(
    tiles: np.ndarray, kept: np.ndarray, heads: int, block: int, programs: int
) -> tuple[int, int]:
    """(count, target) of ``Split``; count 1 means: do not split.

    Args:
        tiles: [tiles, TILE_FIELDS] int32 (``records.prefill_tiles``) of full attention.
        kept: K of every head of every layer.
        heads: KV heads of a layer.
        block: keys of a block.
        programs: programs that the GPU runs at a time.
    """
    if not len(tiles):
        return 1, 1
    windows = tiles[:, 4].astype(np.int64)
    raw = tiles[:, 3] + tiles[:, 2] - tiles[:, 5]
    total = float((windows * kept.mean() + raw).sum()) * heads / block
    longest = float((windows * kept.max() + raw).max()) / block
    target = max(LEAST, -int(-total // (programs * WAVES)))
    count = min(-int(-longest // target), CAPACITY // (len(tiles) * heads))
    if count < 2:
        return 1, 1
    return count, max(target, -int(-longest // count))


@triton.jit
def program_blocks(blocks, target):
    """(first block, one past the last, programs used) of this program; empty if past the end."""
    splits = tl.minimum(tl.cdiv(blocks, target), tl.num_programs(1))
    per = tl.cdiv(blocks, splits)
    first = tl.program_id(1) * per
    return first, tl.minimum(first + per, blocks), tl.cdiv(blocks, per)


@triton.jit
def prefill_merge_kernel(
    p_out,
    p_part,
    p_lse,
    p_used,
    p_tiles,
    p_sink,
    out_stride,
    count,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    ROWS: tl.constexpr,
    BM: tl.constexpr,
    FIELDS: tl.constexpr,
    SINKS: tl.constexpr,
):
    i_tile, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_line = i_tile * tl.num_programs(1) + i_head
    o_m = tl.program_id(2) * BM + tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    i_query = i_head * G + o_m % G
    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    if SINKS:
        b_max = tl.load(p_sink + i_query).to(tl.float32) * LOG2E
        b_sum += 1.0
    b_acc = tl.zeros([BM, BD], tl.float32)
    for i_split in range(0, tl.load(p_used + i_line)):
        o_row = (i_line * count + i_split) * ROWS + o_m
        b_lse = tl.load(p_lse + o_row)
        b_part = tl.load(p_part + o_row[:, None] * D + o_d[None, :], mask=m_d[None, :], other=0.0)
        b_new = tl.maximum(b_max, b_lse)
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_shrink, b_weight = tl.exp2(b_max - b_base), tl.exp2(b_lse - b_base)
        b_acc = b_acc * b_shrink[:, None] + b_part * b_weight[:, None]
        b_sum = b_sum * b_shrink + b_weight
        b_max = b_new
    p_tile = p_tiles + i_tile * FIELDS
    m_q = o_m // G < tl.load(p_tile + 2)
    o_q = (tl.load(p_tile + 1) + o_m // G).to(tl.int64)
    b_out = b_acc / tl.where(m_q, b_sum, 1.0)[:, None]
    tl.store(
        p_out + (o_q * out_stride + i_query * D)[:, None] + o_d[None, :],
        b_out.to(p_out.dtype.element_ty),
        mask=m_q[:, None] & m_d[None, :],
    )


def merge(
    out: torch.Tensor,
    split: Split,
    tiles: torch.Tensor,
    heads: int,
    rows: int,
    sinks: torch.Tensor | None,
) -> None:
    """Put partial results together; sinks join each softmax here, once.

    Args:
        out: [T, HQ, D], written where a tile says so.
        split: filled by a prefill launch.
        tiles: of that launch.
        heads: H.
        rows: queries x heads of a tile.
        sinks: [HQ] or None.
    """
    size = min(rows, 16)
    prefill_merge_kernel[(len(tiles), heads, rows // size)](
        out, split.part, split.lse, split.used, tiles, out if sinks is None else sinks,
        out.stride(0), split.count,
        G=out.shape[1] // heads, D=out.shape[2], BD=triton.next_power_of_2(out.shape[2]),
        ROWS=rows, BM=size, FIELDS=tiles.shape[1], SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip
