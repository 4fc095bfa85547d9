"""The scorers once more, one head at a time, from their formulas; and the choice of the top K.

Every scorer is called as ``scorer(k, v, start, sinks, head, stats, asked)``: k and v [W, D] of one
head, k after RoPE; ``start`` the position of the first token; ``sinks`` the leading tokens kept
anyway; ``head`` the index in global head order; ``stats`` the query statistics of all heads, or None;
``asked`` the window's own queries. It returns [W] fp32, higher is kept. Sums are taken in fp64, so
the fp32 result is the nearest one.
"""

import math
from typing import NamedTuple

import torch

from tangram_sglang.score import Window, create_scorer

# positions after a window over which expected_attention averages the rotation of queries
HORIZON = 512


class Asked(NamedTuple):
    """Queries of every token of a window, by the query heads of one KV head.

    Attributes:
        q: [r, W, D], after RoPE.
        scaling: factor on q.k.
        inv_freq: [rotary_dim / 2], radians per position.
        hidden: [W, hidden], what entered the projection of each token.
        gate: weights of the head's gate by name, if there are gates.
    """

    q: torch.Tensor
    scaling: float
    inv_freq: torch.Tensor
    hidden: torch.Tensor | None = None
    gate: dict[str, torch.Tensor] | None = None


def keydiff(k, v, start, sinks, head, stats, asked=None):
    """s_j = -cos(k_j, mean_i k_i / |k_i|)."""
    k = k.double()
    norms = k.norm(dim=1)
    anchor = (k / norms[:, None]).mean(dim=0)
    return (-(k @ anchor) / (norms * anchor.norm())).float()


def streaming(k, v, start, sinks, head, stats, asked=None):
    """s_j = j."""
    return torch.tensor([float(j) for j in range(len(k))])


def random(k, v, start, sinks, head, stats, asked=None):
    """Taken from the package: a hash has no second formula."""
    window = Window(k[None], v[None], start, torch.tensor([head]), sinks, None)
    return create_scorer("random").score(window)[0]


def knorm(k, v, start, sinks, head, stats, asked=None):
    """s_j = -|k_j|."""
    return -k.double().norm(dim=1).float()


