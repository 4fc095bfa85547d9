"""From sums over queries to the statistics file beside a plan.

A covariance is stored as ``factor @ factor.T + diag(diagonal)``.
"""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save

from tangram_sglang.calib.observations import Queries
from tangram_sglang.errors import TangramError

ROUNDS = 10
FP16_MAX = torch.finfo(torch.float16).max


def save_query_stats(queries: Queries, rank: int, path: Path) -> str:
    """Write statistics of every KV head to ``path``; returns the file's sha256."""
    tensors = query_statistics(queries, rank)
    for name, x in tensors.items():
        if name != "inv_freq":
            fits = (x.abs() < FP16_MAX).all()
            tensors[name] = x.to(torch.float16 if fits else torch.bfloat16).contiguous()
    raw = save(tensors)
    path.write_bytes(raw)
    return hashlib.sha256(raw).hexdigest()


def query_statistics(queries: Queries, rank: int) -> dict[str, torch.Tensor]:
    """mean [H, r, D], factor [H, r, D, rank], diagonal [H, r, D], inv_freq [H, F]; all fp64."""
    if queries.count < 2:
        raise TangramError(
            f"{queries.count} queries were observed, a covariance takes 2 at least; give more or longer "
            "texts"
        )
    mean = torch.from_numpy(queries.total) / queries.count
    square = torch.from_numpy(queries.square) / queries.count
    covariance = square - mean[..., :, None] * mean[..., None, :]
    factor, diagonal = low_rank(covariance, rank)
    layers = queries.shape.layers
    ratio = layers[0].q_heads // layers[0].kv_heads
    kv_heads = torch.tensor([x.kv_heads for x in layers])
    by_head = {"mean": mean, "factor": factor, "diagonal": diagonal}
    # query heads of one KV head stand together
    tensors = {
        name: x.unflatten(1, (-1, ratio)).flatten(0, 1).contiguous() for name, x in by_head.items()
    }
    inv_freq = torch.from_numpy(queries.inv_freq).repeat_interleave(kv_heads, dim=0)
    return {**tensors, "inv_freq": inv_freq.contiguous()}


def low_rank(covariance: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``factor`` [..., D, rank] and ``diagonal`` [..., D] nearest to a covariance [..., D, D].

    Principal factor analysis: in turn the best factor for what the diagonal leaves, and the
    diagonal that the factor leaves.
    """
    own = covariance.diagonal(dim1=-2, dim2=-1)
    diagonal = torch.zeros_like(own)
    for _ in range(ROUNDS):
        values, vectors = torch.linalg.eigh(covariance - torch.diag_embed(diagonal))
        top = values[..., -rank:] if rank else values[..., :0]
        chosen = vectors[..., -rank:] if rank else vectors[..., :0]
        factor = chosen * top.clamp(min=0).sqrt()[..., None, :]
        diagonal = (own - factor.square().sum(dim=-1)).clamp(min=0)
    return factor, diagonal
