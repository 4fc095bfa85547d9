"""The gate of Fast KVzip (arXiv 2601.17668): how much a token will matter, from its hidden state.

A gate is a small attention of each token to itself, in d dimensions, beside S learned sink keys:

    q_g = norm(Wq_g h)    k = norm(Wk h)    logit_g = q_g.k / sqrt(d) + b_g    base_gs = q_g.sink_s / sqrt(d)
    score = mean over g of 1 / (1 + sum_s exp(base_gs - logit_g))

for each KV head, g over its query heads. It reads one token only, so chunks and batches change nothing.
"""

from dataclasses import dataclass, fields

import torch

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Gates:
    """Gates of L layers; of one layer where L is left out.

    Attributes:
        q: [L, H, r, d, hidden], r query heads per KV head.
        k: [L, H, d, hidden].
        q_norm, k_norm: [L, d].
        sinks: [L, H, S, d].
        bias: [L, H, r].
    """

    q: torch.Tensor
    k: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    sinks: torch.Tensor
    bias: torch.Tensor

    def layer(self, index: int) -> "Gates":
        return Gates(*(getattr(self, f.name)[index] for f in fields(self)))

    def to(self, device: torch.device | str) -> "Gates":
        return Gates(*(getattr(self, f.name).to(device) for f in fields(self)))

    def projected_in(self, dtype: torch.dtype) -> "Gates":
        """The same with both projections in ``dtype``, that of hidden states; the rest in fp32."""
        rest = (x.float() for x in (self.q_norm, self.k_norm, self.sinks, self.bias))
        return Gates(self.q.to(dtype), self.k.to(dtype), *rest)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of one layer: log-odds of each token by each query head, [T, H, r] fp32.

        Args:
            hidden: [T, hidden], what enters the layer's projection, in the type of ``q``.
        """
        heads, ratio, dim, _ = self.q.shape
        q = hidden @ self.q.flatten(0, 2).mT
        q = _normed(q.float().view(-1, heads, ratio, dim), self.q_norm)
        k = _normed((hidden @ self.k.flatten(0, 1).mT).float().view(-1, heads, dim), self.k_norm)
        scale = dim**-0.5
        own = torch.einsum("thrd,thd->thr", q, k) * scale + self.bias
        base = torch.einsum("thrd,hsd->thrs", q, self.sinks) * scale
        return own - base.logsumexp(dim=-1)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of one layer: [T, H] fp32, 0 to 1; ``hidden`` as for ``logits``."""
        return self.logits(hidden).sigmoid().mean(dim=-1)


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS) * weight
