"""What each row of a step does, as the records that the prefill and sealing kernels read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tangram_sglang.kernels.records import Piece
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.pool.row import Step


@dataclass(frozen=True, slots=True)
class StepPieces:
    """Pieces of a step, by kind of groups.

    Attributes:
        pieces: per kind, one piece a row, in the order of the batch.
        old: [N] int32, pages of the raw tails before the step, and of the queries of windows that it
            seals; pieces point into it.
        copies: [M, 2] int32, pages to copy before anything is written: an old page that the step
            gives away and writes to, and the spare page that ``old`` names for it.
    """

    pieces: tuple[list[Piece], ...]
    old: np.ndarray
    copies: np.ndarray


def step_pieces(
    layout: KVLayout, steps: Sequence[Step], taken: np.ndarray, spare: range
) -> StepPieces:
    """Pieces of granted steps.

    Args:
        steps: one a row, in the order of the batch.
        taken: pages that the step handed out.
        spare: ids of the pool's spare pages.
    """
    pieces: tuple[list[Piece], ...] = tuple([] for _ in layout.kinds)
    lists, length, first = [], 0, 0
    for step in steps:
        queries = length
        lists += step.queries
        length += sum(map(len, step.queries))
        for i, kind in enumerate(layout.kinds):
            pages = step.tail[i] if step.tail else np.empty((kind.end - kind.first, 0), np.int32)
            start = layout.tail_start(kind.sliding_window, step.n0, step.floor)
            pieces[i].append(
                Piece(
                    step.row,
                    step.n0,
                    step.n1,
                    step.floor,
                    first,
                    length,
                    pages.shape[1],
                    start,
                    queries,
                    layout.queries.pages,
                )
            )
            lists.append(pages.ravel())
            length += pages.size
        first += step.n1 - step.n0
    old = np.concatenate(lists) if lists else np.empty(0, np.int32)
    return StepPieces(pieces, *_spared(old, taken, spare))


def _spared(old: np.ndarray, taken: np.ndarray, spare: range) -> tuple[np.ndarray, np.ndarray]:
    """``old`` with spare pages for those in ``taken``, and the copies that takes."""
    if not len(old):
        return old, np.empty((0, 2), dtype=np.int32)
    # tables by page id: ``old`` is long where prompts are held whole, and sorting it takes longer
    read = np.zeros(max(old.max(), taken.max(initial=0)) + 1, dtype=bool)
    read[old] = True
    lost = taken[read[taken]]
    if len(lost) > len(spare):
        raise RuntimeError(
            f"a step overwrites {len(lost)} pages that it still reads, the pool has "
            f"{len(spare)} spare ones"
        )
    copies = np.stack([lost, np.arange(spare.start, spare.start + len(lost))], axis=1)
    if len(lost):
        place = np.arange(len(read), dtype=np.int32)
        place[lost] = copies[:, 1]
        old = place[old]
    return old, copies.astype(np.int32)
