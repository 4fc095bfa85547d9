"""Who owns each page. Host side only: knows no device, no tokens and no tables.

Page 0 is the dummy that padded rows write to; it is never handed out. Every other page is free,
private to one request row (a row id above 0) or owned by one node of the prefix cache (an id
below 0).
"""

import numpy as np

FREE = 0


class Ledger:
    """Free list and owner of ``num_pages`` pages with ids 1..num_pages."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._owner = np.zeros(num_pages + 1, dtype=np.int64)
        self._stack = np.empty(num_pages, dtype=np.int32)
        self.clear()

    def clear(self) -> None:
        """Take every page back."""
        self._owner[:] = FREE
        # the lowest ids lie on top, so that a small load touches a small part of the pool
        self._stack[:] = np.arange(self.num_pages, 0, -1, dtype=np.int32)
        self.free = self.num_pages

    def take(self, count: int, row: int) -> np.ndarray:
        """Hand ``count`` pages to ``row``.

        Returns:
            Page ids, [count] int32; the caller owns the array.

        Raises:
            RuntimeError: fewer pages are free. Admission reserves before it admits, so this is a
                broken invariant and never the user's doing.
        """
        if count > self.free:
            raise RuntimeError(f"row {row} takes {count} pages but {self.free} are free")
        pages = self._stack[self.free - count : self.free][::-1].copy()
        self.free -= count
        self._owner[pages] = row
        return pages

    def hand_over(self, pages: np.ndarray, owner: int, to: int) -> None:
        """Change the owner of ``pages``; their content stays where it is."""
        self._require(pages, owner)
        self._owner[pages] = to

    def give(self, pages: np.ndarray, owner: int, last: bool = False) -> None:
        """Take ``pages`` back from ``owner``, who must own each of them.

        Args:
            last: hand them out again after all that are free now.
        """
        self._require(pages, owner)
        self._owner[pages] = FREE
        start = 0 if last else self.free
        if last:
            self._stack[len(pages) : len(pages) + self.free] = self._stack[: self.free].copy()
        self._stack[start : start + len(pages)] = pages
        self.free += len(pages)

    def owned(self, owner: int) -> np.ndarray:
        """Pages of ``owner`` in ascending order; scans the pool, for checks only."""
        return np.flatnonzero(self._owner[1:] == owner) + 1

    def check(self) -> None:
        """free + private + cached == total, and no page twice; RuntimeError if not."""
        stacked = self._stack[: self.free]
        private, cached = int((self._owner > FREE).sum()), int((self._owner < FREE).sum())
        if len(np.unique(stacked)) != self.free or (self._owner[stacked] != FREE).any():
            raise RuntimeError("a page is on the free list twice, or free and owned at once")
        if self.free + private + cached != self.num_pages:
            raise RuntimeError(
                f"free {self.free} + private {private} + cached {cached} != total "
                f"{self.num_pages} pages"
            )

    def _require(self, pages: np.ndarray, owner: int) -> None:
        owners = self._owner[pages]
        if (owners != owner).any():
            wrong = pages[owners != owner][:8].tolist()
            raise RuntimeError(f"owner {owner} gives away pages it does not own: {wrong}")
        if len(np.unique(pages)) != len(pages):
            raise RuntimeError(f"owner {owner} gives a page away twice")
