"""Fits the gate of one layer to KVzip's scores, and says how well it ranks.

The loss is the paper's: binary cross-entropy of the gate's score against KVzip's, which is no label
but a share of attention. Only the gate is trained; the model is not even there.
"""

import math
from collections.abc import Sequence
from dataclasses import fields

import torch

from tangram_sglang.score.gate import Gates

BATCH = 512
RATE = 0.01
LEAST = 1e-6


def initial_gate(
    hidden: int, heads: int, ratio: int, dim: int, sinks: int, seed: int, layer: int
) -> Gates:
    """A gate of one layer that nothing has been taught; the same for the same ``seed``."""
    generator = torch.Generator().manual_seed(1000 * seed + layer)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return Gates(
        q=normal(heads, ratio, dim, hidden) / hidden**0.5,
        k=normal(heads, dim, hidden) / hidden**0.5,
        q_norm=torch.ones(dim),
        k_norm=torch.ones(dim),
        sinks=normal(heads, sinks, dim),
        bias=torch.zeros(heads, ratio),
    )


def fit(
    gate: Gates, hidden: torch.Tensor, scores: torch.Tensor, *, epochs: int, seed: int
) -> Gates:
    """``gate`` after ``epochs`` passes over the tokens, in an order that ``seed`` decides.

    Args:
        hidden: [N, hidden], what entered the projection.
        scores: [N, H] fp32, KVzip's.
    """
    names = [f.name for f in fields(Gates)]
    weights = [getattr(gate, x).to(hidden.device).clone().requires_grad_(True) for x in names]
    trained = Gates(*weights)
    optimiser = torch.optim.Adam(weights, lr=RATE)
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * math.ceil(len(hidden) / BATCH)
    falling = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=max(steps, 2))
    for _ in range(epochs):
        for batch in torch.randperm(len(hidden), generator=generator).split(BATCH):
            batch = batch.to(hidden.device)
            found = trained.scores(hidden[batch].float()).clamp(LEAST, 1 - LEAST)
            loss = torch.nn.functional.binary_cross_entropy(found, scores[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            falling.step()
    return Gates(*(x.detach() for x in weights))


@torch.no_grad()
def agreement(gate: Gates, contexts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Spearman's rank correlation of gate and KVzip, the mean over contexts and heads.

    Args:
        contexts: (hidden [n, hidden], scores [n, H]) of each.
    """
    found = [
        _spearman(gate.scores(hidden.float()).T, scores.T).mean() for hidden, scores in contexts
    ]
    return float(torch.stack(found).mean())


def _spearman(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of each line of [H, n]; ties in order of place."""
    a, b = (x.argsort(dim=-1, stable=True).argsort(dim=-1).double() for x in (a, b))
    a, b = a - a.mean(dim=-1, keepdim=True), b - b.mean(dim=-1, keepdim=True)
    return (a * b).sum(dim=-1) / (a.norm(dim=-1) * b.norm(dim=-1))
