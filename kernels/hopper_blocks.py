"""Blocks of keys in Hopper's shared memory: put together from pages by the copy engine."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

FAR: gl.constexpr = gl.constexpr(-(1 << 30))


@gluon.jit
def load_blocks(
    p_pages, p_list, d_pool, d_new, smem, ready, empty,
    sealed, entries, page_start, old_first, page_rows, i_row, i_new, i_column,
    blocks_paged, blocks,
    P: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill every block of K, or of V, in turn: from pages first, then from the step's tokens.

    Args:
        p_pages, p_list: pages of sealed entries, and old pages, of this head's group.
        d_pool, d_new: the pool as rows of D, the step's tokens as rows of H * D.
        smem: [STAGES, BN, D].
        page_rows, i_row: rows of a page, and this head's first one in it.
        i_new, i_column: first row and column in ``d_new``.
    """
    PAGES: gl.constexpr = BN // P
    PARTS: gl.constexpr = D // 64
    layout: gl.constexpr = d_pool.layout
    # columns lie in parts of 64, each part row by row, so that a page's part is one box
    pages = smem._reinterpret(smem.dtype, [STAGES * PARTS * PAGES, P, 64], layout)
    parts = smem._reinterpret(smem.dtype, [STAGES * PARTS, BN, 64], layout)
    for i_block in range(0, blocks_paged):
        stage = i_block % STAGES
        rows = ()
        for i in gl.static_range(PAGES):
            # behind the last entry the last page comes again; it is masked
            entry = gl.minimum(i_block * BN + i * P, (entries - 1) // P * P)
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
    for i_block in range(blocks_paged, blocks):
        stage = i_block % STAGES
        mbarrier.wait(empty.index(stage), ((i_block // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), BN * D * 2)
        row = i_new + (i_block - blocks_paged) * BN
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
