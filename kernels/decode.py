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

from tangram_sglang.errors import TangramError
from tangram_sglang.kernels.dispatch import Dispatch, tail_pages
from tangram_sglang.kernels.layer_tables import LayerTables

LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Config:
    """How the kernel is compiled.

    Attributes:
        block: entries per tile.
        warps, stages: of a program.
    registers: most per thread; None leaves it to the compiler.
    """

    block: int
    warps: int
    stages: int
    registers: int | None = None


def config_for(head_dim: int, ratio: int, itemsize: int) -> Config:
    """The config of a head size, query heads per KV head and bytes per element (measured on Hopper)."""
    wide = triton.next_power_of_2(head_dim) * itemsize
    if wide <= 256:
        return Config(block=64, warps=2, stages=3)
    if wide <= 512:
        return Config(block=32, warps=4, stages=3)
    return Config(block=16, warps=4, stages=2)


@triton.jit
def absorb(m, total, acc, x, o):
    """Softmax state of two parts, of which either may be empty (-inf, 0, 0).

    m, total [R]: running maximum in base 2 and sum; acc [R, D]; x [R]: lse of a part and o [R, D]
    its output.
    """
    m_new = tl.maximum(m, x)
    # both empty: any finite maximum keeps NaN out
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    a = tl.exp2(m - m_safe)
    b = tl.exp2(x - m_safe)
    return m_new, total * a + b, acc * a[:, None] + o * b[:, None]


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
    BD: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
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
    o_g = tl.arange(0, BG)
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
        b_q_offset = i_b * q_stride + i_h * (G * D)
        o_out = i_b * out_stride + i_h * (G * D)

        if (count > 0) & (lo < hi):
            b_q = tl.load(q + b_q_offset + o_gd, mask=m_gd, other=0.0).to(dtype)  # [BG, BD]
            p_table = table + row * table_stride
            sealed_at = tl.load(table_offset + i_h)
            ring_at = tl.load(ring_offset + i_h)
            # tail page j is ring slot (tail_start + j) % ring, and a tail fits in the ring
            turn = tail_start % ring - sealed
            p_pool = pool + tl.load(column + i_h).to(tl.int64) * column_stride
            # the newest token comes from k_new; asked for early, used after the loop
            newest_here = hi == held
            newest = sealed * P + n - 1 - tail_start * P
            slot = held - 1 + turn
            slot = ring_at + tl.where(slot >= ring, slot - ring, slot)
            new_page = tl.load(p_table + slot, mask=newest_here, other=0).to(tl.int64)
            m_new = m_d & newest_here
            b_k1 = tl.load(k_new + i_b * k_stride + i_h * D + o_d, mask=m_new, other=0.0)
            b_v1 = tl.load(v_new + i_b * v_stride + i_h * D + o_d, mask=m_new, other=0.0)
            b_k1 = b_k1.to(dtype)  # [BD]
            b_v1 = b_v1.to(dtype)  # [BD]
            end = tl.minimum(hi * P, newest)
            # only a sliding tail starts within a page
            skip = tl.where(window > 0, tl.maximum(n - window, 0) - tail_start * P, 0)
            begin = lo * P
            if SLIDING:
                begin = tl.where(skip >= end, end, begin)
            b_m = tl.full([BG], float("-inf"), tl.float32)
            b_l = tl.zeros([BG], tl.float32)
            b_acc = tl.zeros([BG, BD], tl.float32)
            for e in tl.range(begin, end, BN, num_stages=STAGES):
                o_e = e + o_n
                m_e = o_e < end
                if SLIDING:
                    m_e = m_e & (o_e >= skip)
                i_page = o_e // P
                o_slot = i_page + turn
                o_slot = ring_at + tl.where(o_slot >= ring, o_slot - ring, o_slot)
                o_slot = tl.where(i_page < sealed, sealed_at + i_page, o_slot)
                b_page = tl.load(p_table + o_slot, mask=m_e, other=0).to(tl.int64)  # [BN]
                o_row = b_page * page_stride + (o_e % P) * D
                p_k = p_pool + o_row[None, :] + o_d[:, None]
                b_k = tl.load(p_k, mask=m_e[None, :] & m_d[:, None], other=0.0)  # [BD, BN]
                b_s = tl.dot(b_q, b_k, input_precision=PRECISION) * scale
                b_s = tl.where(m_e[None, :], b_s, float("-inf"))  # [BG, BN]
                p_v = p_pool + o_row[:, None] + (P * D + o_d[None, :])
                b_v = tl.load(p_v, mask=m_e[:, None] & m_d[None, :], other=0.0)  # [BN, BD]
                b_max = tl.maximum(b_m, tl.max(b_s, axis=1))
                b_a = tl.exp2(b_m - b_max)
                b_p = tl.exp2(b_s - b_max[:, None])
                b_l = b_l * b_a + tl.sum(b_p, axis=1)
                b_acc = b_acc * b_a[:, None]
                b_acc += tl.dot(b_p.to(dtype), b_v, input_precision=PRECISION)
                b_m = b_max

            if newest_here:
                b_s1 = tl.sum(b_q.to(tl.float32) * b_k1.to(tl.float32)[None, :], axis=1) * scale
                b_v1_gd = tl.broadcast_to(b_v1.to(tl.float32)[None, :], [BG, BD])
                b_m, b_l, b_acc = absorb(b_m, b_l, b_acc, b_s1, b_v1_gd)
                p_new = p_pool + new_page * page_stride + ((n - 1) % P) * D + o_d
                tl.store(p_new, b_k1, mask=m_d)
                tl.store(p_new + P * D, b_v1, mask=m_d)

            b_o = b_acc / b_l[:, None]
            b_lse = b_m + tl.log2(b_l)
            finished = count == 1
            if count > 1:
                # a program and a head name a piece: both only grow along the line
                i_mid = (i_c + i_piece).to(tl.int64)
                tl.store(mid + i_mid * (G * D) + o_gd, b_o, mask=m_gd)
                tl.store(lse + i_mid * G + o_g, b_lse, mask=m_g)
                tl.debug_barrier()
                finished = tl.atomic_add(done + i_piece, 1, sem="acq_rel") == count - 1
                if finished:
                    b_m = tl.full([BG], float("-inf"), tl.float32)
                    b_l = tl.zeros([BG], tl.float32)
                    b_acc = tl.zeros([BG, BD], tl.float32)
                    i_mid = (i_first + i_piece).to(tl.int64)
                    for j in tl.range(0, count, loop_unroll_factor=4):
                        p_mid = mid + (i_mid + j) * (G * D) + o_gd
                        b_x = tl.load(
                            lse + (i_mid + j) * G + o_g,
                            mask=m_g,
                            other=0.0,
                            cache_modifier=".cg",
                        )
                        b_part = tl.load(p_mid, mask=m_gd, other=0.0, cache_modifier=".cg")
                        b_m, b_l, b_acc = absorb(b_m, b_l, b_acc, b_x, b_part)
                    b_o = b_acc / b_l[:, None]
                    b_lse = b_m + tl.log2(b_l)
                    # ready for the next launch
                    tl.store(done + i_piece, 0)
            if finished:
                if SINKS:
                    b_sink = tl.load(sinks + i_h * G + o_g, mask=m_g, other=0.0).to(tl.float32)
                    b_o = b_o / (1.0 + tl.exp2(b_sink * 1.4426950408889634 - b_lse))[:, None]
                tl.store(out + o_out + o_gd, b_o.to(out.dtype.element_ty), mask=m_gd)
        elif (count == 0) & (i_piece < last_piece):
            # a row of padding attends to nothing
            tl.store(out + o_out + o_gd, tl.zeros([BG, BD], out.dtype.element_ty), mask=m_gd)


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
    config = config or config_for(dim, ratio, pool.element_size())
    grid = dispatch.grid[layer]
    _check(q, k_new, v_new, pool, out, batch, heads, ratio, dim, page, dispatch, workspace, grid)
    return dict(
        q=q,
        k_new=k_new,
        v_new=v_new,
        pool=pool,
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
        BG=max(16, triton.next_power_of_2(ratio)),
        BD=max(16, triton.next_power_of_2(dim)),
        BN=config.block,
        STAGES=config.stages,
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
