"""Scorer fastkvzip, served: the kept set is the reference's, however the tokens came."""

import pytest
import torch

from tangram_sglang.plan.gates import save_gates
from tests.harness import Req, ScenarioFailed, run_scenario
from tests.plans import write_plan
from tests.reference import CompressedRun, layout_for
from tests.reference.tiny import (
    random_gates,
    random_tokens,
    save,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_llama,
    tiny_qwen3,
)
from tests.serving import TINY_ENV, assert_reserved_exactly, assert_same_kept, serve

pytestmark = pytest.mark.server

W, R, P = 32, 16, 4
LENGTHS = [333, 5, 64, 65, 129]


def write_gates(model, path, gates) -> str:
    """The gate file of a Hugging Face model."""
    kinds = getattr(model.config, "layer_types", None)
    layers = range(model.config.num_hidden_layers)
    save_gates(
        path,
        gates,
        layers=[i for i in layers if kinds is None or kinds[i] == "full_attention"],
        model="tiny",
        hf_config=model.config,
        recipe={"made": "up"},
        corpus_hash="0" * 64,
    )
    return str(path)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Model, its folder, gates, budgets and environment."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("gates")
    # 10 heads, and a page has room for the scores of 8
    model = tiny_llama(seed=4, layers=2, q_heads=10, kv_heads=5, head_dim=8)
    save(model, folder / "model")
    gates = random_gates(model, seed=1)
    path, budgets = write_plan(model, folder)
    env = {
        **TINY_ENV,
        "TANGRAM_PLAN": str(path),
        "TANGRAM_RETENTION": "0.4",
        "TANGRAM_GROUP_HEADS": "1",
        "TANGRAM_SCORER": "fastkvzip",
        "TANGRAM_GATES": write_gates(model, folder / "gates.safetensors", gates),
    }
    return model, folder / "model", gates, budgets, env


def reference_of(model, gates, budgets=None, group_heads=1):
    layout = layout_for(
        model,
        retention=0.4,
        budgets=budgets,
        window=W,
        recent=R,
        page=P,
        group_heads=group_heads,
    )
    return layout, CompressedRun(model, layout, "fastkvzip", gates=gates)


def requests():
    return [Req(random_tokens(n, seed=n), 24, rid=f"p{i}-") for i, n in enumerate(LENGTHS)]


def _retract_twice(control):
    from tests.probes import watch

    watch(control)
    if control.step in (12, 20):
        control.force_retract()


def test_chunks_batches_and_preemption_change_nothing(served):
    """Five requests at once, in any chunks, against each one's reference."""
    model, folder, gates, budgets, env = served
    runs = [
        {"chunked_prefill_size": 2048},
        {"chunked_prefill_size": 257, "on_step": _retract_twice, "overlap": True},
        {"chunked_prefill_size": 64, "overlap": True},
    ]
    results = [serve(folder, requests(), env=env, **run) for run in runs]
    assert len(results[1].retractions) == 2
    assert "groups=10x1 heads" in results[0].log
    assert "(scores take 20.0% of raw pages)" in results[0].log
    for i, request in enumerate(requests()):
        layout, reference = reference_of(model, gates, budgets)
        answer = reference.greedy(request.input_ids, 24)
        stored = layout.rule.sealed(LENGTHS[i] + 23)
        expected = {key: kept for key, kept in reference.kept.items() if key[2] < stored}
        for result in results:
            assert result[request.rid].output_ids == answer
            assert_same_kept(result.collected["kept"].get(request.rid, {}), expected)
    for result in results:
        assert_reserved_exactly(result)


