"""Expected Attention with calibrated query statistics (arXiv 2510.00636).

Queries of the positions to come are taken as normal with the calibrated mean and covariance;
the attention they will pay to a key then has a closed form. The statistics are of queries before
RoPE, so the mean rotation of the next ``HORIZON`` positions is applied; only the distance from
the end of the window enters, which makes the score a pure function of K and V.
"""

from typing import ClassVar

import torch

from tangram_sglang.score.base import QueryStats, Window

HORIZON = 512


class ExpectedAttention:
    """s_j = mean over query heads of softmax_j(z_j) * |v_j|, eps = 0, sinks outside the softmax.

    z_j = a mu.k_j + a^2/2 k_j.Sigma.k_j with a the softmax scaling and k_j rotated back by the
    mean rotation of the positions to come.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"query_stats"})

    def score(self, window: Window) -> torch.Tensor:
        stats = window.query_stats
        k = _unrotate(window.k.float(), window.start + window.k.shape[1], stats)
        scaling = stats.scaling[:, None, None]
        z = scaling * torch.einsum("hrd,hnd->hrn", stats.mean, k)
        spread = torch.einsum("hrdk,hnd->hrnk", stats.factor, k).square().sum(-1)
        spread += torch.einsum("hrd,hnd->hrn", stats.diagonal, k.square())
        z += scaling.square() / 2 * spread
        z[..., : window.sinks] = -torch.inf
        return z.softmax(dim=-1).mean(dim=1) * window.v.float().norm(dim=-1)


def _unrotate(k: torch.Tensor, end: int, stats: QueryStats) -> torch.Tensor:
    """Transpose of the mean rotation of positions end..end+HORIZON, applied to keys [H, W, D]."""
    ahead = torch.arange(end, end + HORIZON, dtype=torch.float64, device=k.device)
    angle = ahead[:, None, None] * stats.inv_freq
    cos = angle.cos().mean(dim=0).float()[:, None]
    sin = angle.sin().mean(dim=0).float()[:, None]
    half = stats.inv_freq.shape[-1]
    a, b, rest = k[..., :half], k[..., half : 2 * half], k[..., 2 * half :]
    return torch.cat([a * cos + b * sin, b * cos - a * sin, rest], dim=-1)
