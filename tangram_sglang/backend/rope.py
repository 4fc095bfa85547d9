"""Reads RoPE frequencies off a loaded SGLang model, whatever scaling they were made with.

The cosines and sines that the model itself multiplies by are the source, not the config: they hold
every kind of scaling, and a constant factor on both (YaRN's) cancels in the angle.
"""

import math

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import nn

from tangram_sglang.errors import TangramError

# angles are read at positions 1, 2, 4 .. FAR; the error of a frequency falls with the position
FAR = 4096
# radians that a table of each type may be away from the recomputed one
TABLE_ERROR = {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def rotary_frequencies(model: nn.Module) -> dict[int, torch.Tensor]:
    """Radians per position, [rotary_dim / 2] fp64, by id of each full-attention layer.

    A layer without RoPE has frequencies of zero. TangramError where a model rotates in a way that
    one frequency per pair of dimensions cannot express.
    """
    found, seen = {}, {}
    for owner in model.modules():
        for attention in owner.children():
            if not isinstance(attention, RadixAttention) or attention.sliding_window_size >= 0:
                continue
            layer = attention.layer_id
            if not hasattr(owner, "rotary_emb"):
                raise _refusal(layer, f"{type(owner).__name__} has no attribute rotary_emb")
            rope = owner.rotary_emb
            if rope is None:
                found[layer] = torch.zeros(attention.head_dim // 2, dtype=torch.float64)
                continue
            # layers share their rotary embedding
            if id(rope) not in seen:
                seen[id(rope)] = _frequencies(rope, layer)
            found[layer] = seen[id(rope)]
    return found


def _frequencies(rope: nn.Module, layer: int) -> torch.Tensor:
    name = type(rope).__name__
    if not getattr(rope, "is_neox_style", True):
        raise _refusal(layer, f"{name} pairs neighbouring dimensions, not halves (is_neox_style)")
    served = getattr(rope, "cos_sin_cache", None)
    if not isinstance(served, torch.Tensor) or served.ndim != 2 or len(served) < 2:
        raise _refusal(layer, f"{name} has no table cos_sin_cache of one row a position")
    if served.dtype == torch.float32:
        return _read(served)
    # the served table is rounded to half precision: make it again in fp32, and see that it is it
    frequencies = _read(rope._compute_cos_sin_cache())
    last = min(len(served) - 1, FAR)
    expected = frequencies * last
    actual = _angles(served[last])
    error = (actual - expected).remainder(2 * math.pi)
    error = torch.minimum(error, 2 * math.pi - error).max().item()
    if error > TABLE_ERROR[served.dtype]:
        raise _refusal(layer, f"{name} serves angles {error:.1e} rad away from what it computes")
    return frequencies


def _read(table: torch.Tensor) -> torch.Tensor:
    """Frequencies of a table [positions, rotary_dim], cosines before sines.

    The angle at position 1 says how often the angle at 2 has wrapped, that at 2 the one at 4 ...
    """
    frequencies = _angles(table[1])
    position = 2
    while position <= min(FAR, len(table) - 1):
        angle = _angles(table[position])
        wraps = ((frequencies * position - angle) / (2 * math.pi)).round()
        frequencies = (angle + 2 * math.pi * wraps) / position
        position *= 2
    return frequencies


def _angles(row: torch.Tensor) -> torch.Tensor:
    cos, sin = row.double().cpu().chunk(2)
    return torch.atan2(sin, cos)


def _refusal(layer: int, reason: str) -> TangramError:
    return TangramError(
        f"layer {layer}: {reason}; tangram cannot undo its rotation, so the model can be served "
        "with scorer keydiff but not calibrated for expected_attention or served with a scorer that "
        "needs rope"
    )
