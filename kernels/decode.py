"""Decode attention of one layer over ragged pages: two launches, KV write included.

Program i reads the stretch of the layer's line that ``kernels/dispatch.py`` cut for it; a stretch
may end in one piece and go on in the next. What a program reads of one piece is a part, an output and
its log-sum-exp for each query of each request that reads the piece, left in the workspace.
``kernels/merge.py`` adds the newest token and merges. README.md has the derivation and what was
measured.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tangram_sglang.kernels.decode_config import Config, config_for, rows_of, uses_copy_engine
from tangram_sglang.kernels.dispatch import Dispatch
from tangram_sglang.kernels.dispatch_line import MERGE, PIECE, START
from tangram_sglang.kernels.layer_tables import LayerTables
from tangram_sglang.kernels.merge import LOG2E, merge_kernel
from tangram_sglang.kernels.shared_prefix import READERS, lines_for
from tangram_sglang.kernels.workspace import Workspace


@triton.jit
def attend(b_m, b_l, b_acc, b_q, b_k, b_v, m_e, scale, PRECISION: tl.constexpr):
    """Take a tile of entries into the running softmax of a piece.

    b_m, b_l [BM] maximum in base 2 and sum; b_acc [BM, BD]; b_q [BM, BD]; b_k, b_v [BN, BD];
    m_e [BN], entries that count: at least one.
    """
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
    b_s = tl.where(m_e[None, :], b_s, float("-inf"))  # [BM, BN]
    b_max = tl.maximum(b_m, tl.max(b_s, axis=1))
    b_a = tl.exp2(b_m - b_max)
    b_p = tl.exp2(b_s - b_max[:, None])
    b_l = b_l * b_a + tl.sum(b_p, axis=1)
    b_acc = b_acc * b_a[:, None]
    b_acc += tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
    return b_max, b_l, b_acc


@triton.jit
def page_slot(i_page, sealed, sealed_at, ring_at, ring, turn):
    """Entry of a row of the page table for page ``i_page`` of a head."""
    slot = i_page + turn
    slot = ring_at + tl.where(slot >= ring, slot - ring, slot)
    return tl.where(i_page < sealed, sealed_at + i_page, slot)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["starts", "pieces", "rings", "shared"],
)
def decode_kernel(
    q,
    pool,
    pool_rows,
    table,
    starts,
    pieces,
    rings,
    shared,
    mid,
    lse,
    scale,
    q_stride,
    page_stride,
    column_stride,
    table_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    COPY_ENGINE: tl.constexpr,
    SLIDING: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
    PRECISION: tl.constexpr,
    START: tl.constexpr,
    PIECE: tl.constexpr,
    RECORD: tl.constexpr,
):
    i_c = tl.program_id(0).to(tl.int64)
    p_start = starts + i_c * START
    first_piece = tl.load(p_start)
    lo = tl.load(p_start + 1)
    row = tl.load(p_start + 2)
    pages = tl.load(p_start + 3)
    sealed = tl.load(p_start + 4)
    sealed_at = tl.load(p_start + 5)
    ring_at = tl.load(p_start + 6)
    turn = tl.load(p_start + 7)
    i_column = tl.load(p_start + 8)
    skip = tl.load(p_start + 9)
    target = tl.load(p_start + 10)
    common = tl.load(p_start + 11)
    last_piece = tl.load(p_start + START)
    last_page = tl.load(p_start + START + 1)
    ring = tl.load(rings)
    page_rows = (page_stride // D).to(tl.int32)
    o_g = tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    o_n = tl.arange(0, BN)
    m_d = o_d < D
    o_r = o_g // G  # a line's reader
    o_gd = o_g[:, None] * D + o_d[None, :]
    o_qd = (o_g % G)[:, None] * D + o_d[None, :]
    dtype = pool.dtype.element_ty
    if EARLY:
        # q is there once the kernel before has ended
        gdc_wait()
    if DEPENDENT:
        # the merge may take its place and read the newest tokens
        gdc_launch_dependents()

    touched = last_piece + 1 - first_piece
    for i in range(0, touched):
        i_piece = first_piece + i
        # where the next piece lies, asked for early
        more = i + 1 < touched
        p_next = pieces + (i_piece + 1) * PIECE
        next_row = tl.load(p_next, mask=more, other=0)
        next_pages = tl.load(p_next + 1, mask=more, other=0)
        next_sealed = tl.load(p_next + 2, mask=more, other=0)
        next_sealed_at = tl.load(p_next + 3, mask=more, other=0)
        next_ring_at = tl.load(p_next + 4, mask=more, other=0)
        next_turn = tl.load(p_next + 5, mask=more, other=0)
        next_column = tl.load(p_next + 6, mask=more, other=0)
        next_skip = tl.load(p_next + 7, mask=more, other=0)
        next_target = tl.load(p_next + 8, mask=more, other=0)
        next_common = tl.load(p_next + 9, mask=more, other=0)
        hi = tl.where(i_piece == last_piece, last_page, pages)
        if lo < hi:
            i_h = target % H
            b_b = tl.where(o_r == 0, target // H, -1)  # [BM], requests
            if R > 1:
                p_reader = shared + target // H * RECORD + 3 + o_r
                b_b = tl.load(p_reader, mask=(common > 0) & (o_r < R), other=b_b)
            m_gd = (b_b >= 0)[:, None] & m_d[None, :]
            p_q = q + b_b.to(tl.int64)[:, None] * q_stride + i_h * (G * D) + o_qd
            b_q = tl.load(p_q, mask=m_gd, other=0.0).to(dtype)  # [BM, BD]
            p_table = table + row.to(tl.int64) * table_stride
            # finite, so that a tile outside the sliding window leaves no NaN
            b_m = tl.full([BM], -1e30, tl.float32)
            b_l = tl.zeros([BM], tl.float32)
            b_acc = tl.zeros([BM, BD], tl.float32)
            # in both loops page ids are asked for a step ahead, so that K and V wait for nothing
            if COPY_ENGINE:
                column_row = i_column * (2 * P)
                p_id = p_table + page_slot(lo, sealed, sealed_at, ring_at, ring, turn)
                next_page = tl.load(p_id)
                for i_page in tl.range(lo, hi, num_stages=STAGES):
                    i_row = next_page * page_rows + column_row
                    i_next = i_page + 1
                    p_id = p_table + page_slot(i_next, sealed, sealed_at, ring_at, ring, turn)
                    next_page = tl.load(p_id, mask=i_next < hi, other=0)
                    b_k = pool_rows.load([i_row, 0])  # [P, BD]
                    b_v = pool_rows.load([i_row + P, 0])  # [P, BD]
                    m_e = i_page * P + o_n >= skip if SLIDING else o_n >= 0
                    b_m, b_l, b_acc = attend(b_m, b_l, b_acc, b_q, b_k, b_v, m_e, scale, PRECISION)
            else:
                p_column = pool + i_column.to(tl.int64) * column_stride
                o_page = (lo * P + o_n) // P
                p_ids = p_table + page_slot(o_page, sealed, sealed_at, ring_at, ring, turn)
                b_next = tl.load(p_ids, mask=o_page < hi, other=0)  # [BN]
                for e in tl.range(lo * P, hi * P, BN, num_stages=STAGES):
                    o_e = e + o_n
                    o_row = b_next.to(tl.int64) * page_stride + (o_e % P) * D
                    o_page = (o_e + BN) // P
                    p_ids = p_table + page_slot(o_page, sealed, sealed_at, ring_at, ring, turn)
                    b_next = tl.load(p_ids, mask=o_page < hi, other=0)  # [BN]
                    m_e = o_e < hi * P
                    if SLIDING:
                        m_e = m_e & (o_e >= skip)
                    p_k = p_column + o_row[:, None] + o_d[None, :]
                    m_kv = m_e[:, None] & m_d[None, :]
                    b_k = tl.load(p_k, mask=m_kv, other=0.0)  # [BN, BD]
                    b_v = tl.load(p_k + P * D, mask=m_kv, other=0.0)  # [BN, BD]
                    b_m, b_l, b_acc = attend(b_m, b_l, b_acc, b_q, b_k, b_v, m_e, scale, PRECISION)
            # a program and a piece name a part: both only grow along the line
            i_part = (i_c + i_piece) * R
            p_mid = mid + i_part * (G * D) + o_gd
            tl.store(p_mid, b_acc * (1.0 / b_l)[:, None], mask=m_gd)
            tl.store(lse + i_part * G + o_g, b_m + tl.log2(b_l), mask=b_b >= 0)
        lo = 0
        row = next_row
        pages = next_pages
        sealed = next_sealed
        sealed_at = next_sealed_at
        ring_at = next_ring_at
        turn = next_turn
        i_column = next_column
        skip = next_skip
        target = next_target
        common = next_common


def decode_attention(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    tables: LayerTables,
    dispatch: Dispatch,
    workspace: Workspace,
    layer: int,
    out: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """One new token of every request against what each KV head holds of it; stores its K and V.

    ``dispatch_step`` must have run for this step. Nothing is allocated or read back, and the grids
    depend on the batch size alone: the call may be captured in a CUDA graph.

    Args:
        q: [B, HQ, D], query heads of a KV head side by side; each request's heads contiguous.
        k_new, v_new: [B, H, D], of the token at position ``seq_lens - 1``; contiguous likewise.
        pool: [pages, H_p, 2, P, D]; the last three dimensions contiguous.
        table: [rows, E] int32, page table.
        tables, dispatch: of all layers; ``layer`` is the index of this one.
        workspace: for at least this batch and grid.
        out: [B, HQ, D]; rows of padding become 0.
        scaling: factor on q.k.
        sinks: [HQ], logits that take part in the softmax and carry no value.
        config: for benches.
    """
    _check(q, k_new, v_new, pool, out, tables, dispatch, workspace, layer)
    # the merge starts while the decode kernel ends, where the GPU can do that
    dependent = pool.is_cuda and torch.cuda.get_device_capability(pool.device)[0] >= 9
    config = config or config_for(pool, q.shape[1] // tables.heads)
    arguments = decode_arguments(
        q, pool, table, tables, dispatch, workspace, layer, scaling, config
    )
    # Programs of later layers take their places, and what the dispatch wrote, while the kernel
    # before them ends. The first layer's cannot: that kernel may be the dispatch.
    early = dependent and layer > 0
    decode_kernel[(dispatch.grid[layer],)](
        DEPENDENT=dependent, EARLY=early, **arguments, **({"launch_pdl": True} if early else {})
    )
    batch, q_heads, dim = q.shape
    ratio = q_heads // tables.heads
    merge_kernel[(batch * tables.heads, ratio)](
        q=q,
        k_new=k_new,
        v_new=v_new,
        pool=pool,
        table=table,
        merges=dispatch.merges[layer],
        mid=workspace.mid,
        lse=workspace.lse,
        # never read without SINKS, but a pointer all the same
        sinks=q if sinks is None else sinks,
        out=out,
        scale=scaling * LOG2E.value,
        q_stride=q.stride(0),
        k_stride=k_new.stride(0),
        v_stride=v_new.stride(0),
        out_stride=out.stride(0),
        page_stride=pool.stride(0),
        column_stride=pool.stride(1),
        table_stride=table.stride(0),
        G=ratio,
        H=tables.heads,
        D=dim,
        P=tables.page,
        R=dispatch.readers,
        BD=triton.next_power_of_2(dim),
        BP=triton.next_power_of_2(tables.page),
        NP=32,
        SINKS=sinks is not None,
        DEPENDENT=dependent,
        MERGE=MERGE,
        # kernels/README.md has what else was tried
        num_warps=1,
        **({"launch_pdl": True} if dependent else {}),
    )
    return out


def decode_arguments(
    q: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    tables: LayerTables,
    dispatch: Dispatch,
    workspace: Workspace,
    layer: int,
    scaling: float,
    config: Config,
) -> dict:
    """Arguments of ``decode_kernel`` but one, for a launch or to compile it only."""
    dim, page = q.shape[-1], tables.page
    ratio = q.shape[1] // tables.heads
    copies = uses_copy_engine(pool)
    return dict(
        q=q,
        pool=pool,
        pool_rows=rows_of(pool) if copies else pool,
        table=table,
        starts=dispatch.starts[layer],
        pieces=dispatch.pieces[layer],
        rings=tables.ring[layer:],
        shared=dispatch.shared,
        mid=workspace.mid,
        lse=workspace.lse,
        scale=scaling * LOG2E.value,
        q_stride=q.stride(0),
        page_stride=pool.stride(0),
        column_stride=pool.stride(1),
        table_stride=table.stride(0),
        G=ratio,
        H=tables.heads,
        D=dim,
        P=page,
        R=dispatch.readers,
        BM=lines_for(ratio),
        BD=max(16, triton.next_power_of_2(dim)),
        BN=page if copies else config.block,
        STAGES=config.stages,
        COPY_ENGINE=copies,
        SLIDING=tables.sliding_window[layer] > 0,
        PRECISION="ieee" if pool.dtype == torch.float32 else "tf32",
        START=START,
        PIECE=PIECE,
        RECORD=READERS + dispatch.readers,
        num_warps=config.warps,
        **({} if config.registers is None else {"maxnreg": config.registers}),
    )


def _check(q, k_new, v_new, pool, out, tables, dispatch, workspace, layer) -> None:
    """Shapes that the kernels trust."""
    batch, q_heads, dim = q.shape
    heads, page = tables.heads, tables.page
    parts = Workspace.parts(dispatch.grid[layer], batch, heads, dispatch.readers)
    wrong = (
        q_heads % heads
        or k_new.shape != (batch, heads, dim)
        or v_new.shape != (batch, heads, dim)
        or out.shape != q.shape
        or pool.shape[2:] != (2, page, dim)
        or pool.stride()[2:] != (page * dim, dim, 1)
        or any(x.stride()[1:] != (dim, 1) for x in (q, k_new, v_new, out))
        or dispatch.batch != batch
        or workspace.mid.shape[0] < parts
        or workspace.mid.shape[1:] != (dispatch.readers * q_heads // heads, dim)
    )
    if wrong:
        raise ValueError(
            f"decode attention of {heads} KV heads, pages of {page}, dispatch for "
            f"{dispatch.batch} requests, {dispatch.readers} reading together: got q "
            f"{tuple(q.shape)}, k_new {tuple(k_new.shape)}, pool {tuple(pool.shape)} with strides "
            f"{pool.stride()}, out {tuple(out.shape)}, workspace {tuple(workspace.mid.shape)}"
        )
