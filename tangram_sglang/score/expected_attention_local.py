"""Expected Attention with statistics of the window's own queries (arXiv 2510.00636, as published).

There to be compared with ``expected_attention``, whose calibrated statistics need no queries.
"""

from typing import ClassVar

import torch

from tangram_sglang.score.base import Window
from tangram_sglang.score.expected_attention import HORIZON, expected_shares
from tangram_sglang.score.rotation import mean_rotation, rotate_back


class ExpectedAttentionLocal:
    """The score of ``expected_attention``; mu and Sigma are those of the window's W queries.

    As kvpress' ``ExpectedAttentionPress``: queries at sinks are left out of the statistics, Sigma
    divides by their number, and the mean rotation is that of the 512 positions behind the window.
    Unlike it, a is the model's own scaling, and only the first window has sinks.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"q_window", "rope"})

    def q_window(self, window: int) -> int:
        return window

    def score(self, window: Window) -> torch.Tensor:
        end = window.start + window.k.shape[1]
        place = torch.arange(window.start, end, dtype=torch.float64, device=window.k.device)
        angle = place[:, None] * window.inv_freq[:, None, None]
        q = rotate_back(window.q.float(), angle.cos().float(), angle.sin().float())
        # in a window of nothing but sinks any statistics do: all of it is kept
        q = q[:, :, min(window.sinks, q.shape[2] - 1) :]
        mean = q.mean(dim=2)
        centred = q - mean[:, :, None]
        rotation = mean_rotation(window.inv_freq, end, HORIZON)
        k = rotate_back(window.k.float(), *(x[:, None] for x in rotation))
        scaling = window.scaling[:, None, None]
        z = scaling * torch.einsum("hrd,hnd->hrn", mean, k)
        spread = torch.einsum("hrqd,hrqe->hrde", centred, centred) / q.shape[2]
        z += scaling.square() / 2 * torch.einsum("hnd,hrde,hne->hrn", k, spread, k)
        return expected_shares(z, window)
