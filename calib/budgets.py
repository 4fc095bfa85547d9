"""From samples to budgets of one profile, and the mean of several (paper 4.1).

A profile of shares gives B = min(1, mean + alpha * spread) per head; error curves give the budgets
that minimise the summed error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tangram_sglang.calib.allocate import allocate


@dataclass(frozen=True, slots=True)
class Budgets:
    """Budgets of all heads, as a plan file holds them.

    Attributes:
        budgets: [H], in (0, 1].
        spread: [H], standard deviation of each head's share over the samples.
        samples: windows measured.
    """

    budgets: np.ndarray
    spread: np.ndarray
    samples: int


def share_budgets(shares: np.ndarray, alpha: float) -> Budgets:
    """Budgets from shares, [N, H]."""
    spread = shares.std(axis=0, ddof=1) if len(shares) > 1 else np.zeros(shares.shape[1])
    return Budgets(np.minimum(1.0, shares.mean(axis=0) + alpha * spread), spread, len(shares))


def error_budgets(
    curves: np.ndarray,
    kept: Sequence[float],
    retention: float,
    shares: np.ndarray,
    layer_heads: Sequence[int] | None = None,
) -> Budgets:
    """Budgets with little error: half way from what is best for all windows to what is for each.

    The first minimises the windows' summed error, but jumps between corners of the curves' hulls, so
    that two halves of the texts agree less about it; the second is the mean of each window's optimum.
    README.md beside this file has what either and their mean do to KL.

    Args:
        curves: [N, H, G], error when ``kept`` [G] of a window is kept.
        kept, retention, layer_heads: as ``allocate`` takes them.
        shares: [N, H], what is best for each window alone. Their spread has no part in the budgets:
            room above the mean is what the curves themselves weigh.
    """
    best = allocate(curves.mean(axis=0), kept, retention, layer_heads)
    each = share_budgets(shares, 0.0)
    return Budgets((best + each.budgets) / 2, each.spread, len(curves))


def relative_errors(
    curves: np.ndarray, power: np.ndarray, layer_heads: Sequence[int]
) -> np.ndarray:
    """Curves [N, H, G] relative to what attention has added to the residual stream so far.

    The stream grows from layer to layer (by three orders of magnitude in SmolLM2) and the next norm
    divides by it, so the same error does the less harm the later it is made.

    Args:
        power: [N, H], of each head's undisturbed output in the measure of the curves.
        layer_heads: heads of each layer.
    """
    ends = np.cumsum(layer_heads)
    upto = np.cumsum(power, axis=1)[:, ends - 1]
    return curves / np.repeat(upto, layer_heads, axis=1)[..., None]


def average(found: Sequence[Budgets]) -> Budgets:
    """The mean of several profiles' budgets.

    Each has its own spread in it already, so that a profile with noisier shares gets more room and
    not more weight.
    """
    return Budgets(
        np.mean([x.budgets for x in found], axis=0),
        np.mean([x.spread for x in found], axis=0),
        min(x.samples for x in found),
    )


def held(budgets: np.ndarray, retention: float) -> np.ndarray:
    """Budgets scaled by one factor and capped at 1 so that their mean is ``retention``."""
    low, high = 0.0, 1.0 / max(float(budgets.min()), 1e-6)
    for _ in range(60):
        middle = (low + high) / 2
        if np.minimum(1.0, middle * budgets).mean() <= retention:
            low = middle
        else:
            high = middle
    return np.minimum(1.0, low * budgets)
