"""Attention with sinks, logits that join each softmax and carry no value, in plain PyTorch."""

import torch
from torch.nn.functional import pad, scaled_dot_product_attention


def attend_with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``softmax([scaling * q k^T, sinks])`` without its last column, times v.

    A sink is one more entry whose key has a dimension of its own, in which every query of a head
    holds that head's logit; so masks stay shared among heads.

    Args:
        q: [..., T, D].
        k, v: [..., S, D].
        mask: boolean, broadcast to [..., T, S], or None where all is seen.
        scaling: factor on q.k.
        sinks: finite, broadcast to [..., T, 1], or None.

    Returns:
        [..., T, D].
    """
    if sinks is None:
        return scaled_dot_product_attention(q, k, v, mask, scale=scaling)
    q = torch.cat([q, (sinks / scaling).to(q.dtype).expand(*q.shape[:-1], 1)], dim=-1)
    k = pad(k, (0, 1, 0, 1))
    k[..., -1, -1] = 1
    if mask is not None:
        mask = pad(mask, (0, 1), value=True)
    return scaled_dot_product_attention(q, k, pad(v, (0, 0, 0, 1)), mask, scale=scaling)
