"""Expected Attention with calibrated query statistics (arXiv 2510.00636).

Queries of the positions to come are taken as normal with the calibrated mean and covariance;
the attention they will pay to a key then has a closed form. The statistics are of queries before
RoPE, so the mean rotation of the next ``HORIZON`` positions is applied; only the distance from
the end of the window enters, which makes the score a pure function of K and V.
"""

from typing import ClassVar

import torch

from tangram_sglang.score.base import Window
from tangram_sglang.score.rotation import mean_rotation, rotate_back

HORIZON = 512


class ExpectedAttention:
    """s_j = mean over query heads of softmax_j(z_j) * |v_j|, eps = 0, sinks outside the softmax.

    z_j = a mu.k_j + a^2/2 k_j.Sigma.k_j with a the softmax scaling and k_j rotated back by the
    mean rotation of the positions to come. As kvpress' ``ExpectedAttentionStatsPress``, except that
    the statistics come with the plan, their covariance is of low rank plus a diagonal, and sinks are
    left out in the first window only, which alone has them.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"query_stats"})

    def score(self, window: Window) -> torch.Tensor:
        stats = window.query_stats
        mean = mean_rotation(stats.inv_freq, window.start + window.k.shape[1], HORIZON)
        k = rotate_back(window.k.float(), *(x[:, None] for x in mean))
        scaling = stats.scaling[:, None, None]
        z = scaling * torch.einsum("hrd,hnd->hrn", stats.mean, k)
        spread = torch.einsum("hrdk,hnd->hrnk", stats.factor, k).square().sum(-1)
        spread += torch.einsum("hrd,hnd->hrn", stats.diagonal, k.square())
        z += scaling.square() / 2 * spread
        return expected_shares(z, window)


def expected_shares(z: torch.Tensor, window: Window) -> torch.Tensor:
    """[H, W]: expected logits z [H, r, W] to scores; sinks have no part in the softmax."""
    z[..., : window.sinks] = -torch.inf
    return z.softmax(dim=-1).mean(dim=1) * window.v.float().norm(dim=-1)
