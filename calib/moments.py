"""Mean and covariance of the queries before RoPE, accumulated in fp64 over a whole run."""

import torch

from tangram_sglang.score.rotation import rotate_back


class QueryMoments:
    """Sums over the queries of one layer.

    Attributes:
        count: queries summed.
        total: [HQ, D] fp64.
        square: [HQ, D, D] fp64, sum of outer products.
    """

    def __init__(self, q_heads: int, head_dim: int):
        self.count = 0
        self.total = torch.zeros(q_heads, head_dim, dtype=torch.float64)
        self.square = torch.zeros(q_heads, head_dim, head_dim, dtype=torch.float64)

    def add(self, q: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> None:
        """Add queries after RoPE, [T, HQ, D], at ``positions`` [T] int64."""
        rows = unrotate(q, positions, inv_freq).transpose(0, 1)
        self.count += q.shape[0]
        self.total += rows.sum(dim=1).cpu()
        self.square += (rows.transpose(1, 2) @ rows).cpu()


def unrotate(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Take RoPE off ``x`` [T, H, D] in fp64; pairs are (i, i + rotary_dim / 2)."""
    inv_freq = inv_freq.to(x.device, torch.float64)
    angle = positions.to(torch.float64)[:, None, None] * inv_freq
    return rotate_back(x.to(torch.float64), angle.cos(), angle.sin())
