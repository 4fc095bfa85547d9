"""Decode attention of one layer over ragged pages: one launch, merge and KV write included.

Program i reads the stretch of the layer's line that ``kernels/dispatch.py`` cut for it; a stretch
may end in one head and go on in the next. What a program reads of one (request, head) is a piece.
A head of one piece is written out at once; else pieces go to the workspace and the program that
finishes last merges them, in line order, so results do not depend on who was last. The newest
token is taken from ``k_new`` and ``v_new`` and stored to its slot on the way. README.md has the
derivation and what was measured.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tangram_sglang.errors import TangramError
from tangram_sglang.kernels.dispatch import Dispatch, tail_pages
from tangram_sglang.kernels.layer_tables import LayerTables

LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Config:
    """How the kernel is compiled.

    Attributes:
        warps, stages: of a program; stages are pages or tiles in flight.
        block: entries per tile where pages are gathered by ordinary loads.
        registers: most per thread; None leaves it to the compiler.
    """

    warps: int
    stages: int
    block: int = 64
    registers: int | None = None


def config_for(head_dim: int, ratio: int, itemsize: int, copies: bool) -> Config:
    """The config of a head size, query heads per KV head, bytes per element and way of loading."""
    width = triton.next_power_of_2(head_dim) * itemsize
    if copies:
        return Config(warps=1 if width <= 256 and ratio <= 16 else 2, stages=5)
    if width <= 256:
        return Config(warps=4, stages=3, block=64)
    return Config(warps=4, stages=3 if width <= 512 else 2, block=32 if width <= 512 else 16)


def uses_copy_engine(pool: torch.Tensor) -> bool:
    """Whether K and V of a page are fetched by the bulk copy engine (Hopper and later)."""
    page, dim = pool.shape[-2:]
    capable = not pool.is_cuda or torch.cuda.get_device_capability(pool.device)[0] >= 9
    return (
        capable
        and pool.element_size() == 2
        and page >= 16
        and page == triton.next_power_of_2(page)
        and dim % 8 == 0
        and pool.stride(0) % dim == 0
        and pool.data_ptr() % 16 == 0
    )


def rows_of(pool: torch.Tensor) -> TensorDescriptor:
    """``pool`` as lines of D, of which the copy engine fetches P at a time."""
    page, dim = pool.shape[-2:]
    lines = ((pool.shape[0] - 1) * pool.stride(0) + pool.shape[1] * pool.stride(1)) // dim
    block = [page, max(16, triton.next_power_of_2(dim))]
    return TensorDescriptor(pool, [lines, dim], [dim, 1], block)


@triton.jit
def attend(b_m, b_l, b_acc, b_q, b_k, b_v, m_e, scale, PRECISION: tl.constexpr):
    """Take a tile of entries into the running softmax of a piece.

    b_m, b_l [BG] maximum in base 2 and sum; b_acc [BG, BD]; b_q [BG, BD]; b_k, b_v [BN, BD];
    m_e [BN], entries that count: at least one.
    """
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
    b_s = tl.where(m_e[None, :], b_s, float("-inf"))  # [BG, BN]
    b_max = tl.maximum(b_m, tl.max(b_s, axis=1))
    b_a = tl.exp2(b_m - b_max)
    b_p = tl.exp2(b_s - b_max[:, None])
    b_l = b_l * b_a + tl.sum(b_p, axis=1)
    b_acc = b_acc * b_a[:, None]
    b_acc += tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
    return b_max, b_l, b_acc


@triton.jit
def merge(
    mid,
    lse,
    count,
    G: tl.constexpr,
    D: tl.constexpr,
    BG: tl.constexpr,
    BD: tl.constexpr,
    NP: tl.constexpr,
):
    """Merge ``count`` parts of a head: its output [BG, BD] and lse [BG]; empty stays (0, -inf).

    A line of the tile is one query head of one part, NP parts at a time.
    """
    o_r = tl.arange(0, NP * BG)
    o_d = tl.arange(0, BD)
    m_r = o_r % BG < G
    m_d = o_d < D
    o_part = o_r // BG * G + o_r % BG
    b_m = tl.full([NP * BG], float("-inf"), tl.float32)
    b_l = tl.zeros([NP * BG], tl.float32)
    b_acc = tl.zeros([NP * BG, BD], tl.float32)
    for i in range(0, count, NP):
        m_part = m_r & (i + o_r // BG < count)
        o_row = i * G + o_part
        # L1 may hold what another launch left there
        b_x = tl.load(lse + o_row, mask=m_part, other=float("-inf"), cache_modifier=".cg")
        p_part = mid + o_row[:, None] * D + o_d[None, :]
        m_load = m_part[:, None] & m_d[None, :]
        b_o = tl.load(p_part, mask=m_load, other=0.0, cache_modifier=".cg")
        b_max = tl.maximum(b_m, b_x)
        # as long as all was empty, any finite maximum keeps NaN out
        b_safe = tl.where(b_max == float("-inf"), 0.0, b_max)
        b_a = tl.exp2(b_m - b_safe)
        b_b = tl.exp2(b_x - b_safe)
        b_l = b_l * b_a + b_b
        b_acc = b_acc * b_a[:, None] + b_o * b_b[:, None]
        b_m = b_max
    b_m = tl.reshape(b_m, [NP, BG])
    b_max = tl.max(b_m, axis=0)  # [BG]
    b_safe = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_a = tl.exp2(b_m - b_safe[None, :])  # [NP, BG]
    b_l = tl.sum(tl.reshape(b_l, [NP, BG]) * b_a, axis=0)  # [BG]
    b_o = tl.sum(tl.reshape(b_acc, [NP, BG, BD]) * b_a[:, :, None], axis=0)
    b_o = b_o * (1.0 / tl.where(b_l == 0.0, 1.0, b_l))[:, None]  # [BG, BD]
    return b_o, b_safe + tl.log2(b_l)


@triton.jit
def finish(
    b_o,
    b_lse,
    sinks,
    out,
    G: tl.constexpr,
    D: tl.constexpr,
    BG: tl.constexpr,
    BD: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Store a head's output [BG, BD]; here, and only here, sinks take their share."""
    o_g = tl.arange(0, BG)
    o_d = tl.arange(0, BD)
    m_g = o_g < G
    if SINKS:
        b_sink = tl.load(sinks + o_g, mask=m_g, other=0.0).to(tl.float32)
        b_o = b_o * (1.0 / (1.0 + tl.exp2(b_sink * 1.4426950408889634 - b_lse)))[:, None]
    m_gd = m_g[:, None] & (o_d < D)[None, :]
    tl.store(out + o_g[:, None] * D + o_d[None, :], b_o.to(out.dtype.element_ty), mask=m_gd)


