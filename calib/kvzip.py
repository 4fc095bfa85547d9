"""KVzip's scores (arXiv 2505.23416): the attention a cached key gets while its context is repeated.

Runs a Hugging Face model, in eager attention, which hands out its weights. Knows nothing of gates.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tangram_sglang.errors import TangramError

PROMPT = "\n\nRepeat the previous context:\n"
# tokens repeated at once, and those of the chunk before that lead into the next one
CHUNK = 1024
LEAD = 8


@dataclass(frozen=True, slots=True)
class Layer:
    """A full-attention layer.

    Attributes:
        layer_id: its place among all layers.
        attention: the module, whose first argument is what enters the projection.
        kv_heads: KV heads.
        q_heads: query heads.
    """

    layer_id: int
    attention: nn.Module
    kv_heads: int
    q_heads: int


def full_layers(model: nn.Module, config: Any) -> list[Layer]:
    """The full-attention layers of a Hugging Face model, in order."""
    kinds = getattr(config, "layer_types", None)
    found = {
        module.layer_idx: module
        for module in model.modules()
        if hasattr(module, "layer_idx") and type(module).__name__.endswith("Attention")
    }
    if sorted(found) != list(range(config.num_hidden_layers)):
        raise TangramError(
            f"{type(model).__name__} has no attention module with a layer_idx in each of its "
            f"{config.num_hidden_layers} layers: gates cannot be trained for it"
        )
    heads = config.num_key_value_heads, config.num_attention_heads
    return [
        Layer(i, found[i], *heads)
        for i in sorted(found)
        if kinds is None or kinds[i] == "full_attention"
    ]


@dataclass(frozen=True, slots=True)
class Measured:
    """One context.

    Attributes:
        hidden: by full-attention layer, [n, hidden] in the model's type: what enters the projection.
        scores: by full-attention layer, [n, H] fp32, 0 to 1.
    """

    hidden: list[torch.Tensor]
    scores: list[torch.Tensor]


@torch.no_grad()
def measure(
    model: nn.Module,
    layers: Sequence[Layer],
    context: Sequence[int],
    prompt: Sequence[int],
    chunk: int = CHUNK,
) -> Measured:
    """Run ``context``, then have ``model`` repeat it; scores are what its keys are attended with.

    Of each key the most that any query of the repetition, by any query head of the KV head, pays it.

    Args:
        model: without its output head, in eager attention.
        layers: its full-attention layers.
        context, prompt: token ids.
        chunk: tokens repeated at once; each chunk goes on from the context and ``prompt``.
    """
    from transformers import DynamicCache

    n, device = len(context), next(model.parameters()).device
    hidden: dict[int, torch.Tensor] = {}
    cache = DynamicCache(config=model.config)

    def keep_hidden(layer):
        def hook(module, args, kwargs):
            hidden[layer.layer_id] = (args[0] if args else kwargs["hidden_states"])[0].clone()

        return layer.attention.register_forward_pre_hook(hook, with_kwargs=True)

    with _Hooks([keep_hidden(layer) for layer in layers]):
        model(torch.tensor([list(context)], device=device), past_key_values=cache)
    scores = {x.layer_id: torch.zeros(n, x.kv_heads, device=device) for x in layers}

    def keep_most(layer):
        def hook(module, args, output):
            weights = output[1][0, :, :, :n].float().amax(dim=1)
            most = weights.unflatten(0, (layer.kv_heads, -1)).amax(dim=1).T
            torch.maximum(scores[layer.layer_id], most, out=scores[layer.layer_id])

        return layer.attention.register_forward_hook(hook)

    with _Hooks([keep_most(layer) for layer in layers]):
        for start in range(0, n, chunk):
            said = context[max(0, start - LEAD) : start + chunk]
            ids = torch.tensor([[*prompt, *said]], device=device)
            model(ids, past_key_values=copy.deepcopy(cache))
    return Measured([hidden[x.layer_id] for x in layers], [scores[x.layer_id] for x in layers])


class _Hooks:
    """Removes hooks in the end."""

    def __init__(self, handles):
        self._handles = handles

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        for handle in self._handles:
            handle.remove()
