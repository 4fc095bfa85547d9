"""bench/gate.py and bench/lively.py: a gate that a wrong answer fails, and so does a mute model."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from bench import gate
from bench.gate import Step, distance, judge
from bench.lively import norm_weights, save_norms
from bench.shapes import SHAPES


def step(token: int, **top: float) -> Step:
    return Step(token, {int(name[1:]): value for name, value in top.items()})


def test_distance_is_the_largest_difference_while_histories_are_equal():
    one = [step(1, t1=-0.5, t2=-2.0), step(3, t3=-0.1, t4=-4.0)]
    other = [step(1, t1=-0.6, t2=-2.0), step(3, t3=-0.3, t4=-4.0)]
    assert distance(one, one) == 0
    assert distance(one, other) == pytest.approx(0.2)


def test_a_tie_counts_by_its_gap_and_ends_the_comparison():
    one = [step(1, t1=-0.70, t2=-0.72), step(5, t5=-0.1)]
    other = [step(2, t1=-0.71, t2=-0.69), step(9, t9=-3.0)]
    assert distance(one, other) == pytest.approx(0.01)


def test_another_choice_that_is_no_tie_is_far_away():
    one, other = [step(1, t1=-0.1, t2=-3.0)], [step(2, t1=-3.0, t2=-0.1)]
    assert distance(one, other) == pytest.approx(1.45)
    # a choice that the other does not even list is at least as unlikely as those listed
    assert distance(one, [step(7, t7=-0.1, t8=-5.0)]) == pytest.approx(2.45)


def test_a_verdict_needs_equal_answers_and_a_control_that_differs():
    assert judge([0.01, 0.1], [0.0, 0.9], 0.15).passed
    wrong = judge([0.01, 0.2], [0.9], 0.15)
    assert not wrong.passed
    assert wrong.text.startswith("failed: 0.200 from stock")
    mute = judge([0.0], [0.29], 0.15)
    assert not mute.passed
    assert mute.text.startswith("shows nothing")
    assert not judge([math.nan], [0.9], 0.15).passed
    assert not judge([0.0], [math.nan], 0.15).passed


def test_the_gate_asks_all_three_the_same(monkeypatch):
    asked = []

    def post(url, body):
        asked.append((url, tuple(body["input_ids"])))
        lower = -0.9 if url.startswith("small") else -0.1
        return {
            "meta_info": {
                "output_token_logprobs": [[lower, 4, None]],
                "output_top_logprobs": [[[lower, 4, None], [-5.0, 6, None]]],
            }
        }

    monkeypatch.setattr(gate, "post", post)
    prompts = gate.prompts(100, gate.lengths(8))
    verdict = gate.check("stock", "whole", "small", prompts, 0.15)
    assert verdict == gate.Verdict(
        True, "passed: 0.000 from stock, compressed 0.800, tolerance 0.15"
    )
    seen = {
        name: [p for url, p in asked if url == f"{name}/generate"] for name in ("stock", "whole")
    }
    # they are asked all at once, in any order
    assert sorted(seen["stock"]) == sorted(seen["whole"]) == sorted(tuple(p) for p in prompts)
    assert [len(p) for p in prompts] == [4, 17, 40, 96]
    assert min(map(min, prompts)) >= 8


@pytest.mark.parametrize(("name", "more"), [("llama-3.1-8b", 0), ("qwen3-4b", 2)])
def test_all_norms_get_weights_with_signs_of_their_own(name, more, tmp_path):
    config = json.loads((SHAPES / f"{name}.json").read_text())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    folder = save_norms(tmp_path / "model", tmp_path / "norms")
    weights = load_file(folder / "model.safetensors")
    assert len(weights) == 1 + (2 + more) * config["num_hidden_layers"]
    assert all(torch.equal(weights[x], w) for x, w in norm_weights(config).items())
    first, second = (weights[f"model.layers.{i}.input_layernorm.weight"].sign() for i in (1, 2))
    assert 0.4 < (first == second).float().mean() < 0.6


def test_queries_of_a_dummy_model_get_the_spread_asked_for():
    config = {
        **{"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 2},
        "rms_norm_eps": 1e-5,
    }
    weights = norm_weights(config)
    generator = torch.Generator().manual_seed(1)
    dummy = torch.empty(512, 1024).uniform_(-1e-3, 1e-3, generator=generator)
    x = torch.empty(1024).uniform_(-1e-3, 1e-3, generator=generator)
    normed = torch.nn.functional.rms_norm(x, (1024,), eps=1e-5)
    queries = dummy @ (normed * weights["model.layers.0.input_layernorm.weight"])
    assert queries.std() == pytest.approx(1.5, rel=0.15)


def test_other_models_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text"}')
    with pytest.raises(ValueError, match="expected llama or qwen3"):
        save_norms(tmp_path, tmp_path / "norms")
