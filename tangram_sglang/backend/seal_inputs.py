"""What is sealed together on a GPU: heads, and the step's own tokens in them."""

from dataclasses import dataclass

import torch

from tangram_sglang.kernels.raw_rows import HeadIndex


@dataclass(frozen=True, slots=True)
class SealHeads:
    """Full-attention heads that are sealed together: those of a layer, or all.

    Attributes:
        index: where they live.
        span: their place among all full-attention heads, in global head order.
        most: largest kept count.
    """

    index: HeadIndex
    span: slice
    most: int

    def part(self, first: int, end: int) -> "SealHeads":
        """Heads ``first..end`` of these."""
        index = HeadIndex(*(x[first:end] for x in self.index))
        start = self.span.start
        return SealHeads(index, slice(start + first, start + end), self.most)


@dataclass(frozen=True, slots=True)
class Fresh:
    """A step's own tokens in some heads; anything where no window has any of them.

    Attributes:
        k, v: [T, H, D].
        q: [T, H * r, D], query heads of a KV head side by side, where the scorer reads them.
        gate: [T, H] fp32 gate scores, likewise.
    """

    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor | None = None
    gate: torch.Tensor | None = None

    @classmethod
    def nothing(cls, pool: torch.Tensor, heads: int, ratio: int) -> "Fresh":
        """No token of ``heads`` heads."""
        kv = pool.new_empty(0, heads, pool.shape[-1])
        q = pool.new_empty(0, heads * ratio, pool.shape[-1])
        return cls(kv, kv, q, torch.empty(0, heads, device=pool.device))

    def part(self, first: int, end: int) -> "Fresh":
        """The same of heads ``first..end``."""
        q, gate = self.q, self.gate
        if q is not None:
            ratio = q.shape[1] // self.k.shape[1]
            q = q[:, first * ratio : end * ratio]
        if gate is not None:
            gate = gate[:, first:end]
        return Fresh(self.k[:, first:end], self.v[:, first:end], q, gate)
