"""From samples of shares to budgets: B = min(1, mean + alpha * spread) per head (paper 4.1)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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


def head_budgets(profiles: Sequence[np.ndarray], alpha: float) -> Budgets:
    """Budgets from the samples of one or several profiles.

    Several profiles are averaged as budgets, each with its own spread, so that a profile with
    noisier shares gets more room and not more weight.

    Args:
        profiles: for each profile the shares of its windows, [N, H]; N may differ.
        alpha: room above the mean in standard deviations.
    """
    means = [shares.mean(axis=0) for shares in profiles]
    spreads = [_spread(shares) for shares in profiles]
    budgets = [np.minimum(1.0, m + alpha * s) for m, s in zip(means, spreads, strict=True)]
    return Budgets(
        np.mean(budgets, axis=0), np.mean(spreads, axis=0), min(len(x) for x in profiles)
    )


def _spread(shares: np.ndarray) -> np.ndarray:
    return shares.std(axis=0, ddof=1) if len(shares) > 1 else np.zeros(shares.shape[1])
