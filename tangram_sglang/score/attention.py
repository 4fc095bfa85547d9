"""Attention that the last queries of a window pay to its tokens: what snapkv and tova rank by."""

import torch

from tangram_sglang.score.base import Window


def window_attention(window: Window) -> torch.Tensor:
    """Causal softmax over the tokens of the window alone, [H, r, w, W] fp32.

    What came before the window has no part in it, so it is the same whatever was kept of that.
    """
    q, k = window.q.float(), window.k.float()
    asked, tokens = q.shape[2], k.shape[1]
    logits = torch.einsum("hrqd,hnd->hrqn", q, k) * window.scaling[:, None, None, None]
    place = torch.arange(tokens, device=k.device)
    hidden = place > place[tokens - asked :, None]
    return logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)


def newest_last(scores: torch.Tensor, asked: int) -> torch.Tensor:
    """``scores`` [H, W - asked] with the last ``asked`` tokens behind: above all, newest on top."""
    top = scores.amax(dim=1, keepdim=True) if scores.shape[1] else scores.new_zeros(len(scores), 1)
    return torch.cat([scores, top + 1 + torch.arange(asked, device=scores.device)], dim=1)
