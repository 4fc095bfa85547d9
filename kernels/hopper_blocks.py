"""Blocks of keys in Hopper's shared memory, put together from pages by the copy engine; softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

FAR: gl.constexpr = gl.constexpr(-(1 << 30))


@gluon.jit
def load_blocks(
    p_pages, p_list, d_pool, d_new, smem, ready, empty,
    sealed, entries, page_start, old_first, page_rows, i_row, i_new, i_column,
    blocks_paged, first, blocks,
    P: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill blocks of K, or of V, in turn: from pages first, then from the step's tokens.

    Args:
        p_pages, p_list: pages of sealed entries, and old pages, of this head's group.
        d_pool, d_new: the pool as rows of D, the step's tokens as rows of H * D.
        smem: [STAGES, BN, D].
        page_rows, i_row: rows of a page, and this head's first one in it.
        i_new, i_column: first row and column in ``d_new``.
        first, blocks: first block of this program, and how many.
    """
    PAGES: gl.constexpr = BN // P
    PARTS: gl.constexpr = D // 64
    layout: gl.constexpr = d_pool.layout
    # columns lie in parts of 64, each part row by row, so that a page's part is one box
    pages = smem._reinterpret(smem.dtype, [STAGES * PARTS * PAGES, P, 64], layout)
    parts = smem._reinterpret(smem.dtype, [STAGES * PARTS, BN, 64], layout)
    paged = gl.minimum(gl.maximum(blocks_paged - first, 0), blocks)
    for i_block in range(0, paged):
        stage = i_block % STAGES
        rows = ()
        for i in gl.static_range(PAGES):
            # behind the last entry the last page comes again; it is masked
            entry = gl.minimum((first + i_block) * BN + i * P, (entries - 1) // P * P)
            page = gl.load(p_pages + entry // P, mask=entry < sealed, other=0)
            old = (entry - sealed + page_start - old_first) // P
            page += gl.load(p_list + old, mask=entry >= sealed, other=0)
            rows = rows + (page * page_rows + i_row,)  # noqa: RUF005
        mbarrier.wait(empty.index(stage), ((i_block // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), BN * D * 2)
        for i in gl.static_range(PAGES):
            for part in gl.static_range(PARTS):
                target = pages.index((stage * PARTS + part) * PAGES + i)
                tma.async_copy_global_to_shared(
                    d_pool, [rows[i], part * 64], ready.index(stage), target
                )
    for i_block in range(paged, blocks):
        stage = i_block % STAGES
        mbarrier.wait(empty.index(stage), ((i_block // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), BN * D * 2)
        row = i_new + (first + i_block - blocks_paged) * BN
        for part in gl.static_range(PARTS):
            target = parts.index(stage * PARTS + part)
            tma.async_copy_global_to_shared(
                d_new, [row, i_column + part * 64], ready.index(stage), target
            )


@gluon.jit
def extent(
    i_block, entries, sealed, page_start, raw_start, end, n0, blocks_paged,
    BN: gl.constexpr, SLIDING: gl.constexpr,
):  # fmt: skip
    """What counts in a block: (one past its last row, position of row 0, its first row)."""
    if i_block < blocks_paged:
        i_start = i_block * BN
        count = gl.minimum(BN, entries - i_start)
        low = 0
        # every query sees what lies in pages, unless its window has moved on
        t0 = FAR
        if SLIDING:
            t0 = i_start - sealed + page_start
            low = raw_start - t0
    else:
        t0 = gl.maximum(raw_start, n0) + (i_block - blocks_paged) * BN
        count = gl.minimum(BN, end - t0)
        low = 0
    return count, t0, low


@gluon.jit
def zero_rows(v, count, low, layout: gl.constexpr):
    """Zero what a block of V holds beside rows low..count: weight 0 does not undo a NaN."""
    BN: gl.constexpr = v.shape[0]
    o_n = gl.arange(0, BN, gl.SliceLayout(1, layout))
    b_v = v.load(layout)
    m_n = (o_n < count) & (o_n >= low)
    v.store(gl.where(m_n[:, None], b_v, gl.zeros_like(b_v)))
    fence_async_shared()


@gluon.jit
def softmax_step(b_s, b_max, b_sum, scale, EMPTY: gl.constexpr):
    """One step of the online softmax; with EMPTY, a query may have seen nothing so far."""
    b_new = gl.maximum(b_max, gl.max(b_s, 1) * scale)
    b_base = b_new
    if EMPTY:
        # -inf minus -inf is no number
        b_base = gl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = gl.exp2(b_s * scale - b_base[:, None])
    b_shrink = gl.exp2(b_max - b_base)
    b_sum = b_sum * b_shrink + gl.sum(b_p, 1)
    return b_p, b_new, b_sum, b_shrink
