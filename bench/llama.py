"""Llama-3.1-8B's shape, and the layout that a server would give it, for benches of kernels alone."""

import torch

from bench.shapes import profile_budgets
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.window import WindowRule

LAYERS, HEADS, RATIO, DIM = 32, 8, 4, 128
HIDDEN, INNER = 4096, 14336
RECENT, SINKS, PER_GROUP = 256, 4, 4
DTYPE = torch.bfloat16


def layout_of(
    rule: WindowRule, retention: float, max_tokens: int, layers: int = LAYERS
) -> KVLayout:
    """Groups across the first ``layers`` layers, with the fastkvzip profile's budgets."""
    shape = ModelShape(
        tuple(LayerShape(i, HEADS * RATIO, HEADS, DIM, None, DIM**-0.5) for i in range(layers))
    )
    return KVLayout.build(
        shape,
        rule,
        budgets=profile_budgets()[: layers * HEADS],
        retention=retention,
        per_group=PER_GROUP,
        grouping="global",
        max_tokens=max_tokens,
    )
