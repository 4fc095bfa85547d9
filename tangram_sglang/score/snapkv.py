"""SnapKV: what the last queries of a window attend to (arXiv 2404.14469)."""

from typing import ClassVar

import torch

from tangram_sglang.score.attention import newest_last, window_attention
from tangram_sglang.score.base import Window

# tokens over which neighbours share their scores
KERNEL = 5


class SnapKV:
    """s_j = mean over query heads of avgpool_5(mean over the last w queries of softmax_j(a q.k_j)).

    The w tokens that ask are kept first, as in the paper. As kvpress' ``SnapKVPress``, except:

    - w is 32, not 64, and at most a quarter of the window, whose end is W tokens away and not a
      whole prompt;
    - of the w tokens a head that keeps fewer keeps the newest, which the press leaves to chance;
    - a is the model's own scaling, which is not 1 / sqrt(D) everywhere.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"q_window"})

    def __init__(self, asked: int = 32):
        self._asked = asked

    def q_window(self, window: int) -> int:
        return max(1, min(self._asked, window // 4))

    def score(self, window: Window) -> torch.Tensor:
        asked = window.q.shape[2]
        attention = window_attention(window)[..., :-asked].mean(dim=2)
        if attention.shape[-1]:
            attention = torch.nn.functional.avg_pool1d(attention, KERNEL, 1, KERNEL // 2)
        return newest_last(attention.mean(dim=1), asked)
