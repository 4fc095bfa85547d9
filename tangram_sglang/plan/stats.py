"""Query statistics beside a plan: reading them, with the hash the plan names."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load

from tangram_sglang.errors import TangramError
from tangram_sglang.plan.shape import ModelShape
from tangram_sglang.score.base import QueryStats

TENSORS = ("mean", "factor", "diagonal", "inv_freq")


def load_query_stats(
    path: Path, sha256: str, shape: ModelShape, device: torch.device | str = "cpu"
) -> QueryStats:
    """Statistics of every head of ``shape.full_heads``.

    The file holds ``mean`` [H, r, D], ``factor`` [H, r, D, rank], ``diagonal`` [H, r, D] in any
    float type and ``inv_freq`` [H, rotary_dim / 2] in fp64, H in global head order.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TangramError(
            f"query statistics {path} cannot be read ({error.strerror}); keep the file beside its "
            "plan, or calibrate again"
        ) from None
    found = hashlib.sha256(raw).hexdigest()
    if found != sha256:
        raise TangramError(
            f"query statistics {path}: sha256 is {found}, the plan names {sha256}; they belong to "
            "another calibration: put both files of one calibration together"
        )
    tensors = load(raw)
    full = [x for x in shape.layers if x.sliding_window is None]
    heads, dim = sum(x.kv_heads for x in full), shape.head_dim
    ratio = full[0].q_heads // full[0].kv_heads
    expected = {"mean": (heads, ratio, dim), "diagonal": (heads, ratio, dim)}
    for name in TENSORS:
        if name not in tensors:
            raise TangramError(
                f"query statistics {path}: tensor {name} is missing, expected {', '.join(TENSORS)}; "
                "calibrate again"
            )
        if name in expected and tuple(tensors[name].shape) != expected[name]:
            raise TangramError(
                f"query statistics {path}: {name} has shape {tuple(tensors[name].shape)}, "
                f"expected {expected[name]}; calibrate this model"
            )
    scaling = torch.tensor(shape.scalings)
    mean, factor, diagonal = (tensors[name].float().to(device) for name in TENSORS[:3])
    return QueryStats(
        mean, factor, diagonal, tensors["inv_freq"].double().to(device), scaling.float().to(device)
    )
