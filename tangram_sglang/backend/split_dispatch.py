"""The split maps of every batch size, made before serving, and the workspace they share."""

import numpy as np
import torch

from tangram_sglang.kernels.dispatch import Dispatch
from tangram_sglang.kernels.layer_tables import LayerTables
from tangram_sglang.kernels.occupancy import resident_programs
from tangram_sglang.kernels.shared_prefix import most_readers
from tangram_sglang.kernels.workspace import Workspace
from tangram_sglang.plan.split_map import SplitMap, equal_splits, plan_splits

# maps kept of batches that no graph was captured for
EAGER = 8


class SplitDispatch:
    """Split maps by batch size.

    A captured graph goes on using the map and the workspace of its batch size, so both are kept
    for good. Batches that no graph was captured for get theirs on first use; only the last few are
    kept, since a map takes a megabyte and more, and there may be thousands of sizes.

    Args:
        tables: where heads lie and what they keep.
        pool: [pages, H_p, 2, P, D].
        ratio: query heads per KV head.
        most: requests that may ever run at once.
        equal: give every head as many programs, at equal lengths of its own line (TANGRAM_SPLITS).
    """

    def __init__(
        self,
        tables: LayerTables,
        pool: torch.Tensor,
        ratio: int,
        most: int,
        equal: bool = False,
    ):
        self._tables = tables
        self._pool = pool
        self._ratio = ratio
        self._equal = equal
        self._captured: dict[int, tuple[Dispatch, Workspace]] = {}
        # the one used last stands last
        self._eager: dict[int, tuple[Dispatch, Workspace]] = {}
        # R: equal splits cut rigidly, and nothing is read together then
        self.readers = 1 if equal else self._readers(most)
        # N_CTA: programs of the real kernel that the GPU holds at once
        self.programs = resident_programs(tables, pool, ratio, self.readers)
        self._workspace: Workspace | None = None
        self._largest = 0
        # sliding-window heads all hold the same
        pages = tables.kept_pages.cpu().numpy()
        self._shares = np.where(pages > 0, pages, 1)
        self.reserve(1)

    def reserve(self, batch: int) -> None:
        """Make the workspace large enough for ``batch`` requests."""
        if batch > self._largest:
            sizes = self._sizes(batch, self.programs)
            self._largest = sizes[1]
            self._workspace = Workspace.build(*sizes, self.readers, self._pool.device)

    def of(self, batch: int, capture: bool = False) -> tuple[Dispatch, Workspace]:
        """The map of ``batch`` requests, and a workspace large enough for it.

        Args:
            capture: a graph is about to be captured with them.
        """
        if batch in self._captured:
            return self._captured[batch]
        found = self._eager.pop(batch, None)
        if found is None:
            self.reserve(batch)
            split_map = self._split_map(batch)
            stretched = not self._equal
            dispatch = Dispatch.build(split_map, self._pool.device, stretched, self.readers)
            found = dispatch, self._workspace
        if capture:
            self._captured[batch] = found
        else:
            self._eager[batch] = found
            if len(self._eager) > EAGER:
                # its memory goes to later work of the same stream
                del self._eager[next(iter(self._eager))]
        return found

    def _sizes(self, batch: int, programs: int = 1) -> tuple[int, ...]:
        """Of a workspace for ``batch`` requests: programs, requests, H, G and D."""
        # with room to grow: a batch that grows by one request a step is served by few buffers
        batch, heads = 1 << (batch - 1).bit_length(), self._tables.heads
        # with equal splits, one for each head of every request at least
        return max(programs, batch * heads), batch, heads, self._ratio, self._pool.shape[-1]

    def _readers(self, most: int) -> int:
        """As many as a workspace for ``most`` requests has room for below its cap."""
        readers = most_readers(self._ratio)
        while readers > 1 and Workspace.nbytes(*self._sizes(most), readers) > Workspace.CAP:
            readers -= 1
        return readers

    def _split_map(self, batch: int) -> SplitMap:
        if self._equal:
            return equal_splits(self._shares.shape, self.programs, batch)
        return plan_splits(self._shares, self.programs, batch)
