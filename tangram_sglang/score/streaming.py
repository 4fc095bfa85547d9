"""StreamingLLM within a window: the newest tokens win (arXiv 2309.17453)."""

from typing import ClassVar

import torch

from tangram_sglang.score.base import Window


class Streaming:
    """s_j = j: beside the sinks a head keeps the last tokens of each window."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def score(self, window: Window) -> torch.Tensor:
        heads, tokens = window.k.shape[:2]
        order = torch.arange(tokens, dtype=torch.float32, device=window.k.device)
        return order.expand(heads, tokens)
