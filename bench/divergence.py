"""KL divergence between what two models of the same tokens predict, over the whole vocabulary."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

# rows of logits held at a time: 64 x 49,152 floats are 13 MB
ROWS = 64


class Head:
    """The output embedding of a model folder: final hidden states to log-probabilities.

    Args:
        weight: [V, D].
    """

    def __init__(self, weight: torch.Tensor):
        self._weight = weight.float()

    @classmethod
    def of(cls, model: Path) -> "Head":
        from safetensors import safe_open

        for file in sorted(model.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                # tied embeddings are stored once, under the input's name
                names = set(tensors.keys())
                for name in ("lm_head.weight", "model.embed_tokens.weight"):
                    if name in names:
                        return cls(tensors.get_tensor(name))
        raise ValueError(f"{model} has no lm_head.weight and no model.embed_tokens.weight")

    def logprobs(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, D] -> [N, V] fp32."""
        return (hidden.float() @ self._weight.T).log_softmax(dim=-1)

    def kl(self, full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """KL(full || other) of each query in nats, [N] fp32; hidden: [N, D]."""
        if full.shape != other.shape:
            raise ValueError(f"hidden states of {tuple(full.shape)} and {tuple(other.shape)}")
        parts = []
        for p, q in zip(full.split(ROWS), other.split(ROWS), strict=True):
            p, q = self.logprobs(p), self.logprobs(q)
            parts.append((p.exp() * (p - q)).sum(dim=-1))
        return torch.cat(parts)

    def gap(self, hidden: torch.Tensor, tokens: list[int], logprobs: tuple[float, ...]) -> float:
        """Largest difference between ``logprobs`` of ``tokens`` and what ``hidden`` says."""
        worst = 0.0
        expected = torch.tensor(logprobs).split(ROWS)
        for h, t, e in zip(
            hidden.split(ROWS), torch.tensor(tokens).split(ROWS), expected, strict=True
        ):
            found = self.logprobs(h).gather(1, t[:, None])[:, 0]
            worst = max(worst, float((found - e).abs().max()))
        return worst


@dataclass(frozen=True, slots=True)
class Point:
    """One document, one way to reach the border, one range of queries behind it.

    Attributes:
        document: its name.
        way: ``branch``, ``regenerated`` or ``not going back``.
        leaves: token M at which the request leaves the cached text, less the border before it.
        queries: positions measured, relative to the border: [begin, end).
        cached: tokens reused.
        given_up: tokens of whole sealed windows that matched and were prefilled again.
        kl_cold: mean KL of the cold run to full KV over these queries.
        kl: mean KL of this run to full KV.
    """

    document: str
    way: str
    leaves: int
    queries: tuple[int, int]
    cached: int
    given_up: int
    kl_cold: float
    kl: float

    @property
    def ratio(self) -> float:
        return self.kl / self.kl_cold


def summary(points: list[Point]) -> dict[str, float]:
    """Means over documents: of both KLs, their ratio, and what the documents' own ratios are.

    The document with the largest KL decides the ratio of the means; the geometric mean of the ratios
    counts all alike.
    """
    cold = sum(p.kl_cold for p in points) / len(points)
    kl = sum(p.kl for p in points) / len(points)
    ratios = sorted(p.ratio for p in points)
    return {
        "kl_cold": cold,
        "kl": kl,
        "ratio": kl / cold,
        "geometric": math.prod(ratios) ** (1 / len(ratios)),
        "lowest": ratios[0],
        "highest": ratios[-1],
        "given_up": sum(p.given_up for p in points) / len(points),
    }
