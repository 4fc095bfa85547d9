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
    head, length, gain = _hull_pieces(curves.astype(np.float64), kept)
    # stable: of equal gains the head that comes first is served first, on every machine alike
    order = np.argsort(-gain, kind="stable")
    budgets = np.full(len(curves), kept[0])
    left = retention * len(curves) - budgets.sum()
    taken = np.clip(left - (np.cumsum(length[order]) - length[order]), 0, length[order])
    np.add.at(budgets, head[order], taken)
    return np.minimum(budgets, 1.0)


def _hull_pieces(curves: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The lower convex hulls' straight pieces: whose, how long, and how much error falls on them.

    Pieces of one head come in their order along x, all heads' first ones first.
    """
    heads, last = np.arange(len(curves)), len(x) - 1
    at = np.zeros(len(curves), dtype=int)
    pieces = []
    while (open_ := at < last).any():
        y0, x0 = curves[heads, at][:, None], x[at][:, None]
        behind = np.arange(len(x)) > at[:, None]
        slope = np.where(behind, curves - y0, np.inf) / np.where(behind, x - x0, 1.0)
        # of equal slopes the farthest point, so that a straight line is one piece
        to = last - np.argmin(slope[:, ::-1], axis=1)
        to = np.where(open_, to, at)
        pieces.append((heads[open_], (x[to] - x[at])[open_], -slope[heads, to][open_]))
        at = to
    if not pieces:
        return np.empty(0, int), np.empty(0), np.empty(0)
    head, length, gain = (np.concatenate(part) for part in zip(*pieces, strict=True))
    return head, length, gain
