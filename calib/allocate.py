"""Budgets that minimise the summed error at a mean retention, from one error curve per head.

A head's curve is replaced by its lower convex hull; then handing out room where it lowers the error
most is exact. Pure numpy.
"""

from collections.abc import Sequence

import numpy as np


def allocate(
    curves: np.ndarray, kept: Sequence[float], retention: float, layer_heads: Sequence[int] | None
) -> np.ndarray:
    """Share of a window for every head, [H]; their mean is ``retention``.

    Args:
        curves: [H, G], error when ``kept`` of a window is kept.
        kept: [G], ascending shares; the first is the least that a head gets, the last is 1.
        retention: mean share; at least ``kept[0]``, else every head gets that.
        layer_heads: heads of each layer, to meet the mean in each layer; None: over all heads.
    """
    if layer_heads is None:
        return _allocate(curves, np.asarray(kept), retention)
    cuts = np.split(curves, np.cumsum(layer_heads)[:-1])
    return np.concatenate([_allocate(cut, np.asarray(kept), retention) for cut in cuts])


def _allocate(curves: np.ndarray, kept: np.ndarray, retention: float) -> np.ndarray:
    heads, gains, lengths = [], [], []
    for head, curve in enumerate(curves):
        corner = lower_hull(kept, curve)
        length = np.diff(kept[corner])
        heads.append(np.full(len(length), head))
        lengths.append(length)
        gains.append(-np.diff(curve[corner]) / length)
    head, gain, length = map(np.concatenate, (heads, gains, lengths))
    # stable: of equal gains the head that comes first is served first, on every machine alike
    order = np.argsort(-gain, kind="stable")
    budgets = np.full(len(curves), kept[0])
    left = retention * len(curves) - budgets.sum()
    taken = np.clip(left - (np.cumsum(length[order]) - length[order]), 0, length[order])
    np.add.at(budgets, head[order], taken)
    return np.minimum(budgets, 1.0)


def lower_hull(x: np.ndarray, y: np.ndarray) -> list[int]:
    """Indices of the points of the lower convex hull of (x, y), x ascending; ends included."""
    hull: list[int] = []
    for i in range(len(x)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(i)
    return hull
