"""Attaches trained gates to a loaded SGLang model: scores are taken where hidden states are projected.

A pre-hook on a layer's projection runs the gate on what enters it, in plain tensor operations without
a sync, and copies the scores to a buffer that stays where it is. So a captured CUDA graph, which replays
the operations and not this Python, refreshes the very memory that is read behind it.
"""

from functools import partial

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    is_in_breakable_cuda_graph,
)
from torch import nn

from tangram_sglang.errors import TangramError
from tangram_sglang.plan.gates import GateFile
from tangram_sglang.score.gate import Gates

PROJECTION = "qkv_proj"


class GateScores:
    """Scores of the tokens of one forward step, layer by layer.

    Args:
        layers: ids of the layers.
        rows: tokens of a step whose scores have a fixed place; a longer step, which no graph captures, has
            one of its own.
        heads: KV heads of a layer.
        device: of the model.
    """

    def __init__(self, layers: list[int], rows: int, heads: int, device: torch.device | str):
        self._fixed = {x: torch.zeros(rows, heads, device=device) for x in layers}
        self._latest: dict[int, torch.Tensor] = {}
        # where SGLang's breakable graphs leave scores, by layer; and what was too small for them, but
        # other graphs write to
        self._captured: dict[int, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def put(self, layer: int, scores: torch.Tensor) -> None:
        """Leave ``scores`` [T, H] for the attention of the same layer in the same step."""
        fixed, captured = self._fixed[layer], is_in_breakable_cuda_graph()
        if captured and len(scores) > len(fixed):
            self._outgrown.append(fixed)
            fixed = self._fixed[layer] = torch.zeros_like(scores)
        if len(scores) > len(fixed):
            self._latest[layer] = scores
            return
        self._latest[layer] = fixed[: len(scores)]
        self._latest[layer].copy_(scores)
        if captured:
            most = max(len(scores), len(self._captured.get(layer, ())))
            self._captured[layer] = fixed[:most]

    def take(self, layer: int, tokens: int) -> torch.Tensor:
        """Scores of this step's first ``tokens`` tokens, [tokens, H]; once."""
        found = self._latest.pop(layer, None)
        if found is None and is_in_breakable_cuda_graph():
            # attention runs between the parts of such a graph, which replay without the hook
            found = self._captured.get(layer)
        if found is None or len(found) < tokens:
            raise RuntimeError(
                f"layer {layer}: attention of {tokens} tokens, and "
                f"{0 if found is None else len(found)} went through the projection {PROJECTION}, where "
                "their gate scores are taken: the model projects them another way"
            )
        return found[:tokens]


def attach_gates(model: nn.Module, file: GateFile, rows: int) -> GateScores:
    """Hook the gates of ``file`` to the full-attention layers of ``model``.

    Args:
        rows: most tokens of a step that a CUDA graph may capture.
    """
    projections, layers = _projections(model), file.about.layers
    weight = next(model.parameters())
    gates = file.gates.to(weight.device).projected_in(weight.dtype)
    found = GateScores(layers, rows, gates.bias.shape[1], weight.device)
    for i, layer in enumerate(layers):
        projections[layer].register_forward_pre_hook(
            partial(_leave_scores, found, layer, gates.layer(i))
        )
    return found


def _leave_scores(found: GateScores, layer: int, gate: Gates, module: nn.Module, args) -> None:
    found.put(layer, gate.scores(args[0].to(gate.q.dtype)))


def _projections(model: nn.Module) -> dict[int, nn.Module]:
    """What hidden states enter in each full-attention layer, by layer id."""
    found = {}
    for owner in model.modules():
        for attention in owner.children():
            if not isinstance(attention, RadixAttention) or attention.sliding_window_size >= 0:
                continue
            projection = getattr(owner, PROJECTION, None)
            if not isinstance(projection, nn.Module):
                raise TangramError(
                    f"layer {attention.layer_id}: {type(owner).__name__} has no module {PROJECTION}, "
                    f"where gates read the hidden states of {type(model).__name__}; choose a scorer "
                    "that needs no gates (TANGRAM_SCORER)"
                )
            found[attention.layer_id] = projection
    return found
