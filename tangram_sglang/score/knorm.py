"""Key norm: keep the keys of least norm (arXiv 2406.11430)."""

from typing import ClassVar

import torch

from tangram_sglang.score.base import Window


class KNorm:
    """s_j = -|k_j|, as kvpress' ``KnormPress``; RoPE leaves the norm as it is."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def score(self, window: Window) -> torch.Tensor:
        return -window.k.float().norm(dim=-1)
