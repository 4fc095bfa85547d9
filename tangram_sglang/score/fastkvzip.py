"""Fast KVzip: what a trained gate says of each token's hidden state (arXiv 2601.17668)."""

from typing import ClassVar

import torch

from tangram_sglang.score.base import Window


class FastKVzip:
    """s_j = the gate's score of token j (``score.gate``), taken when it passed the projection.

    As in the paper, but that a head keeps its own share of each window, where the paper holds all
    scores of a prompt against one threshold.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"hidden"})

    def score(self, window: Window) -> torch.Tensor:
        return window.gate