def test_turns_go_on_from_raw_tokens_and_their_scores(served):
    """Scores are shared with the raw pages: each turn starts at the last whole page, and is exact."""
    model, folder, gates, budgets, env = served
    turns = [random_tokens(n, seed=n) for n in (90, 31, 44, 26)]
    chat = [
        Req(turn, 64, rid=f"turn{i}", after=f"turn{i - 1}" if i else "", continues=i > 0)
        for i, turn in enumerate(turns)
    ]
    result = serve(folder, chat, env=env, chunked_prefill_size=64, overlap=True)
    layout, reference = reference_of(model, gates, budgets)
    said, found = 0, {}
    for request, turn in zip(chat, turns, strict=True):
        assert result[request.rid].output_ids == reference.greedy(turn, 64)
        assert result[request.rid].cached_tokens == max(0, said - 1) // P * P
        said += len(turn) + 64
        found |= result.collected["kept"].get(request.rid, {})
    stored = layout.rule.sealed(said - 1)
    assert_same_kept(found, {k: v for k, v in reference.kept.items() if k[2] < stored})
    assert_reserved_exactly(result)


def test_scores_are_paid_for_in_a_tight_pool(served):
    """Pages of scores are in every promise: requests wait or are retracted, none fails."""
    _, folder, _, _, env = served
    chat = [Req(random_tokens(150, seed=i), 60, rid=f"r{i}-") for i in range(6)]
    roomy = serve(folder, chat, env={**env, "TANGRAM_POOL_BYTES": "20000000"})
    tight = serve(folder, chat, env={**env, "TANGRAM_POOL_BYTES": "300000"}, overlap=True)
    print(f"{tight.collected['capacity']} tokens, {len(tight.retractions)} retractions")
    assert tight.collected["capacity"] < sum(len(r.input_ids) + 60 for r in chat)
    assert tight.tokens == roomy.tokens
    assert_reserved_exactly(tight)


@pytest.mark.parametrize(
    "make", [tiny_qwen3, tiny_gemma3, tiny_gpt_oss], ids=["qwen3", "gemma3", "gpt-oss"]
)
def test_other_models_are_read_where_they_project(tmp_path, make):
    """Gemma 3 has layers with a sliding window, which need no gate."""
    torch.set_num_threads(1)
    model = make(seed=2)
    folder = save(model, tmp_path / "model")
    gates = random_gates(model, seed=5)
    prompt = random_tokens(150, seed=3)
    env = {**TINY_ENV, "TANGRAM_RETENTION": "0.4", "TANGRAM_SCORER": "fastkvzip"}
    env["TANGRAM_GATES"] = write_gates(model, tmp_path / "gates.safetensors", gates)
    result = serve(folder, [Req(prompt, 40, rid="a")], env=env, chunked_prefill_size=50)
    layout, reference = reference_of(model, gates, group_heads=4)
    assert result["a"].output_ids == reference.greedy(prompt, 40)
    kept = {key: p for key, p in reference.kept.items() if key[2] < layout.rule.sealed(189)}
    assert_same_kept(result.collected["kept"]["a"], kept)


def refused(folder, env) -> ScenarioFailed:
    with pytest.raises(ScenarioFailed) as failure:
        run_scenario(folder, [Req([9], 1)], server_args={"attention_backend": "tangram"}, env=env)
    assert failure.value.error_type.endswith("TangramError"), failure.value
    return failure.value


def test_gates_that_are_missing_or_another_models_are_refused_before_weights_are_read(
    served, tmp_path
):
    _, folder, _, _, env = served
    failure = refused(folder, {k: v for k, v in env.items() if k != "TANGRAM_GATES"})
    assert failure.stage == "arguments"
    assert "plan-keydiff.json names none; give TANGRAM_GATES a file" in str(failure.error)
    other = tiny_llama(seed=4, layers=3, q_heads=10, kv_heads=5, head_dim=8)
    save(other, tmp_path / "other")
    path = write_gates(other, tmp_path / "other.safetensors", random_gates(other))
    failure = refused(folder, {**env, "TANGRAM_GATES": path})
    assert failure.stage == "arguments"
    assert "num_hidden_layers is 3 in the gate file and 2 in the model" in str(failure.error)