@triton.jit
def page_slot(i_page, sealed, sealed_at, ring_at, ring, turn):
    """Entry of a row of the page table for page ``i_page`` of a head."""
    slot = i_page + turn
    slot = ring_at + tl.where(slot >= ring, slot - ring, slot)
    return tl.where(i_page < sealed, sealed_at + i_page, slot)


# pointers into small tables, aligned or not from layer to layer, and sizes that change with the
# batch: one compiled kernel serves all
TABLES = ["rows", "seq_lens", "n_win", "kept_pages", "table_offset", "ring_offset", "column"]
TABLES += ["sliding", "rings", "starts", "pieces", "done", "sinks"]


@triton.jit(do_not_specialize=["batch", "table_stride"], do_not_specialize_on_alignment=TABLES)
def decode_kernel(
    q,
    k_new,
    v_new,
    pool,
    pool_rows,
    table,
    rows,
    seq_lens,
    n_win,
    kept_pages,
    table_offset,
    ring_offset,
    column,
    sliding,
    rings,
    starts,
    pieces,
    mid,
    lse,
    done,
    sinks,
    out,
    scale,
    batch,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    page_stride,
    column_stride,
    table_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    BG: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
    STAGES: tl.constexpr,
    COPY_ENGINE: tl.constexpr,
    SLIDING: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_c = tl.program_id(0).to(tl.int64)
    first_piece = tl.load(starts + i_c * 2)
    first_page = tl.load(starts + i_c * 2 + 1)
    last_piece = tl.load(starts + i_c * 2 + 2)
    last_page = tl.load(starts + i_c * 2 + 3)
    window = tl.load(sliding)
    ring = tl.load(rings)
    page_rows = (page_stride // D).to(tl.int32)
    o_g = tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    o_n = tl.arange(0, BN)
    m_g = o_g < G
    m_d = o_d < D
    m_gd = m_g[:, None] & m_d[None, :]
    o_gd = o_g[:, None] * D + o_d[None, :]
    dtype = pool.dtype.element_ty

    touched = tl.minimum(last_piece + 1, batch * H) - first_piece
    for i in range(0, touched):
        i_piece = first_piece + i
        i_b = (i_piece // H).to(tl.int64)
        i_h = (i_piece % H).to(tl.int64)
        row = tl.load(rows + i_b).to(tl.int64)
        n = tl.load(seq_lens + i_b).to(tl.int32)
        s = tl.load(n_win + i_b).to(tl.int32)
        kept = tl.load(kept_pages + i_h)
        sealed_at = tl.load(table_offset + i_h)
        ring_at = tl.load(ring_offset + i_h)
        i_column = tl.load(column + i_h)
        p_pool = pool + i_column.to(tl.int64) * column_stride
        column_row = i_column * (2 * P)
        i_first = tl.load(pieces + i_piece * 2)
        count = tl.load(pieces + i_piece * 2 + 1)
        if SLIDING:
            s = 0
            tail_start = tl.maximum(n - window, 0) // P
        else:
            tail_start = s * (W // P)
        # the head's pages: `sealed` of its sealed windows, then the tail in its ring
        sealed = s * kept
        held = sealed + tail_pages(n, s, window, W, P)
        lo = tl.where(i_piece == first_piece, first_page, 0)
        hi = tl.where(i_piece == last_piece, last_page, held)
        p_table = table + row * table_stride
        p_out = out + i_b * out_stride + i_h * (G * D)
        p_sinks = sinks + i_h * G
        b_q = tl.load(q + i_b * q_stride + i_h * (G * D) + o_gd, mask=m_gd, other=0.0)
        b_q = b_q.to(dtype)  # [BM, BD]

        if (count > 0) & (lo < hi):
            # tail page j is ring slot (tail_start + j) % ring, and a tail fits in the ring
            turn = tail_start % ring - sealed
            # the page of the newest token is this piece's last one or another piece's
            newest_here = hi == held
            p_id = p_table + page_slot(held - 1, sealed, sealed_at, ring_at, ring, turn)
            new_page = tl.load(p_id, mask=newest_here, other=0).to(tl.int64)
            full = hi - newest_here.to(tl.int32)
            # only a sliding tail starts within a page
            skip = tl.where(window > 0, tl.maximum(n - window, 0) - tail_start * P, 0)
            # finite, so that a tile outside the sliding window leaves no NaN
            b_m = tl.full([BM], -1e30, tl.float32)
            b_l = tl.zeros([BM], tl.float32)
            b_acc = tl.zeros([BM, BD], tl.float32)
            # in both loops page ids are asked for a step ahead, so that K and V wait for nothing
            if COPY_ENGINE:
                p_id = p_table + page_slot(lo, sealed, sealed_at, ring_at, ring, turn)
                next_page = tl.load(p_id, mask=lo < full, other=0)
                for i_page in tl.range(lo, full, num_stages=STAGES):
                    i_row = next_page * page_rows + column_row
                    p_id = p_table + page_slot(
                        i_page + 1, sealed, sealed_at, ring_at, ring, turn
                    )
                    next_page = tl.load(p_id, mask=i_page + 1 < full, other=0)
                    b_k = pool_rows.load([i_row, 0])  # [P, BD]
                    b_v = pool_rows.load([i_row + P, 0])  # [P, BD]
                    m_e = i_page * P + o_n >= skip if SLIDING else o_n >= 0
                    b_m, b_l, b_acc = attend(
                        b_m, b_l, b_acc, b_q, b_k, b_v, m_e, scale, PRECISION
                    )
            else:
                end = full * P
                o_page = (lo * P + o_n) // P
                p_ids = p_table + page_slot(o_page, sealed, sealed_at, ring_at, ring, turn)
                b_next = tl.load(p_ids, mask=o_page < full, other=0)  # [BN]
                for e in tl.range(lo * P, end, BN, num_stages=STAGES):
                    o_e = e + o_n
                    o_row = b_next.to(tl.int64) * page_stride + (o_e % P) * D
                    o_page = (o_e + BN) // P
                    p_ids = p_table + page_slot(o_page, sealed, sealed_at, ring_at, ring, turn)
                    b_next = tl.load(p_ids, mask=o_page < full, other=0)  # [BN]
                    m_e = o_e < end
                    if SLIDING:
                        m_e = m_e & (o_e >= skip)
                    p_k = p_pool + o_row[:, None] + o_d[None, :]
                    m_kv = m_e[:, None] & m_d[None, :]
                    b_k = tl.load(p_k, mask=m_kv, other=0.0)  # [BN, BD]
                    b_v = tl.load(p_k + P * D, mask=m_kv, other=0.0)  # [BN, BD]
                    b_m, b_l, b_acc = attend(
                        b_m, b_l, b_acc, b_q, b_k, b_v, m_e, scale, PRECISION
                    )

            if newest_here:
                # the last page: what is older from the pool, the newest from k_new and v_new
                o_p = tl.arange(0, BP)
                slot = (n - 1) % P
                p_k = p_pool + new_page * page_stride + o_p[:, None] * D + o_d[None, :]
                m_old = o_p < slot
                if SLIDING:
                    m_old = m_old & ((held - 1) * P + o_p >= skip)
                m_kv = m_old[:, None] & m_d[None, :]
                is_new = o_p == slot
                m_new = is_new[:, None] & m_d[None, :]
                p_k1 = k_new + i_b * k_stride + i_h * D + o_d[None, :]
                p_v1 = v_new + i_b * v_stride + i_h * D + o_d[None, :]
                b_k1 = tl.load(tl.broadcast_to(p_k1, [BP, BD]), mask=m_new, other=0.0).to(dtype)
                b_v1 = tl.load(tl.broadcast_to(p_v1, [BP, BD]), mask=m_new, other=0.0).to(dtype)
                b_k = tl.load(p_k, mask=m_kv, other=0.0)
                b_v = tl.load(p_k + P * D, mask=m_kv, other=0.0)
                tl.store(p_k, b_k1, mask=m_new)
                tl.store(p_k + P * D, b_v1, mask=m_new)
                b_k = tl.where(is_new[:, None], b_k1, b_k)  # [BP, BD]
                b_v = tl.where(is_new[:, None], b_v1, b_v)  # [BP, BD]
                b_m, b_l, b_acc = attend(
                    b_m, b_l, b_acc, b_q, b_k, b_v, m_old | is_new, scale, PRECISION
                )

            b_o = b_acc * (1.0 / b_l)[:, None]
            b_lse = b_m + tl.log2(b_l)
            if count == 1:
                finish(b_o, b_lse, p_sinks, p_out, G, D, BM, BD, SINKS)
            else:
                # a program and a head name a piece: both only grow along the line
                i_mid = i_c + i_piece
                tl.store(mid + i_mid * (G * D) + o_gd, b_o, mask=m_gd)
                tl.store(lse + i_mid * G + o_g, b_lse, mask=m_g)
                tl.debug_barrier()
                if tl.atomic_add(done + i_piece, 1, sem="acq_rel") == count - 1:
                    # ready for the next launch
                    tl.store(done + i_piece, 0)
                    i_mid = (i_first + i_piece).to(tl.int64)
                    b_all, b_lse_all = merge(
                        mid + i_mid * (G * D), lse + i_mid * G, count, G, D, BG, BD, BM // BG
                    )
                    finish(b_all, b_lse_all, p_sinks, p_out, G, D, BG, BD, SINKS)
        elif (count == 0) & (i_piece < last_piece):
            # a row of padding attends to nothing
            tl.store(p_out + o_gd, tl.zeros([BM, BD], out.dtype.element_ty), mask=m_gd)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Partial results of one launch; all layers share it, one launch after the other.

    Attributes:
        mid: [pieces, G, D] fp32, outputs of pieces.
        lse: [pieces, G] fp32, their log-sum-exp in base 2.
        done: [requests * H] int32, pieces finished so far; 0 between launches.
    """

    mid: torch.Tensor
    lse: torch.Tensor
    done: torch.Tensor

    # bytes above which a workspace is a mistake in the settings, not a need
    CAP = 1 << 30

    @staticmethod
    def pieces(programs: int, batch: int, heads: int) -> int:
        """Most pieces: each starts with a program or with a head."""
        return programs + batch * heads

    @staticmethod
    def nbytes(programs: int, batch: int, heads: int, ratio: int, head_dim: int) -> int:
        """Bytes of a workspace: 4 G (D + 1) a piece and 4 per request and head."""
        pieces = Workspace.pieces(programs, batch, heads)
        return 4 * (pieces * ratio * (head_dim + 1) + batch * heads)

    @staticmethod
    def build(
        programs: int,
        batch: int,
        heads: int,
        ratio: int,
        head_dim: int,
        device: torch.device | str,
    ) -> "Workspace":
        """Buffers for launches of up to ``programs`` programs and ``batch`` requests.

        Args:
            programs, batch: largest grid and batch size.
            heads, ratio, head_dim: H, G and D.
        """
        need = Workspace.nbytes(programs, batch, heads, ratio, head_dim)
        if need > Workspace.CAP:
            raise TangramError(
                f"decode of {batch} requests in {programs} programs needs {need >> 20} MiB of "
                f"workspace, more than {Workspace.CAP >> 20}; lower --cuda-graph-max-bs"
            )
        pieces = Workspace.pieces(programs, batch, heads)
        return Workspace(
            mid=torch.empty(pieces, ratio, head_dim, device=device),
            lse=torch.empty(pieces, ratio, device=device),
            done=torch.zeros(batch * heads, dtype=torch.int32, device=device),
        )


def decode_attention(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    n_win: torch.Tensor,
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

    ``dispatch_step`` must have run for this step. Nothing is allocated or read back, and the grid
    depends on the batch size alone: the call may be captured in a CUDA graph.

    Args:
        q: [B, HQ, D], query heads of a KV head side by side; each request's heads contiguous.
        k_new, v_new: [B, H, D], of the token at position ``seq_lens - 1``; contiguous likewise.
        pool: [pages, H_p, 2, P, D]; the last three dimensions contiguous.
        table: [rows, E] int32, page table.
        rows, seq_lens, n_win: [B] int, as given to ``dispatch_step``.
        tables, dispatch: of all layers; ``layer`` is the index of this one.
        workspace: for at least this batch and grid.
        out: [B, HQ, D]; rows of padding become 0.
        scaling: factor on q.k.
        sinks: [HQ], logits that take part in the softmax and carry no value.
        config: for benches.
    """
    arguments = decode_arguments(
        q,
        k_new,
        v_new,
        pool,
        table,
        rows,
        seq_lens,
        n_win,
        tables,
        dispatch,
        workspace,
        layer,
        out,
        scaling,
        sinks,
        config,
    )
    decode_kernel[(dispatch.grid[layer],)](**arguments)
    return out


def decode_arguments(
    q,
    k_new,
    v_new,
    pool,
    table,
    rows,
    seq_lens,
    n_win,
    tables,
    dispatch,
    workspace,
    layer,
    out,
    scaling,
    sinks,
    config,
) -> dict:
    """Arguments of ``decode_kernel`` for ``decode_attention``'s."""
    batch, q_heads, dim = q.shape
    heads, page = tables.heads, tables.page
    ratio = q_heads // heads
    copies = uses_copy_engine(pool)
    config = config or config_for(dim, ratio, pool.element_size(), copies)
    grid = dispatch.grid[layer]
    _check(q, k_new, v_new, pool, out, batch, heads, ratio, dim, page, dispatch, workspace, grid)
    return dict(
        q=q,
        k_new=k_new,
        v_new=v_new,
        pool=pool,
        pool_rows=rows_of(pool) if copies else pool,
        table=table,
        rows=rows,
        seq_lens=seq_lens,
        n_win=n_win,
        kept_pages=tables.kept_pages[layer],
        table_offset=tables.table_offset[layer],
        ring_offset=tables.ring_offset[layer],
        column=tables.column[layer],
        sliding=tables.sliding[layer:],
        rings=tables.ring[layer:],
        starts=dispatch.starts[layer],
        pieces=dispatch.pieces[layer],
        mid=workspace.mid,
        lse=workspace.lse,
        done=workspace.done,
        # never read without SINKS, but a pointer all the same
        sinks=q if sinks is None else sinks,
        out=out,
        scale=scaling * LOG2E,
        batch=batch,
        q_stride=q.stride(0),
        k_stride=k_new.stride(0),
        v_stride=v_new.stride(0),
        out_stride=out.stride(0),
        page_stride=pool.stride(0),
        column_stride=pool.stride(1),
        table_stride=table.stride(0),
        G=ratio,
        H=heads,
        D=dim,
        W=tables.window,
        P=page,
        BG=triton.next_power_of_2(ratio),
        # a matrix multiplication needs 16 lines
        BM=max(16, triton.next_power_of_2(ratio)),
        BD=max(16, triton.next_power_of_2(dim)),
        BN=page if copies else config.block,
        BP=max(16, triton.next_power_of_2(page)),
        STAGES=config.stages,
        COPY_ENGINE=copies,
        SLIDING=tables.sliding_window[layer] > 0,
        SINKS=sinks is not None,
        PRECISION="ieee" if pool.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
        **({} if config.registers is None else {"maxnreg": config.registers}),
    )


def _check(q, k_new, v_new, pool, out, batch, heads, ratio, dim, page, dispatch, workspace, grid):
    """Shapes that the kernel trusts."""
    wrong = (
        q.shape[1] != heads * ratio
        or k_new.shape != (batch, heads, dim)
        or v_new.shape != (batch, heads, dim)
        or out.shape != q.shape
        or pool.shape[2:] != (2, page, dim)
        or pool.stride()[2:] != (page * dim, dim, 1)
        or any(x.stride()[1:] != (dim, 1) for x in (q, k_new, v_new, out))
        or dispatch.batch != batch
        or len(workspace.done) < batch * heads
        or workspace.mid.shape[0] < Workspace.pieces(grid, batch, heads)
        or workspace.mid.shape[1:] != (ratio, dim)
    )
    if wrong:
        raise ValueError(
            f"decode attention of {heads} KV heads, pages of {page}, dispatch for "
            f"{dispatch.batch} requests: got q {tuple(q.shape)}, k_new {tuple(k_new.shape)}, pool "
            f"{tuple(pool.shape)} with strides {pool.stride()}, out {tuple(out.shape)}, workspace "
            f"{tuple(workspace.mid.shape)}"
        )
