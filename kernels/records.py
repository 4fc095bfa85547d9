"""Integer records that tell the prefill kernels what a step does; host side, NumPy only.

All of them are known on the host before the step runs. They reach the device packed into one
pinned, non-blocking copy (``upload.py``) and are shared by every layer.

A step's token t of a row lies in one of two places: tokens before ``n0`` in the row's old raw
pages, tokens from ``n0`` on in the step's own K and V. ``Piece.old`` lists the old pages by id,
because the row's ring in the page table may already name the pages of the step's new tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tangram_sglang.plan.window import WindowRule

TILE_FIELDS = 12
UNIT_FIELDS = 8
SPAN_FIELDS = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """What one row computes in a step.

    Attributes:
        row: row of the page table.
        n0, n1: tokens stored before and after the step.
        floor: windows that even its first query sees sealed.
        first: index of its token n0 in the step's packed q, k and v.
        old: start of its old raw pages in the list of all old pages, laid out [groups, pages] over
            the groups of one kind.
        old_pages: old raw pages in each group.
        old_first: position of the first token of the first old page.
        queries: start, in the same list, of the pages of queries of the windows from its first
            unsealed one on; of those that the step seals and found begun.
        query_pages: pages of one window's queries.
    """

    row: int
    n0: int
    n1: int
    floor: int
    first: int
    old: int
    old_pages: int
    old_first: int
    queries: int = 0
    query_pages: int = 0


def prefill_tiles(
    pieces: Sequence[Piece],
    rule: WindowRule,
    size: int,
    sliding_window: int | None = None,
    kept: float = 0.0,
) -> np.ndarray:
    """Query tiles of one kind of layers, the most expensive ones first.

    A tile holds consecutive tokens of one row in one epoch, so all its queries see the same sealed
    windows and the same first raw token.

    Args:
        size: tokens per tile.
        sliding_window: tokens a query sees, or None for full attention.
        kept: mean entries of a sealed window, for the order.

    Returns:
        [tiles, TILE_FIELDS] int32: row, first, tokens, position, n_win, raw_start, n0, piece
        first, old, old_pages, old_first, 0.
    """
    tiles = []
    for piece in pieces:
        position = piece.n0
        while position < piece.n1:
            if sliding_window is None:
                epoch = rule.sealed(position + 1, piece.floor)
                end = min(piece.n1, rule.epoch_end(epoch, piece.floor))
            else:
                epoch, end = 0, piece.n1
            start = np.arange(position, end, size, dtype=np.int32)
            cut = np.zeros((len(start), TILE_FIELDS), dtype=np.int32)
            cut[:, 0] = piece.row
            cut[:, 1] = piece.first + start - piece.n0
            cut[:, 2] = np.minimum(size, end - start)
            cut[:, 3] = start
            cut[:, 4] = epoch
            if sliding_window is None:
                cut[:, 5] = epoch * rule.window
            else:
                cut[:, 5] = np.maximum(0, start - sliding_window + 1)
            cut[:, 6] = piece.n0
            cut[:, 7] = piece.first
            cut[:, 8:11] = piece.old, piece.old_pages, piece.old_first
            tiles.append(cut)
            position = end
    if not tiles:
        return np.zeros((0, TILE_FIELDS), dtype=np.int32)
    tiles = np.concatenate(tiles)
    cost = tiles[:, 4] * kept + tiles[:, 3] + tiles[:, 2] - tiles[:, 5]
    return tiles[np.argsort(-cost, kind="stable")]


def seal_units(pieces: Sequence[Piece], rule: WindowRule) -> np.ndarray:
    """Windows that the step seals.

    Returns:
        [units, UNIT_FIELDS] int32: row, window, n0, piece first, old, old_pages, old_first, first page
        of the window's queries in the list of old pages (anything, if all of them are the step's own).
    """
    units = []
    for p in pieces:
        s0, s1 = rule.sealed(p.n0, p.floor), rule.sealed(p.n1, p.floor)
        units += [
            (p.row, window, p.n0, p.first, p.old, p.old_pages, p.old_first,
             p.queries + (window - s0) * p.query_pages)
            for window in range(s0, s1)
        ]  # fmt: skip
    return np.array(units, dtype=np.int32).reshape(-1, UNIT_FIELDS)


def raw_spans(pieces: Sequence[Piece], starts: Sequence[int], size: int) -> np.ndarray:
    """New tokens that stay raw after the step, in blocks of ``size``.

    Args:
        starts: per piece, its first raw token after the step (``KVLayout.tail_start``).

    Returns:
        [spans, SPAN_FIELDS] int32: row, position, tokens, index in the step's k and v.
    """
    spans = [
        (p.row, t, min(size, p.n1 - t), p.first + t - p.n0)
        for p, start in zip(pieces, starts, strict=True)
        for t in range(max(p.n0, start), p.n1, size)
    ]
    return np.array(spans, dtype=np.int32).reshape(-1, SPAN_FIELDS)
