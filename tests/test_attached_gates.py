"""Gates on a model's projections: who gets one, and what the hook leaves for the backend."""

from pathlib import Path

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import nn

from tangram_sglang.backend import gates
from tangram_sglang.backend.gates import GateScores, attach_gates
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.file import ModelSpec
from tangram_sglang.plan.gates import Architecture, Description, GateFile
from tests.reference.tiny import random_gates, tiny_llama

HIDDEN, HEADS = 64, 2


class Attention(nn.Module):
    """As SGLang's models have it."""

    def __init__(self, layer: int, projection: str, window: int = -1):
        super().__init__()
        setattr(self, projection, nn.Linear(HIDDEN, 128))
        self.attn = RadixAttention(4, 16, 0.25, HEADS, layer, sliding_window_size=window)


def model_of(*layers: Attention) -> nn.Module:
    return nn.ModuleList(layers)


def gate_file(layers) -> GateFile:
    trained = random_gates(tiny_llama(layers=len(layers)))
    model = ModelSpec("tiny", {}, "")
    about = Description("", "", model, list(layers), Architecture(5, 3), {}, "")
    return GateFile(Path("g"), trained, about, "")


def test_a_hook_leaves_the_scores_of_what_is_projected():
    model = model_of(
        Attention(0, "qkv_proj"), Attention(1, "other", window=8), Attention(2, "qkv_proj")
    )
    file = gate_file([0, 2])
    found = attach_gates(model, file, rows=5)
    generator = torch.Generator().manual_seed(0)
    # the last step is longer than what has a fixed place
    for tokens in (1, 5, 3, 7):
        hidden = torch.randn(2, tokens, HIDDEN, generator=generator)
        for place, layer in enumerate((0, 2)):
            model[layer].qkv_proj(hidden[place])
            expected = file.gates.projected_in(torch.float32).layer(place).scores(hidden[place])
            torch.testing.assert_close(found.take(layer, tokens), expected)


def test_scores_stay_where_they_are_from_step_to_step():
    """A captured graph writes to the addresses it saw."""
    found = GateScores([3], rows=4, heads=HEADS, device="cpu")
    places = set()
    for tokens in (4, 1, 3):
        found.put(3, torch.rand(tokens, HEADS))
        places.add(found.take(3, tokens).data_ptr())
    assert len(places) == 1


def test_graphs_that_break_at_attention_replay_without_the_hook(monkeypatch):
    """Each replay finds what its graph wrote, at any captured size, larger ones than rows included."""
    found = GateScores([3], rows=2, heads=HEADS, device="cpu")
    found.put(3, torch.ones(2, HEADS))
    decoded = found.take(3, 2)
    monkeypatch.setattr(gates, "is_in_breakable_cuda_graph", lambda: True)
    with pytest.raises(RuntimeError, match="0 went through"):
        found.take(3, 1)
    places = []
    for tokens in (8, 4):
        found.put(3, torch.rand(tokens, HEADS))
        places.append(found.take(3, tokens))
    # a replay, in which the graph of 8 tokens writes where it wrote when it was captured
    replayed = torch.rand(8, HEADS)
    places[0].copy_(replayed)
    assert torch.equal(found.take(3, 7), replayed[:7])
    assert torch.equal(found.take(3, 3), replayed[:3])
    monkeypatch.setattr(gates, "is_in_breakable_cuda_graph", lambda: False)
    with pytest.raises(RuntimeError, match="0 went through"):
        found.take(3, 1)
    assert (decoded == 1).all()


def test_padding_is_left_out_and_what_is_missing_is_no_score():
    found = GateScores([3], rows=4, heads=HEADS, device="cpu")
    scores = torch.rand(4, HEADS)
    found.put(3, scores)
    assert torch.equal(found.take(3, 2), scores[:2])
    with pytest.raises(RuntimeError, match="layer 3: attention of 2 tokens, and 0 went through"):
        found.take(3, 2)
    found.put(3, scores[:1])
    with pytest.raises(RuntimeError, match="attention of 2 tokens, and 1 went through"):
        found.take(3, 2)


def test_a_model_without_the_projection_is_refused_by_name():
    model = model_of(Attention(0, "qkv_proj"), Attention(1, "c_attn"))
    with pytest.raises(
        TangramError, match=r"layer 1: Attention has no module qkv_proj.*ModuleList"
    ):
        attach_gates(model, gate_file([0, 1]), rows=5)


def test_a_hook_never_waits_for_the_device():
    """Tensors without data: whatever asked for a value, as no captured graph may, would raise."""
    model = model_of(Attention(0, "qkv_proj")).to("meta")
    found = attach_gates(model, gate_file([0]), rows=5)
    model[0].qkv_proj(torch.empty(3, HIDDEN, device="meta"))
    scores = found.take(0, 3)
    assert (scores.device.type, scores.shape) == ("meta", (3, HEADS))
