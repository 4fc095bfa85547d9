"""The kernel that cuts the dispatch line: every program's start, every piece's place, every merge.

``kernels/dispatch.py`` says what the line is. A program of this kernel has BC lanes: for as many
programs of the decode launch, then as many pieces of the line, then as many heads of requests.
"""

import triton
import triton.language as tl

# What the decode kernel must know of a piece, the windows [begin, end) of a request's head: the row
# of the page table; whole pages; how many of them are sealed; the table entries of the first sealed
# page and of the ring; what to add to a page's number to get its place in the ring, before the ring
# closes; the column; entries of the first page that a sliding window no longer sees; request * H +
# head; whether other requests read it with this one.
PIECE = 10
# in ``starts``: the piece and the page of it, then what must be known of that piece
START = 2 + PIECE
# What the merge must know of a (request, head): the row; the table entry of its last page; the column;
# the newest token's slot in that page, -1 in padding; entries of the page that a sliding window no
# longer sees; the first part and their number, of what it reads alone and of what it reads with others;
# its line among those.
MERGE = 10


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
def unseen(n, first, window, P: tl.constexpr):
    """Entries from page ``first`` on that a sliding window no longer sees."""
    return tl.where(window > 0, tl.maximum(n - window, 0) - first * P, 0)


@triton.jit
def readers_of(x, held, many, length):
    """First of ``many`` programs that reads pages [x, x + held) of a line, and how many do."""
    first = ((x.to(tl.int64) + 1) * many - 1) // length
    last = ((x.to(tl.int64) + held) * many - 1) // length
    return first.to(tl.int32), tl.where(held > 0, last - first + 1, 0).to(tl.int32)


@triton.jit
def store_piece(
    p_piece,
    m,
    rows,
    i_row,
    i_h,
    common,
    b_n,
    b_s,
    b_shared,
    window,
    ring,
    p_kept,
    p_sealed_at,
    p_ring_at,
    p_column,
    H: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    BB: tl.constexpr,
):
    """Store pieces of heads i_h [BC]: the windows that are shared where ``common``, else the rest."""
    n = at_row(b_n, i_row, BB)
    s = at_row(b_s, i_row, BB)
    shared = at_row(b_shared, i_row, BB)
    first, tail = whole_tail(n, s, window, W, P)
    kept = tl.load(p_kept + i_h, mask=m, other=0)
    sealed = tl.where(common, shared, s - shared) * kept
    pages = tl.where(common, sealed, sealed + tail)
    sealed_at = tl.load(p_sealed_at + i_h, mask=m, other=0)
    tl.store(p_piece, tl.load(rows + i_row, mask=m, other=0).to(tl.int32), mask=m)
    tl.store(p_piece + 1, pages, mask=m)
    tl.store(p_piece + 2, sealed, mask=m)
    tl.store(p_piece + 3, tl.where(common, sealed_at, sealed_at + shared * kept), mask=m)
    tl.store(p_piece + 4, tl.load(p_ring_at + i_h, mask=m, other=0), mask=m)
    tl.store(p_piece + 5, first % ring - sealed, mask=m)
    tl.store(p_piece + 6, tl.load(p_column + i_h, mask=m, other=0), mask=m)
    tl.store(p_piece + 7, unseen(n, first, window, P), mask=m)
    tl.store(p_piece + 8, i_row * H + i_h, mask=m)
    tl.store(p_piece + 9, common.to(tl.int32), mask=m)


