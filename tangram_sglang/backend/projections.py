"""Finds the output projections of a loaded SGLang model: what each head's output is multiplied by."""

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import nn

NAMES = ("o_proj", "out_proj", "wo", "dense", "c_proj")


def output_projections(model: nn.Module) -> dict[int, torch.Tensor]:
    """Weights [hidden, HQ * D] by id of each full-attention layer where they are plain floats."""
    found = {}
    for owner in model.modules():
        for attention in owner.children():
            if not isinstance(attention, RadixAttention) or attention.sliding_window_size >= 0:
                continue
            columns = attention.tp_q_head_num * attention.head_dim
            for name in NAMES:
                weight = getattr(getattr(owner, name, None), "weight", None)
                plain = isinstance(weight, torch.Tensor) and weight.is_floating_point()
                if plain and weight.ndim == 2 and weight.shape[1] == columns:
                    found[attention.layer_id] = weight.detach()
                    break
    return found
