"""KeyDiff: keep the keys least like the average key (arXiv 2504.15364)."""

from typing import ClassVar

import torch

from tangram_sglang.score.base import Window


class KeyDiff:
    """s_j = -cos(k_j, mean_i k_i / |k_i|), per KV head, on keys after RoPE."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def score(self, window: Window) -> torch.Tensor:
        unit = torch.nn.functional.normalize(window.k.float(), dim=-1)
        anchor = torch.nn.functional.normalize(unit.mean(dim=1, keepdim=True), dim=-1)
        return -(unit * anchor).sum(dim=-1)
