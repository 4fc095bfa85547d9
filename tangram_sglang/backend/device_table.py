"""The page table on the device: follows the host's, in the order of forward steps."""

import numpy as np
import torch

from tangram_sglang.kernels.table import update_table
from tangram_sglang.pool.rows import Rows


class DeviceTable:
    """A copy of ``Rows.table`` that only the forward stream writes to and reads.

    The host's table runs ahead: it already has the pages of the next step while the device works
    on this one. So changes are collected and applied where the step that needs them starts.

    Attributes:
        tensor: [rows, E] int32.
    """

    def __init__(self, rows: Rows, device: torch.device | str):
        self._rows = rows
        self._changed: list[tuple[int, np.ndarray]] = []
        self.tensor = torch.zeros(rows.table.shape, dtype=torch.int32, device=device)
        rows.pointed = lambda row, slots: self._changed.append((row, np.ravel(slots)))

    def changes(self) -> np.ndarray:
        """Entries that changed since the last call, [N, 3] int32: row, slot, page.

        The page is what the host's table says now, so an entry that changed twice is right in
        both of its lines.
        """
        if not self._changed:
            return np.empty((0, 3), dtype=np.int32)
        row = np.repeat([row for row, _ in self._changed], [len(x) for _, x in self._changed])
        slot = np.concatenate([slots for _, slots in self._changed])
        self._changed.clear()
        return np.stack([row, slot, self._rows.table[row, slot]], axis=1).astype(np.int32)

    def apply(self, changes: torch.Tensor) -> None:
        """Write ``changes``, now on the device, on the current stream."""
        update_table(self.tensor, changes)
