"""What crosses between a scorer and the rest: a window, query statistics, the interface."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

NEEDS = frozenset({"query_stats", "q_window", "rope", "hidden"})


@dataclass(frozen=True, slots=True)
class QueryStats:
    """Calibrated statistics of the queries before RoPE, of some or all KV heads.

    The covariance of a query head is ``factor @ factor.T + diag(diagonal)``.

    Attributes:
        mean: [H, r, D] fp32, r query heads per KV head.
        factor: [H, r, D, rank] fp32.
        diagonal: [H, r, D] fp32.
        inv_freq: [H, rotary_dim / 2] fp64, radians per position; dims past rotary_dim are not
            rotated. Halves are paired (i, i + rotary_dim / 2), the layout SGLang calls neox.
        scaling: [H] fp32, factor on q.k before the softmax.
    """

    mean: torch.Tensor
    factor: torch.Tensor
    diagonal: torch.Tensor
    inv_freq: torch.Tensor
    scaling: torch.Tensor

    def select(self, heads: torch.Tensor) -> "QueryStats":
        """Statistics of ``heads``, [h] int64 indices."""
        fields = (self.mean, self.factor, self.diagonal, self.inv_freq, self.scaling)
        return QueryStats(*(x[heads] for x in fields))


@dataclass(frozen=True, slots=True)
class Window:
    """One complete window of W tokens in some heads, of any layers.

    Attributes:
        k, v: [H, W, D]; keys carry the RoPE of their true position.
        start: absolute position of the first token.
        heads: [H] int64, indices in global head order.
        sinks: leading tokens kept anyway, whatever their score.
        query_stats: of these heads, where the scorer needs ``query_stats``.
        q: [H, r, w, D] where it needs ``q_window``: after RoPE, of the window's last w tokens, by
            the r query heads of each KV head.
        scaling: [H] fp32, factor on q.k before the softmax; there whenever ``q`` is.
        inv_freq: [H, rotary_dim / 2] fp64 where it needs ``rope``, as in ``QueryStats``.
        gate: [H, W] fp32 where it needs ``hidden``: what the model's trained gates (``score.gate``)
            said of each token when it passed the projection.
    """

    k: torch.Tensor
    v: torch.Tensor
    start: int
    heads: torch.Tensor
    sinks: int
    query_stats: QueryStats | None = None
    q: torch.Tensor | None = None
    scaling: torch.Tensor | None = None
    inv_freq: torch.Tensor | None = None
    gate: torch.Tensor | None = None


class Scorer(Protocol):
    """Ranks the tokens of a window; a pure function of the window.

    Attributes:
        needs: names out of ``NEEDS`` of what it reads beside K, V and positions.
    """

    needs: ClassVar[frozenset[str]]

    def score(self, window: Window) -> torch.Tensor:
        """Importance of every token, [H, W] fp32, higher is kept."""
        ...


class ReadsQueries(Scorer, Protocol):
    """A scorer whose ``needs`` hold ``q_window``."""

    def q_window(self, window: int) -> int:
        """Queries it reads at the end of a window of ``window`` tokens: 1 to ``window``."""
        ...
