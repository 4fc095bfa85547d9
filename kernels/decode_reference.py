"""Decode attention of one request over ragged entries, in plain PyTorch."""

import torch

from tangram_sglang.kernels.sink_reference import attend_with_sinks


def decode_reference(
    q: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    page: int,
    scaling: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query per head against the entries its KV head holds.

    Args:
        q: [HQ, D], query heads of a KV head side by side.
        pool: [rows, D], the page pool as rows of D.
        rows: [H, N] int64, K rows of each KV head's entries; V lies ``page`` rows further on.
        lengths: [H] int64, entries that count in each line; at least 1.
        page: P.
        scaling: factor on q.k.
        sinks: [HQ], logits that join each softmax without a value.

    Returns:
        [HQ, D] in q's type.
    """
    heads, entries = rows.shape
    q = q.view(heads, -1, q.shape[-1])
    mask = None
    if int(lengths.min()) < entries:
        mask = (torch.arange(entries, device=q.device) < lengths[:, None])[:, None]
    if sinks is not None:
        sinks = sinks.view(heads, -1, 1)
    out = attend_with_sinks(
        q[None], pool[rows][None], pool[rows + page][None], mask, scaling, sinks
    )
    return out[0].flatten(0, 1)
