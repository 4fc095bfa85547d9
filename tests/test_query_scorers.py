"""Scorers that read queries, served: the kept set is the reference's, however the tokens came."""

import pytest
import torch

from tests.harness import Req
from tests.plans import write_plan
from tests.probes import watch
from tests.reference.layout import layout_for
from tests.reference.run import CompressedRun
from tests.reference.scorers import SCORERS, Asked, select
from tests.reference.tiny import random_tokens, save, tiny_gemma3, tiny_llama, tiny_qwen3
from tests.serving import TINY_ENV, assert_reserved_exactly, assert_same_kept, serve

pytestmark = pytest.mark.server

W, R, P = 32, 16, 4
LENGTHS = [700, 5, 64, 65, 1, 333, 48, 129]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Model, its folder, budgets and environment."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("queries")
    model = tiny_llama(seed=4, layers=2, q_heads=6, kv_heads=3)
    save(model, folder / "model")
    path, budgets = write_plan(model, folder)
    env = {**TINY_ENV, "TANGRAM_PLAN": str(path), "TANGRAM_RETENTION": "0.4"}
    return model, folder / "model", budgets, env


def reference_of(model, scorer, budgets=None):
    layout = layout_for(model, retention=0.4, budgets=budgets, window=W, recent=R, page=P)
    return layout, CompressedRun(model, layout, scorer)


def requests():
    return [Req(random_tokens(n, seed=n), 40, rid=f"p{i}-") for i, n in enumerate(LENGTHS)]


def _retract_twice(control):
    watch(control)
    if control.step in (25, 40):
        control.force_retract()


@pytest.mark.parametrize("scorer", ["snapkv", "tova"])
def test_chunks_batches_and_preemption_change_nothing(served, scorer):
    """Eight requests at once, in any chunks, against each one's reference."""
    model, folder, budgets, env = served
    env = {**env, "TANGRAM_SCORER": scorer}
    runs = [
        {"chunked_prefill_size": 2048},
        {"chunked_prefill_size": 257, "on_step": _retract_twice, "overlap": True},
        {"chunked_prefill_size": 64, "overlap": True},
    ]
    results = [serve(folder, requests(), env=env, **run) for run in runs]
    assert len(results[1].retractions) == 2
    for i, request in enumerate(requests()):
        layout, reference = reference_of(model, scorer, budgets)
        answer = reference.greedy(request.input_ids, 40)
        stored = layout.rule.sealed(LENGTHS[i] + 39)
        expected = {key: kept for key, kept in reference.kept.items() if key[2] < stored}
        for result in results:
            assert result[request.rid].output_ids == answer
            assert_same_kept(result.collected["kept"].get(request.rid, {}), expected)
    for result in results:
        assert_reserved_exactly(result)


def test_turns_go_on_from_what_holds_the_queries_and_equal_the_reference(served):
    """A hit ends before the first query that the cache would have to hold: w is 8 here."""
    model, folder, budgets, env = served
    env = {**env, "TANGRAM_SCORER": "snapkv"}
    # stored before each turn: 153, 247 and 355 tokens, raw behind 4, 7 and 10 windows
    turns = [random_tokens(n, seed=n) for n in (90, 31, 44, 26)]
    chat = [
        Req(turn, 64, rid=f"turn{i}", after=f"turn{i - 1}" if i else "", continues=i > 0)
        for i, turn in enumerate(turns)
    ]
    result = serve(folder, chat, env=env, chunked_prefill_size=64, overlap=True)
    layout, reference = reference_of(model, "snapkv", budgets)
    said, found = 0, {}
    for request, turn in zip(chat, turns, strict=True):
        assert result[request.rid].output_ids == reference.greedy(turn, 64)
        windows = layout.rule.sealed(max(1, said - 1))
        tail = min(said - 1 - windows * W, W - 8) // P * P
        assert result[request.rid].cached_tokens == (windows * W + tail if said else 0)
        said += len(turn) + 64
        found |= result.collected["kept"].get(request.rid, {})
    stored = layout.rule.sealed(said - 1)
    assert_same_kept(found, {k: v for k, v in reference.kept.items() if k[2] < stored})
    assert_reserved_exactly(result)


def test_a_scorer_of_whole_windows_starts_behind_sealed_ones_only(served):
    """Of 300 shared tokens 9 windows are sealed; R raw tokens more would need their queries."""
    _, folder, _, env = served
    env = {**env, "TANGRAM_SCORER": "expected_attention_local"}
    document = random_tokens(300, seed=1)
    first = Req(document + random_tokens(10, seed=2), 40, rid="first")
    user = Req(document + random_tokens(60, seed=3), 40, rid="user", after="first")
    result = serve(folder, [first, user], env=env, chunked_prefill_size=64)
    assert result["user"].cached_tokens == 8 * W
    assert_reserved_exactly(result)


