"""Which requests of a decode step read windows together: those behind the same cached prefix.

    row 3   [ windows a b c d )[ e f ...        three readers of windows 0..4,
    row 7   [ windows a b c d )[ g ...          each of which reads the rest of its own alone
    row 5   [ windows a b c d )[ ...

The host knows it from the page table. It is found once for a batch and holds until rows come or go,
since what a row shares changes with its prefill only.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from tangram_sglang.kernels.dispatch import OVERHEAD
from tangram_sglang.kernels.shared_prefix import alone, read_together
from tangram_sglang.pool.row import Step
from tangram_sglang.pool.rows import Rows


class SharedReads:
    """Records for the kernels (``kernels/shared_prefix.py``).

    Args:
        rows: of the page table.
        readers: R, most that read together.
        heads: KV heads of a layer.
        window_pages: pages of a sealed window in one layer, all heads, on average.
    """

    def __init__(self, rows: Rows, readers: int, heads: int, window_pages: float):
        self._rows = rows
        self._readers = readers
        # a piece more for each head costs as much as so many windows read twice
        self._least = heads * OVERHEAD / max(1.0, window_pages)
        self._key: tuple = ()
        self._found: list[tuple[list[int], int]] = []

    def of(self, steps: Sequence[Step], batch: int) -> np.ndarray:
        """[batch, 3 + R] int32; requests behind the last step are padding."""
        records = alone(batch, self._readers)
        if self._readers == 1:
            return records
        # what a row has from the cache changes with this count
        key = (self._rows.prefixes, *(step.row for step in steps))
        if key != self._key:
            self._key, self._found = key, list(self._together([step.row for step in steps]))
        for requests, windows in self._found:
            read_together(records, requests, windows)
        return records

    def _together(self, rows: list[int]) -> Iterator[tuple[list[int], int]]:
        for requests, windows in runs([self._rows.cached_path(row) for row in rows], self._readers):
            if (len(requests) - 1) * windows > self._least:
                yield requests, windows


def runs(paths: Sequence[np.ndarray], most: int) -> Iterator[tuple[list[int], int]]:
    """Requests that begin alike, at most ``most`` together, and how many windows they have in common.

    Greedy over the requests in the order of their paths, in which neighbours have most in common: one
    joins those before it if that saves more reads than they save without it.

    Args:
        paths: one number for each window of each request's prefix; equal where the window is.
    """
    requests, common = [], 0
    for b in sorted(
        (b for b, path in enumerate(paths) if len(path)), key=lambda b: bytes(paths[b])
    ):
        if 0 < len(requests) < most:
            same = min(common, equal_windows(paths[requests[-1]], paths[b]))
            if len(requests) * same > (len(requests) - 1) * common:
                requests, common = [*requests, b], same
                continue
        if len(requests) > 1:
            yield requests, common
        requests, common = [b], len(paths[b])
    if len(requests) > 1:
        yield requests, common


def equal_windows(a: np.ndarray, b: np.ndarray) -> int:
    """Windows at the beginning that are the same."""
    shorter = min(len(a), len(b))
    if a[0] != b[0]:
        return 0
    different = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(different[0]) if len(different) else shorter
