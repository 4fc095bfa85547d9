"""Spans of a decode step, one token a row: what ``records.raw_spans`` is for a prefill, on the device.

In a captured graph lengths and rows are known to the device only. Rows of padding (row 0) have no tokens.
"""

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit(do_not_specialize=["B"])
def spans_kernel(p_spans, p_rows, p_lens, B, BN: tl.constexpr, FIELDS: tl.constexpr):
    o_b = tl.program_id(0) * BN + tl.arange(0, BN)
    m_b = o_b < B
    b_row = tl.load(p_rows + o_b, mask=m_b, other=0).to(tl.int32)  # [BN]
    b_n = tl.load(p_lens + o_b, mask=m_b, other=0).to(tl.int32)  # [BN]
    p_span = p_spans + o_b * FIELDS
    tl.store(p_span, b_row, mask=m_b)
    tl.store(p_span + 1, tl.maximum(b_n - 1, 0), mask=m_b)
    tl.store(p_span + 2, ((b_row > 0) & (b_n > 0)).to(tl.int32), mask=m_b)
    tl.store(p_span + 3, o_b, mask=m_b)


def decode_spans(spans: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Where the new token of every row stands; may be captured in a CUDA graph.

    Args:
        spans: [B, SPAN_FIELDS] int32, written: row, position, tokens, index in the step's tensors.
        rows, seq_lens: [B], rows of the page table and tokens stored, the new one included.

    Returns:
        ``spans``.
    """
    if len(spans):
        spans_kernel[(triton.cdiv(len(spans), BLOCK),)](
            spans, rows, seq_lens, len(spans), BN=BLOCK, FIELDS=spans.shape[1], num_warps=4
        )
    return spans
