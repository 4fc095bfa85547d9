"""Second half of decode attention: the newest token, and the merge of what programs read.

One program per query head. First, while the decode kernel may still run: the last page of the head,
which nobody else reads, with the newest token's K and V from `k_new` and `v_new`, which are stored
to their slot on the way. Then the parts that programs left, in line order, so that the result does
not depend on who finished last. Sinks enter here and only here.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def absorb(b_m, b_l, b_acc, b_x, b_o):
    """Take parts with log-sum-exp b_x [N] (base 2) and outputs b_o [N, BD] into a running softmax.

    b_m, b_l: maximum in base 2 and sum; b_acc [BD]. Empty is (-inf, 0, 0), a part of it -inf.
    """
    b_max = tl.maximum(b_m, tl.max(b_x, axis=0))
    # as long as all is empty, any finite maximum keeps NaN out
    b_safe = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_a = tl.exp2(b_m - b_safe)
    b_w = tl.exp2(b_x - b_safe)  # [N]
    b_l = b_l * b_a + tl.sum(b_w, axis=0)
    return b_max, b_l, b_acc * b_a + tl.sum(b_w[:, None] * b_o, axis=0)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["merges", "sinks"])
def merge_kernel(
    q,
    k_new,
    v_new,
    pool,
    table,
    merges,
    mid,
    lse,
    sinks,
    out,
    scale,
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
    P: tl.constexpr,
    R: tl.constexpr,
    BD: tl.constexpr,
    BP: tl.constexpr,
    NP: tl.constexpr,
    SINKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    MERGE: tl.constexpr,
):
    i_m = tl.program_id(0).to(tl.int64)
    i_g = tl.program_id(1)
    i_b = i_m // H
    i_h = i_m % H
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    p_out = out + i_b * out_stride + (i_h * G + i_g) * D + o_d
    p_merge = merges + i_m * MERGE
    slot = tl.load(p_merge + 3)
    if slot < 0:
        # a row of padding attends to nothing
        tl.store(p_out, tl.zeros([BD], out.dtype.element_ty), mask=m_d)
    else:
        row = tl.load(p_merge).to(tl.int64)
        place = tl.load(p_merge + 1)
        i_column = tl.load(p_merge + 2).to(tl.int64)
        skip = tl.load(p_merge + 4)
        first = tl.load(p_merge + 5).to(tl.int64)
        count = tl.load(p_merge + 6)
        b_q = tl.load(q + i_b * q_stride + (i_h * G + i_g) * D + o_d, mask=m_d, other=0.0)
        b_k1 = tl.load(k_new + i_b * k_stride + i_h * D + o_d, mask=m_d, other=0.0)
        b_v1 = tl.load(v_new + i_b * v_stride + i_h * D + o_d, mask=m_d, other=0.0)
        b_k1 = b_k1.to(pool.dtype.element_ty)  # [BD]
        b_v1 = b_v1.to(pool.dtype.element_ty)  # [BD]

        # the last page: what is older than the newest token
        page = tl.load(table + row * table_stride + place).to(tl.int64)
        o_p = tl.arange(0, BP)
        m_p = (o_p < slot) & (o_p >= skip)
        p_page = pool + page * page_stride + i_column * column_stride + o_d
        p_k = p_page[None, :] + o_p[:, None] * D
        m_kv = m_p[:, None] & m_d[None, :]
        b_k = tl.load(p_k, mask=m_kv, other=0.0).to(tl.float32)  # [BP, BD]
        b_v = tl.load(p_k + P * D, mask=m_kv, other=0.0).to(tl.float32)  # [BP, BD]
        if i_g == 0:
            tl.store(p_page + slot * D, b_k1, mask=m_d)
            tl.store(p_page + (P + slot) * D, b_v1, mask=m_d)
        b_q = b_q.to(tl.float32) * scale  # [BD]
        b_m = tl.sum(b_q * b_k1.to(tl.float32), axis=0)
        b_s = tl.sum(b_q[None, :] * b_k, axis=1)
        b_s = tl.where(m_p, b_s, float("-inf"))  # [BP]
        b_m, b_l, b_acc = absorb(b_m, 1.0, b_v1.to(tl.float32), b_s, b_v)

        # parts of windows that others read too come first; their lines are those of all readers
        before = 0
        line = 0
        if R > 1:
            first_common = tl.load(p_merge + 7).to(tl.int64)
            before = tl.load(p_merge + 8)
            line = tl.load(p_merge + 9) * G
        if DEPENDENT:
            # the decode kernel has ended and its parts are there
            gdc_wait()
        o_n = tl.arange(0, NP)
        for i in range(0, before + count, NP):
            o_i = i + o_n
            m_n = o_i < before + count
            o_part = first + o_i - before
            o_line = (o_part * R) * G + i_g
            if R > 1:
                o_common = ((first_common + o_i) * R) * G + line + i_g
                o_line = tl.where(o_i < before, o_common, o_line)
            b_x = tl.load(lse + o_line, mask=m_n, other=float("-inf"))  # [NP]
            p_part = mid + o_line[:, None] * D + o_d[None, :]
            b_o = tl.load(p_part, mask=m_n[:, None] & m_d[None, :], other=0.0)  # [NP, BD]
            b_m, b_l, b_acc = absorb(b_m, b_l, b_acc, b_x, b_o)
        if SINKS:
            b_sink = tl.load(sinks + i_h * G + i_g).to(tl.float32)
            b_l += tl.exp2(b_sink * LOG2E - b_m)
        tl.store(p_out, (b_acc / b_l).to(out.dtype.element_ty), mask=m_d)
