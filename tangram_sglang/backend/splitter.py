"""Splits the keys of prefills with few tokens after many among programs (kernels/prefill_split.py)."""

import numpy as np
import torch

from tangram_sglang.kernels.prefill_split import CAPACITY, Split, split_counts


class Splitter:
    """Decides from a step's tiles, once for all layers, and holds the partial results of one layer.

    Args:
        kept: [L, H], K of every full-attention head.
        rows: queries x heads of a tile.
        dim: D.
        block: keys of a block.
        device: where the kernels run.
    """

    def __init__(self, kept: np.ndarray, rows: int, dim: int, block: int, device: torch.device):
        self._kept = kept
        self._rows, self._dim, self._block = rows, dim, block
        self._device = torch.device(device)
        self._programs = 1
        if self._device.type == "cuda":
            self._programs = torch.cuda.get_device_properties(device).multi_processor_count
        self._buffers: tuple[torch.Tensor, ...] | None = None

    def of(self, tiles: np.ndarray) -> Split | None:
        """How full-attention ``tiles`` are split, or None where enough programs are busy anyway."""
        heads = self._kept.shape[1]
        count, target = split_counts(tiles, self._kept, heads, self._block, self._programs)
        return None if count == 1 else Split(count, target, *self._space())

    def _space(self) -> tuple[torch.Tensor, ...]:
        if self._buffers is None:
            part, lse = (
                torch.empty(CAPACITY * self._rows * size, device=self._device)
                for size in (self._dim, 1)
            )
            used = torch.empty(CAPACITY, dtype=torch.int32, device=self._device)
            self._buffers = part, lse, used
        return self._buffers