def test_queries_are_paid_for_in_a_tight_pool(served):
    """Pages of queries are in every promise: requests wait or are retracted, none fails."""
    _, folder, _, env = served
    env = {**env, "TANGRAM_SCORER": "snapkv", "TANGRAM_POOL_BYTES": "300000"}
    chat = [Req(random_tokens(150, seed=i), 60, rid=f"r{i}-") for i in range(6)]
    roomy = serve(folder, chat, env={**env, "TANGRAM_POOL_BYTES": "20000000"})
    # 6 heads of 2 layers with 2 query heads each, 8 queries a window, in pages of 32 vectors of 64 bytes
    assert "queries=8 a window (up to 6144 bytes a request)" in roomy.log
    tight = serve(folder, chat, env=env, overlap=True)
    print(f"{tight.collected['capacity']} tokens, {len(tight.retractions)} retractions")
    assert tight.collected["capacity"] < sum(len(r.input_ids) + 60 for r in chat)
    assert tight.tokens == roomy.tokens
    assert_reserved_exactly(tight)


@pytest.mark.parametrize(
    ("make", "scorer"),
    [(tiny_qwen3, "snapkv"), (tiny_gemma3, "expected_attention_local")],
    ids=["qwen3", "gemma3"],
)
def test_a_scorer_sees_queries_and_keys_behind_their_norm(tmp_path, make, scorer):
    """H13 (NVIDIA/kvpress#275): Qwen3, where the weights of both norms are 3, and Gemma 3."""
    torch.set_num_threads(1)
    model = make(seed=2)
    folder = save(model, tmp_path / "model")
    prompt = random_tokens(150, seed=3)
    env = {**TINY_ENV, "TANGRAM_RETENTION": "0.4", "TANGRAM_SCORER": scorer}
    result = serve(folder, [Req(prompt, 40, rid="a")], env=env, chunked_prefill_size=50)
    layout, reference = reference_of(model, scorer)
    assert result["a"].output_ids == reference.greedy(prompt, 40)
    kept = {key: p for key, p in reference.kept.items() if key[2] < layout.rule.sealed(189)}
    assert_same_kept(result.collected["kept"]["a"], kept)
    # without weights of 3 other tokens would have been chosen
    forgotten = 0
    for (layer, head, j), positions in kept.items():
        k, v = (x[layer][head, j * W : (j + 1) * W] for x in (reference._k, reference._v))
        q, *rest = reference._asked(layer, head, j * W, (j + 1) * W)
        sinks = layout.rule.sinks if j == 0 else 0
        scores = SCORERS[scorer](k / 3, v, j * W, sinks, 0, None, Asked(q / 3, *rest))
        forgotten += select(scores, len(positions), sinks) != [p - j * W for p in positions]
    assert forgotten > len(kept) / 2


def test_a_prompt_shorter_than_what_the_scorer_reads_is_served_as_stock_sglang_does(served):
    """H3 (NVIDIA/kvpress#134, PR#153): a prompt of 5 tokens, 8 queries read of each window."""
    _, folder, _, env = served
    prompt = random_tokens(5, seed=5)
    stock = serve_stock(folder, prompt)
    result = serve(folder, [Req(prompt, 20, rid="a")], env={**env, "TANGRAM_SCORER": "snapkv"})
    assert result["a"].output_ids == stock
    assert result.collected["kept"] == {}


def serve_stock(folder, prompt):
    from tests.harness import run_scenario

    arguments = {"attention_backend": "torch_native"}
    return run_scenario(folder, [Req(prompt, 20, rid="a")], server_args=arguments)["a"].output_ids


def test_eight_query_heads_on_two_kv_heads_hold_two_heads_of_kv(tmp_path):
    """H7 (FasterDecoding/SnapKV#16, FYYFU/HeadKV#3): bytes are those of KV heads."""
    torch.set_num_threads(1)
    folder = save(tiny_llama(seed=3, layers=1, q_heads=8, kv_heads=2), tmp_path / "model")
    env = {**TINY_ENV, "TANGRAM_RETENTION": "0.5", "TANGRAM_SCORER": "snapkv"}
    env |= {"TANGRAM_GROUP_HEADS": "2", "TANGRAM_RECENT": "0"}
    # right behind a border: three sealed windows and a raw token, no queries
    request = Req(random_tokens(3 * W + 1, seed=1), 3, rid="a")
    result = serve(folder, [request], env=env, disable_radix_cache=True)
    kept = result.collected["kept"]["a"]
    assert {len(positions) for positions in kept.values()} == {W // 2}
    page_bytes = 2 * P * 2 * 16 * 4
    rows = [rows for record in result.records for rows in record["rows"].values()]
    (held,) = {pages for n, pages, _ in rows if n == 3 * W + 1}
    assert held * page_bytes == 2 * (3 * W // 2 + P) * 16 * 2 * 4
