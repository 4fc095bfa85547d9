"""Random choice that depends on head and position only: the baseline every scorer must beat."""

from typing import ClassVar

import torch

from tangram_sglang.score.base import Window

_MASK = (1 << 31) - 1


class Random:
    """An integer hash of (head, position); equal on every device, rank and chunking."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def score(self, window: Window) -> torch.Tensor:
        tokens = window.k.shape[1]
        position = torch.arange(tokens, device=window.k.device) + window.start
        # products stay below 2^62, so int64 never overflows
        x = (window.heads[:, None] * 0x9E3779B1 + position * 0x85EBCA6B) & _MASK
        for _ in range(3):
            x = ((x ^ (x >> 15)) * 0x2C1B3C6D + 0x297A2D39) & _MASK
        # 24 bits are exact in fp32
        return (x >> 7).float()
