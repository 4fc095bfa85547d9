"""Fast KVzip: what a trained gate says of each token's hidden state (arXiv 2601.17668)."""

from typing import ClassVar

import torch

from tangram_sglang.score.base import Window

# significant bits of a score that count
BITS = 11


class FastKVzip:
    """s_j = the gate's score of token j (``score.gate``), taken when it passed the projection.

    As in the paper, but that a head keeps its own share of each window, where the paper holds all
    scores of a prompt against one threshold. And scores are rounded: in the first layer equal tokens
    have equal hidden states wherever they stand, so their scores must tie, for the lower position to win.
    Unrounded, the last bits of a matrix product, which depend on the chunk, would choose among them.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"hidden"})

    def score(self, window: Window) -> torch.Tensor:
        mantissa, exponent = torch.frexp(window.gate)
        return torch.ldexp((mantissa * 2**BITS).round() / 2**BITS, exponent)
