"""From the scores of one window to the share of it that each head gets.

Pure numpy; knows neither models nor scorers.
"""

from collections.abc import Sequence

import numpy as np

SCOPES = ("global", "layer")


def window_shares(
    scores: np.ndarray, retentions: Sequence[float], layer_heads: Sequence[int]
) -> dict[str, np.ndarray]:
    """Shares when the top ``rho`` of all tokens of all heads is taken, by scope.

    Args:
        scores: [H, W], higher is kept; ties go to the head and token that come first.
        retentions: every rho to take.
        layer_heads: heads of each layer, in the order of the first axis of ``scores``.

    Returns:
        For each of ``SCOPES`` the shares, [len(retentions), H]; their mean over heads is rho.
    """
    cuts = np.split(scores, np.cumsum(layer_heads)[:-1])
    layers = [_shares(cut, retentions) for cut in cuts]
    return {"global": _shares(scores, retentions), "layer": np.concatenate(layers, axis=1)}


def _shares(scores: np.ndarray, retentions: Sequence[float]) -> np.ndarray:
    heads, window = scores.shape
    owner = np.argsort(-scores.ravel(), kind="stable") // window
    taken = [round(rho * scores.size) for rho in retentions]
    return np.stack([np.bincount(owner[:n], minlength=heads) for n in taken]) / window
