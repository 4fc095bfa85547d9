"""The scorers once more, one head at a time, from their formulas; and the choice of the top K.

Every scorer is called as ``scorer(k, v, start, sinks, head, stats)``: k and v [W, D] of one head, k
after RoPE; ``start`` the position of the first token; ``sinks`` the leading tokens kept anyway;
``head`` the index in global head order; ``stats`` the query statistics of all heads, or None. It
returns [W] fp32, higher is kept. Sums are taken in fp64, so the fp32 result is the nearest one.
"""

import torch

from tangram_sglang.score import Window, create_scorer

# positions after a window over which expected_attention averages the rotation of queries
HORIZON = 512


def keydiff(k, v, start, sinks, head, stats):
    """s_j = -cos(k_j, mean_i k_i / |k_i|)."""
    k = k.double()
    norms = k.norm(dim=1)
    anchor = (k / norms[:, None]).mean(dim=0)
    return (-(k @ anchor) / (norms * anchor.norm())).float()


def streaming(k, v, start, sinks, head, stats):
    """s_j = j."""
    return torch.tensor([float(j) for j in range(len(k))])


def random(k, v, start, sinks, head, stats):
    """Taken from the package: a hash has no second formula."""
    window = Window(k[None], v[None], start, torch.tensor([head]), sinks, None)
    return create_scorer("random").score(window)[0]


def expected_attention(k, v, start, sinks, head, stats):
    """s_j = |v_j| * mean over query heads of softmax_j(a m.k_j + a^2/2 k_j.C.k_j).

    m and C are the mean and covariance of queries after RoPE: those before RoPE, turned by the
    mean rotation of the ``HORIZON`` positions that follow the window. Sinks have no part in the
    softmax and score 0.
    """
    k, v = k.double(), v.double()
    end = start + len(k)
    rotation = mean_rotation(stats.inv_freq[head], end, k.shape[1])
    a = float(stats.scaling[head])
    shares = []
    for r in range(stats.mean.shape[1]):
        mean = stats.mean[head, r].double()
        factor = stats.factor[head, r].double()
        covariance = factor @ factor.T + torch.diag(stats.diagonal[head, r].double())
        m = rotation @ mean
        c = rotation @ covariance @ rotation.T
        z = a * (k @ m) + a**2 / 2 * torch.einsum("jd,de,je->j", k, c, k)
        share = torch.zeros(len(k), dtype=torch.float64)
        share[sinks:] = z[sinks:].softmax(dim=0)
        shares.append(share)
    return (torch.stack(shares).mean(dim=0) * v.norm(dim=1)).float()


def mean_rotation(inv_freq, end, head_dim):
    """Mean over positions t = end .. end + HORIZON - 1 of the matrix R_t with RoPE(x, t) = R_t x.

    Dim i pairs with dim i + half, half the number of frequencies; dims past 2 half stay.
    """
    half = len(inv_freq)
    t = torch.arange(end, end + HORIZON, dtype=torch.float64)
    rotation = torch.eye(head_dim, dtype=torch.float64)
    for i, frequency in enumerate(inv_freq.double()):
        cos, sin = (t * frequency).cos().mean(), (t * frequency).sin().mean()
        rotation[i, i] = cos
        rotation[i, i + half] = -sin
        rotation[i + half, i] = sin
        rotation[i + half, i + half] = cos
    return rotation


SCORERS = {
    "expected_attention": expected_attention,
    "keydiff": keydiff,
    "random": random,
    "streaming": streaming,
}


def select(scores: torch.Tensor, kept: int, sinks: int) -> list[int]:
    """The ``kept`` tokens that stay: sinks, then by score, ties to the lower index; ascending."""
    values = scores.tolist()
    if any(value != value for value in values):
        raise ValueError("a score is NaN")
    others = sorted(range(sinks, len(values)), key=lambda j: (-values[j], j))
    return sorted([*range(sinks), *others][:kept])