def snapkv(k, v, start, sinks, head, stats, asked=None):
    """Attention from the last w queries, averaged, then over 5 neighbours, then over query heads.

    w is 32, but no more than a quarter of the window. Tokens past the window's edge count as 0.
    Those w tokens are above all others, the newest on top.
    """
    size = len(k)
    w = max(1, min(32, size // 4))
    rows = []
    for q in asked.q:
        mean = sum(_attention(q[t], k[: t + 1], asked.scaling, size) for t in range(size - w, size))
        mean = (mean / w)[: size - w]
        padded = [0.0, 0.0, *mean.tolist(), 0.0, 0.0]
        rows.append([sum(padded[j : j + 5]) / 5 for j in range(size - w)])
    return _asking_on_top(torch.tensor(rows, dtype=torch.float64).mean(dim=0), w)


def tova(k, v, start, sinks, head, stats, asked=None):
    """Attention from the last query, averaged over query heads; the last token is above all."""
    rows = [_attention(q[-1], k, asked.scaling, len(k))[:-1] for q in asked.q]
    return _asking_on_top(torch.stack(rows).mean(dim=0), 1)


def _attention(q, k, scaling, size):
    """What one query pays to the keys up to its own, [size] with zeros behind them."""
    weights = (k.double() @ q.double() * scaling).softmax(dim=0)
    return torch.cat([weights, torch.zeros(size - len(k), dtype=torch.float64)])


def _asking_on_top(scores, w):
    top = float(scores.max()) if len(scores) else 0.0
    return torch.tensor([*scores.tolist(), *(top + 1 + i for i in range(w))])


def expected_attention(k, v, start, sinks, head, stats, asked=None):
    """s_j = |v_j| * mean over query heads of softmax_j(a m.k_j + a^2/2 k_j.C.k_j).

    m and C are the mean and covariance of queries after RoPE: those before RoPE, turned by the
    mean rotation of the ``HORIZON`` positions that follow the window. Sinks have no part in the
    softmax and score 0.
    """
    moments = []
    for r in range(stats.mean.shape[1]):
        factor = stats.factor[head, r].double()
        covariance = factor @ factor.T + torch.diag(stats.diagonal[head, r].double())
        moments.append((stats.mean[head, r].double(), covariance))
    return _expected(k, v, start, sinks, moments, stats.inv_freq[head], float(stats.scaling[head]))


def expected_attention_local(k, v, start, sinks, head, stats, asked=None):
    """The same with mean and covariance of the window's own queries, sinks' left out."""
    moments = []
    for q in asked.q.double():
        turned = [
            rotation(asked.inv_freq, start + t, start + t + 1, q.shape[1]).T @ q[t]
            for t in range(sinks, len(q))
        ]
        before = torch.stack(turned)
        moments.append((before.mean(dim=0), before.T.cov(correction=0)))
    return _expected(k, v, start, sinks, moments, asked.inv_freq, asked.scaling)


def _expected(k, v, start, sinks, moments, inv_freq, a):
    k, v = k.double(), v.double()
    end = start + len(k)
    turn = rotation(inv_freq, end, end + HORIZON, k.shape[1])
    shares = []
    for mean, covariance in moments:
        m = turn @ mean
        c = turn @ covariance @ turn.T
        z = a * (k @ m) + a**2 / 2 * torch.einsum("jd,de,je->j", k, c, k)
        share = torch.zeros(len(k), dtype=torch.float64)
        share[sinks:] = z[sinks:].softmax(dim=0)
        shares.append(share)
    return (torch.stack(shares).mean(dim=0) * v.norm(dim=1)).float()


def fastkvzip(k, v, start, sinks, head, stats, asked=None):
    """s_j = mean over query heads g of e^l / (e^l + sum over sinks s of e^(q.sink_s / sqrt d)).

    l = q.k / sqrt d + bias of g, where q and k are two projections of the token's own hidden state,
    divided by their root mean square and multiplied by the norms' weights. Rounded to 11 bits.
    """
    gate = {name: x.double() for name, x in asked.gate.items()}
    hidden, root = asked.hidden.double(), gate["k"].shape[0] ** 0.5

    def normed(x, weight):
        return x / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * weight

    key = normed(hidden @ gate["k"].T, gate["k_norm"])
    shares = []
    for g in range(len(gate["q"])):
        query = normed(hidden @ gate["q"][g].T, gate["q_norm"])
        own = ((query * key).sum(dim=1) / root + gate["bias"][g]).exp()
        others = sum((query @ sink / root).exp() for sink in gate["sinks"])
        shares.append(own / (own + others))
    scores = (sum(shares) / len(shares)).tolist()
    grids = [2.0 ** (math.floor(math.log2(s)) - 10) for s in scores]
    return torch.tensor([round(s / grid) * grid for s, grid in zip(scores, grids, strict=True)])


def rotation(inv_freq, start, end, head_dim):
    """Mean over positions t = start .. end - 1 of the matrix R_t with RoPE(x, t) = R_t x.

    Dim i pairs with dim i + half, half the number of frequencies; dims past 2 half stay.
    """
    half = len(inv_freq)
    t = torch.arange(start, end, dtype=torch.float64)
    matrix = torch.eye(head_dim, dtype=torch.float64)
    for i, frequency in enumerate(inv_freq.double()):
        cos, sin = (t * frequency).cos().mean(), (t * frequency).sin().mean()
        matrix[i, i] = cos
        matrix[i, i + half] = -sin
        matrix[i + half, i] = sin
        matrix[i + half, i + half] = cos
    return matrix


SCORERS = {
    "expected_attention": expected_attention,
    "expected_attention_local": expected_attention_local,
    "fastkvzip": fastkvzip,
    "keydiff": keydiff,
    "knorm": knorm,
    "random": random,
    "snapkv": snapkv,
    "streaming": streaming,
    "tova": tova,
}


def select(scores: torch.Tensor, kept: int, sinks: int) -> list[int]:
    """The ``kept`` tokens that stay: sinks, then by score, ties to the lower index; ascending."""
    values = scores.tolist()
    if any(value != value for value in values):
        raise ValueError("a score is NaN")
    others = sorted(range(sinks, len(values)), key=lambda j: (-values[j], j))
    return sorted([*range(sinks), *others][:kept])
