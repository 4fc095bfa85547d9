"""TOVA: what the last query of a window attends to (arXiv 2401.06104)."""

from typing import ClassVar

import torch

from tangram_sglang.score.attention import newest_last, window_attention
from tangram_sglang.score.base import Window


class Tova:
    """s_j = mean over the KV head's query heads of softmax_j(a q.k_j), q the window's last query.

    The last token is kept first. Unlike the paper and kvpress' ``TOVAPress``, which average over all
    query heads of a layer so that its KV heads keep the same tokens, each KV head has its own
    average: budgets are per head, and so is the choice. The mean over the KV heads of a layer is
    the press's score.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"q_window"})

    def q_window(self, window: int) -> int:
        return 1

    def score(self, window: Window) -> torch.Tensor:
        return newest_last(window_attention(window)[:, :, 0, :-1].mean(dim=1), 1)
