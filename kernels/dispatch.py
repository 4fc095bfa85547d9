"""The dispatch line of a decode step: where each program of every layer starts and ends.

For one layer, the whole pages that the batch must read stand in one line, (request, head, page) in
order; the newest token's page, which the merge reads, is left out. A program of the decode kernel
reads the stretch from its start to the next program's. Two ways to cut the line, both from the
split map:

    stretched  the map's programs at equal distances on the line of this step. A request gets
               programs in proportion to its length, a head in proportion to what it holds.
    rigid      every request gets the programs of its map, whatever its length; a head's splits
               are equal. What the paper does.

One launch per step, inside the CUDA graph, cuts the lines of all layers from `rows`, `seq_lens`
and `n_win`. Rows of padding (row 0) have no pages.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tangram_sglang.kernels.layer_tables import LayerTables
from tangram_sglang.plan.split_map import SplitMap

# pages that starting on another head costs, in time
OVERHEAD = 8
# fewest pages worth a program
LEAST = 4

# What a kernel must know to read a (request, head): the row of the page table; whole pages; how
# many of them are sealed; the table entries of the first sealed page and of the ring; what to add
# to a page's number to get its place in the ring, before the ring closes; the column; entries of
# the first page that a sliding window no longer sees.
ROW, PAGES, SEALED, SEALED_AT, RING_AT, TURN, COLUMN, SKIP = range(8)
PLACE = 8
# in ``pieces``, after the place: the newest token's slot in the last page, -1 in padding; the
# first program that reads the head, and how many do
SLOT, FIRST, COUNT = 8, 9, 10
PIECE = 11
# in ``starts``: (request * H + head) and page, then the place of that head
START = 2 + PLACE


@triton.jit
def at_row(values, i_row, BB: tl.constexpr):
    """values [BB] at i_row [BC]."""
    m_row = tl.arange(0, BB)[None, :] == i_row[:, None]
    return tl.sum(tl.where(m_row, values[None, :], 0), axis=1)


@triton.jit
def whole_tail(n, s, window, W: tl.constexpr, P: tl.constexpr):
    """First raw page, counted from token 0, and the whole pages from there to the last page."""
    first = tl.where(window > 0, tl.maximum(n - window, 0) // P, s * (W // P))
    return first, tl.maximum(n - 1, 0) // P - first


@triton.jit
def store_place(
    p_place,
    m,
    row,
    n,
    s,
    i_h,
    window,
    ring,
    p_kept,
    p_sealed_at,
    p_ring_at,
    p_column,
    W: tl.constexpr,
    P: tl.constexpr,
):
    """Store the place of heads i_h [BC] of requests with n tokens; returns their whole pages."""
    first, tail = whole_tail(n, s, window, W, P)
    sealed = s * tl.load(p_kept + i_h, mask=m, other=0)
    tl.store(p_place, row, mask=m)
    tl.store(p_place + 1, sealed + tail, mask=m)
    tl.store(p_place + 2, sealed, mask=m)
    tl.store(p_place + 3, tl.load(p_sealed_at + i_h, mask=m, other=0), mask=m)
    tl.store(p_place + 4, tl.load(p_ring_at + i_h, mask=m, other=0), mask=m)
    tl.store(p_place + 5, first % ring - sealed, mask=m)
    tl.store(p_place + 6, tl.load(p_column + i_h, mask=m, other=0), mask=m)
    skip = tl.where(window > 0, tl.maximum(n - window, 0) - first * P, 0)
    tl.store(p_place + 7, skip, mask=m)
    return sealed + tail


@triton.jit(do_not_specialize=["batch", "slots_stride", "starts_stride", "pieces_stride"])
def dispatch_kernel(
    rows,
    seq_lens,
    n_win,
    kept_pages,
    pages_before,
    table_offset,
    ring_offset,
    column,
    sliding,
    rings,
    programs,
    slots,
    splits,
    starts,
    pieces,
    batch,
    slots_stride,
    starts_stride,
    pieces_stride,
    H: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    BB: tl.constexpr,
    BH: tl.constexpr,
    BC: tl.constexpr,
    STRETCHED: tl.constexpr,
    OVERHEAD: tl.constexpr,
    LEAST: tl.constexpr,
    START: tl.constexpr,
    PIECE: tl.constexpr,
):
    i_l = tl.program_id(1).to(tl.int64)
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)
    p_kept = kept_pages + i_l * H
    p_before = pages_before + i_l * H
    p_sealed_at = table_offset + i_l * H
    p_ring_at = ring_offset + i_l * H
    p_column = column + i_l * H
    window = tl.load(sliding + i_l)
    ring = tl.load(rings + i_l)
    grid = tl.load(programs + i_l)
    end_piece = batch * H

    # every request
    o_b = tl.arange(0, BB)
    m_b = o_b < batch
    b_row = tl.load(rows + o_b, mask=m_b, other=0).to(tl.int32)  # [BB]
    live = b_row > 0
    b_n = tl.load(seq_lens + o_b, mask=live, other=0).to(tl.int32)  # [BB]
    b_s = tl.load(n_win + o_b, mask=live, other=0).to(tl.int32)  # [BB]
    b_s = tl.where(window > 0, 0, b_s)
    _, b_tail = whole_tail(b_n, b_s, window, W, P)  # [BB]
    b_cost = tl.where(b_s + b_tail > 0, b_tail + OVERHEAD, 0)  # [BB]
    layer_pages = tl.load(p_before + H - 1) + tl.load(p_kept + H - 1)
    b_line = b_s * layer_pages + H * b_cost  # [BB]
    b_end = tl.cumsum(b_line, axis=0)
    b_begin = b_end - b_line
    total = tl.sum(b_line, axis=0)
    # 1 in an empty batch, so that nothing divides by zero
    length = tl.maximum(total, 1).to(tl.int64)
    active = tl.minimum(grid, (total + LEAST - 1) // LEAST)
    many = tl.maximum(active, 1).to(tl.int64)

    # where programs start, [BC]
    m_c = o_c <= grid
    if STRETCHED:
        inside = o_c < active
        x = (o_c.to(tl.int64) * length // many).to(tl.int32)
        i_row = tl.sum((b_end[None, :] <= x[:, None]).to(tl.int32), axis=1)
        n = at_row(b_n, i_row, BB)
        s = at_row(b_s, i_row, BB)
        cost = at_row(b_cost, i_row, BB)
        x -= at_row(b_begin, i_row, BB)
        o_h = tl.arange(0, BH)
        b_before = tl.load(p_before + o_h, mask=o_h < H, other=0)  # [BH]
        b_start = s[:, None] * b_before[None, :] + cost[:, None] * o_h[None, :]  # [BC, BH]
        m_start = (b_start <= x[:, None]) & (o_h < H)[None, :]
        i_h = tl.sum(m_start.to(tl.int32), axis=1) - 1
        before = tl.load(p_before + i_h, mask=inside, other=0)
        i_piece = i_row * H + i_h
        page = tl.maximum(x - s * before - cost * i_h - OVERHEAD, 0)
    else:
        per_row = grid // batch
        inside = o_c < grid
        i_row = o_c // per_row
        p_slot = slots + i_l * slots_stride + (o_c % per_row) * 3
        i_h = tl.load(p_slot, mask=inside, other=0)
        split = tl.load(p_slot + 1, mask=inside, other=0)
        count = tl.load(p_slot + 2, mask=inside, other=1)
        n = at_row(b_n, i_row, BB)
        s = at_row(b_s, i_row, BB)
        held = s * tl.load(p_kept + i_h, mask=inside, other=0) + at_row(b_tail, i_row, BB)
        count = tl.maximum(tl.minimum(count, held), 1)
        # a split too many is empty: it starts and ends where the head ends
        page = tl.minimum((split.to(tl.int64) * held // count).to(tl.int32), held)
        i_piece = i_row * H + i_h
    p_start = starts + (i_l * starts_stride + o_c) * START
    tl.store(p_start, tl.where(inside, i_piece, end_piece), mask=m_c)
    tl.store(p_start + 1, tl.where(inside, page, 0), mask=m_c)
    row = tl.load(rows + i_row, mask=inside, other=0).to(tl.int32)
    store_place(
        p_start + 2,
        inside,
        row,
        n,
        s,
        i_h,
        window,
        ring,
        p_kept,
        p_sealed_at,
        p_ring_at,
        p_column,
        W,
        P,
    )

    # every (request, head), [BC]
    m_p = o_c < end_piece
    i_row = o_c // H
    i_h = o_c % H
    n = at_row(b_n, i_row, BB)
    s = at_row(b_s, i_row, BB)
    row = tl.load(rows + i_row, mask=m_p, other=0).to(tl.int32)
    p_piece = pieces + (i_l * pieces_stride + o_c) * PIECE
    held = store_place(
        p_piece,
        m_p,
        row,
        n,
        s,
        i_h,
        window,
        ring,
        p_kept,
        p_sealed_at,
        p_ring_at,
        p_column,
        W,
        P,
    )
    if STRETCHED:
        before = tl.load(p_before + i_h, mask=m_p, other=0)
        x = at_row(b_begin, i_row, BB) + OVERHEAD
        x += s * before + at_row(b_cost, i_row, BB) * i_h
        first = ((x.to(tl.int64) + 1) * many - 1) // length
        last = ((x.to(tl.int64) + held) * many - 1) // length
        count = (last - first + 1).to(tl.int32)
        first = first.to(tl.int32)
    else:
        p_split = splits + (i_l * H + i_h) * 2
        first = i_row * (grid // batch) + tl.load(p_split, mask=m_p, other=0)
        count = tl.minimum(tl.load(p_split + 1, mask=m_p, other=0), held)
    tl.store(p_piece + 8, tl.where(n > 0, (n - 1) % P, -1), mask=m_p)
    tl.store(p_piece + 9, first, mask=m_p)
    tl.store(p_piece + 10, tl.where(held > 0, count, 0), mask=m_p)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The split map of one captured batch size on the device, and the lines cut from it.

    Attributes:
        batch: requests, padding included.
        grid: programs of each layer's launch.
        stretched: how lines are cut.
        programs: [L] int32, ``grid`` on the device.
        slots: [L, T, 3] int32, (head, split, splits) of a request's programs; anything if stretched.
        splits: [L, H, 2] int32, (first slot, splits) of a head; anything if stretched.
        starts: [L, max grid + 1, START] int32, written each step: where a program starts; the
            next one's start is its end.
        pieces: [L, batch * H, PIECE] int32, written each step, one for each (request, head).
    """

    batch: int
    grid: tuple[int, ...]
    stretched: bool
    programs: torch.Tensor
    slots: torch.Tensor
    splits: torch.Tensor
    starts: torch.Tensor
    pieces: torch.Tensor

    @staticmethod
    def build(split_map: SplitMap, device: torch.device | str, stretched: bool = True):
        """Static tensors and buffers for ``split_map.batch`` requests.

        Stretched lines need no table, and nothing is copied from the host.
        """
        layers, heads = split_map.splits.shape
        if stretched:
            # for just the programs that the GPU holds; a few more would run after all others
            grid = (split_map.programs,) * layers
            programs = torch.full((layers,), split_map.programs, dtype=torch.int32, device=device)
            slots = splits = torch.zeros(1, 1, 1, dtype=torch.int32, device=device)
        else:
            grid = tuple(int(x) for x in split_map.grid)
            programs = torch.tensor(grid, dtype=torch.int32, device=device)
            slots = torch.zeros(layers, max(grid) // split_map.batch, 3, dtype=torch.int32)
            for i in range(layers):
                own = torch.from_numpy(split_map.slots(i))
                slots[i, : len(own)] = own
            splits = torch.from_numpy(split_map.splits)
            splits = torch.stack([splits.cumsum(1) - splits, splits], dim=2).to(torch.int32)
        widest = max(grid)
        pieces = split_map.batch * heads
        return Dispatch(
            batch=split_map.batch,
            grid=grid,
            stretched=stretched,
            programs=programs,
            slots=slots.to(device),
            splits=splits.to(device),
            starts=torch.zeros(layers, widest + 1, START, dtype=torch.int32, device=device),
            pieces=torch.zeros(layers, pieces, PIECE, dtype=torch.int32, device=device),
        )


def dispatch_step(
    dispatch: Dispatch,
    tables: LayerTables,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    n_win: torch.Tensor,
    overhead: int = OVERHEAD,
    least: int = LEAST,
) -> None:
    """Cut the lines of all layers for one decode step, into ``dispatch``'s buffers.

    Args:
        dispatch: of this batch size.
        tables: where heads lie.
        rows: [B] int, rows of the page table; 0 is padding and gets no work.
        seq_lens: [B] int, tokens of each request, the new one included.
        n_win: [B] int, sealed windows that the new token sees.
        overhead, least: cost of a head and least share of a program, in pages; for benches.
    """
    layers, heads = tables.kept_pages.shape
    # One warp a program: with several, Triton 3.6 fails to compile this kernel for 32 requests. For
    # more than 256, one warp takes minutes to compile and spills; there, eight do without.
    block, warps = (32, 1) if dispatch.batch <= 256 else (16, 8)
    width = max(max(dispatch.grid) + 1, dispatch.batch * heads)
    dispatch_kernel[(triton.cdiv(width, block), layers)](
        rows=rows,
        seq_lens=seq_lens,
        n_win=n_win,
        kept_pages=tables.kept_pages,
        pages_before=tables.pages_before,
        table_offset=tables.table_offset,
        ring_offset=tables.ring_offset,
        column=tables.column,
        sliding=tables.sliding,
        rings=tables.ring,
        programs=dispatch.programs,
        slots=dispatch.slots,
        splits=dispatch.splits,
        starts=dispatch.starts,
        pieces=dispatch.pieces,
        batch=dispatch.batch,
        slots_stride=dispatch.slots.stride(0),
        starts_stride=dispatch.starts.shape[1],
        pieces_stride=dispatch.pieces.shape[1],
        H=heads,
        W=tables.window,
        P=tables.page,
        BB=triton.next_power_of_2(dispatch.batch),
        BH=triton.next_power_of_2(heads),
        BC=block,
        STRETCHED=dispatch.stretched,
        OVERHEAD=overhead,
        LEAST=least,
        START=START,
        PIECE=PIECE,
        num_warps=warps,
    )