@triton.jit(
    do_not_specialize=["batch", "slots_stride", "starts_stride", "pieces_stride", "merges_stride"]
)
def dispatch_kernel(
    rows,
    seq_lens,
    n_win,
    shared,
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
    merges,
    batch,
    slots_stride,
    starts_stride,
    pieces_stride,
    merges_stride,
    H: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    BB: tl.constexpr,
    BH: tl.constexpr,
    BC: tl.constexpr,
    STRETCHED: tl.constexpr,
    SHARING: tl.constexpr,
    OVERHEAD: tl.constexpr,
    LEAST: tl.constexpr,
    START: tl.constexpr,
    PIECE: tl.constexpr,
    MERGE: tl.constexpr,
    RECORD: tl.constexpr,
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

    # every request
    o_b = tl.arange(0, BB)
    m_b = o_b < batch
    live = tl.load(rows + o_b, mask=m_b, other=0) > 0  # [BB]
    b_n = tl.load(seq_lens + o_b, mask=live, other=0).to(tl.int32)  # [BB]
    b_s = tl.load(n_win + o_b, mask=live, other=0).to(tl.int32)  # [BB]
    b_s = tl.where(window > 0, 0, b_s)
    _, b_tail = whole_tail(b_n, b_s, window, W, P)  # [BB]
    layer_pages = tl.load(p_before + H - 1) + tl.load(p_kept + H - 1)
    b_shared = tl.zeros([BB], tl.int32)
    b_lead = tl.zeros([BB], tl.int32)
    if SHARING:
        b_shared = tl.load(shared + o_b * RECORD + 2, mask=live, other=0)
        b_shared = tl.where(window > 0, 0, b_shared)
        b_leader = tl.load(shared + o_b * RECORD, mask=live, other=-1)
        b_lead = ((b_leader == o_b) & (b_shared > 0)).to(tl.int32)
    b_common = b_lead * (b_shared * layer_pages + H * OVERHEAD)
    b_own = b_s - b_shared
    b_cost = tl.where(b_own + b_tail > 0, b_tail + OVERHEAD, 0)  # [BB]
    b_line = b_common + b_own * layer_pages + H * b_cost  # [BB]
    b_end = tl.cumsum(b_line, axis=0)
    b_begin = b_end - b_line
    total = tl.sum(b_line, axis=0)
    # those that hold nothing, padding above all, have no piece that a program would step over
    b_pieces = tl.where(b_line > 0, H * (1 + b_lead), 0)
    b_last = tl.cumsum(b_pieces, axis=0)
    b_first = b_last - b_pieces
    end_piece = tl.sum(b_pieces, axis=0)
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
        x -= at_row(b_begin, i_row, BB)
        cost = at_row(b_cost, i_row, BB)
        windows = at_row(b_own, i_row, BB)
        lead = at_row(b_lead, i_row, BB)
        before_own = at_row(b_common, i_row, BB)
        common = x < before_own
        x = tl.where(common, x, x - before_own)
        cost = tl.where(common, OVERHEAD, cost)
        windows = tl.where(common, at_row(b_shared, i_row, BB), windows)
        o_h = tl.arange(0, BH)
        b_before = tl.load(p_before + o_h, mask=o_h < H, other=0)  # [BH]
        b_start = windows[:, None] * b_before[None, :] + cost[:, None] * o_h[None, :]  # [BC, BH]
        m_start = (b_start <= x[:, None]) & (o_h < H)[None, :]
        i_h = tl.sum(m_start.to(tl.int32), axis=1) - 1
        before = tl.load(p_before + i_h, mask=inside, other=0)
        page = tl.maximum(x - windows * before - cost * i_h - OVERHEAD, 0)
        i_piece = at_row(b_first, i_row, BB) + tl.where(common, 0, lead * H) + i_h
    else:
        per_row = grid // batch
        i_row = o_c // per_row
        # a request that holds nothing has no piece, and its programs none to read
        holds = at_row(b_pieces, i_row, BB) > 0
        inside = (o_c < grid) & holds
        p_slot = slots + i_l * slots_stride + (o_c % per_row) * 3
        i_h = tl.load(p_slot, mask=inside, other=0)
        split = tl.load(p_slot + 1, mask=inside, other=0)
        count = tl.load(p_slot + 2, mask=inside, other=1)
        held = at_row(b_s, i_row, BB) * tl.load(p_kept + i_h, mask=inside, other=0)
        held += at_row(b_tail, i_row, BB)
        count = tl.maximum(tl.minimum(count, held), 1)
        # a split too many is empty: it starts and ends where the head ends
        page = tl.minimum((split.to(tl.int64) * held // count).to(tl.int32), held)
        common = o_c < 0
        i_piece = at_row(b_first, i_row, BB) + i_h
    p_start = starts + (i_l * starts_stride + o_c) * START
    if STRETCHED:
        beyond = end_piece
    else:
        # requests before it all have pieces of lower numbers
        beyond = at_row(b_first, i_row, BB)
        beyond = tl.where(i_row < batch, beyond, end_piece)
    tl.store(p_start, tl.where(inside, i_piece, beyond), mask=m_c)
    tl.store(p_start + 1, tl.where(inside, page, 0), mask=m_c)
    store_piece(
        p_start + 2, inside, rows, i_row, i_h, common, b_n, b_s, b_shared, window, ring,
        p_kept, p_sealed_at, p_ring_at, p_column, H, W, P, BB,
    )  # fmt: skip

    # every piece, [BC]
    m_p = o_c < end_piece
    i_row = tl.sum((b_last[None, :] <= o_c[:, None]).to(tl.int32), axis=1)
    i_h = o_c - at_row(b_first, i_row, BB)
    lead = at_row(b_lead, i_row, BB)
    common = (lead > 0) & (i_h < H)
    i_h -= tl.where(common, 0, lead * H)
    p_piece = pieces + (i_l * pieces_stride + o_c) * PIECE
    store_piece(
        p_piece, m_p, rows, i_row, i_h, common, b_n, b_s, b_shared, window, ring,
        p_kept, p_sealed_at, p_ring_at, p_column, H, W, P, BB,
    )  # fmt: skip

    # every (request, head), [BC]
    m_m = o_c < batch * H
    i_row = o_c // H
    i_h = o_c % H
    n = at_row(b_n, i_row, BB)
    s = at_row(b_s, i_row, BB)
    row = tl.load(rows + i_row, mask=m_m, other=0).to(tl.int32)
    first_page, tail = whole_tail(n, s, window, W, P)
    kept = tl.load(p_kept + i_h, mask=m_m, other=0)
    before = tl.load(p_before + i_h, mask=m_m, other=0)
    own = at_row(b_own, i_row, BB)
    held = own * kept + tail
    piece = at_row(b_first, i_row, BB) + at_row(b_lead, i_row, BB) * H + i_h
    if STRETCHED:
        x = at_row(b_begin, i_row, BB) + at_row(b_common, i_row, BB) + OVERHEAD
        x += own * before + at_row(b_cost, i_row, BB) * i_h
        first, count = readers_of(x, held, many, length)
    else:
        p_split = splits + (i_l * H + i_h) * 2
        first = i_row * (grid // batch) + tl.load(p_split, mask=m_m, other=0)
        count = tl.minimum(tl.load(p_split + 1, mask=m_m, other=0), held)
    p_merge = merges + (i_l * merges_stride + o_c) * MERGE
    ring_at = tl.load(p_ring_at + i_h, mask=m_m, other=0)
    tl.store(p_merge, row, mask=m_m)
    tl.store(p_merge + 1, ring_at + (first_page + tail) % ring, mask=m_m)
    tl.store(p_merge + 2, tl.load(p_column + i_h, mask=m_m, other=0), mask=m_m)
    tl.store(p_merge + 3, tl.where(n > 0, (n - 1) % P, -1), mask=m_m)
    tl.store(p_merge + 4, unseen(n, first_page, window, P) - tail * P, mask=m_m)
    tl.store(p_merge + 5, first + piece, mask=m_m)
    tl.store(p_merge + 6, count, mask=m_m)
    if SHARING:
        windows = at_row(b_shared, i_row, BB)
        leader = tl.load(shared + i_row * RECORD, mask=m_m, other=0)
        x = at_row(b_begin, leader, BB) + OVERHEAD + windows * before + OVERHEAD * i_h
        first, count = readers_of(x, windows * kept, many, length)
        tl.store(p_merge + 7, first + at_row(b_first, leader, BB) + i_h, mask=m_m)
        tl.store(p_merge + 8, count, mask=m_m)
        tl.store(p_merge + 9, tl.load(shared + i_row * RECORD + 1, mask=m_m, other=0), mask=m_m)
