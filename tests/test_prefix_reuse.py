"""Prefixes are reused on compressed KV, and a continued conversation does not notice."""

import dataclasses
from functools import partial

import pytest
import torch

from tests.harness import Req
from tests.probes import watch
from tests.reference.tiny import random_tokens, save, tiny_gemma3, tiny_gpt_oss, tiny_llama
from tests.serving import TINY_ENV, assert_reserved_exactly, serve

pytestmark = pytest.mark.server

W, P = 32, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return save(
        tiny_llama(seed=9, layers=3, q_heads=6, kv_heads=3), tmp_path_factory.mktemp("reuse")
    )


def conversation(name, seed, turns=5, first=90):
    """A chat of ``turns`` turns; every turn's prompt is all that was said before and 20-odd more."""
    lengths = [first, *(17 + 7 * i for i in range(1, turns))]
    return [
        Req(
            random_tokens(n, seed=100 * seed + i),
            [40, 33, 1, 64, 20][i % 5],
            rid=f"{name}{i}-",
            after=f"{name}{i - 1}-" if i else "",
            continues=i > 0,
        )
        for i, n in enumerate(lengths)
    ]


def test_another_user_of_a_document_reuses_its_windows_but_one(folder):
    env = {**TINY_ENV, "TANGRAM_RETENTION": "0.3"}
    document = random_tokens(300, seed=1)
    requests = [Req(document + random_tokens(10, seed=2), 10, rid="first")]
    requests += [
        Req(document + random_tokens(9 + i, seed=10 + i), 10, rid=f"user{i}-", after="first")
        for i in range(4)
    ]
    result = serve(folder, requests, env=env)
    for i in range(4):
        # 9 windows and 12 raw tokens match; fewer than R are raw, so the last window goes again
        assert result[f"user{i}-"].cached_tokens == (300 // W - 1) * W


def test_a_branch_lands_one_window_earlier_and_equals_a_branch_of_full_kv_at_retention_1(folder):
    """At retention 1 a window more or less makes no difference to any query."""
    env = {**TINY_ENV, "TANGRAM_RETENTION": "1.0"}
    document = random_tokens(300, seed=1)
    # the tail of the first request starts behind window 8; the second leaves it before that
    branch = document[:200] + random_tokens(40, seed=3)
    requests = [Req(document, 10, rid="first"), Req(branch, 20, rid="branch", after="first")]
    result = serve(folder, requests, env=env)
    alone = serve(folder, [Req(branch, 20, rid="branch")], env=env)
    assert result["branch"].cached_tokens == (200 // W - 1) * W
    assert result["branch"].output_ids == alone["branch"].output_ids


def test_the_same_prompt_again_leaves_a_token_to_compute(folder):
    """B9 (lablup/mlxcel#183): a prompt of whole pages and whole chunks, three times."""
    env = {**TINY_ENV, "TANGRAM_RETENTION": "0.3"}
    prompt = random_tokens(128, seed=4)
    requests = [Req(prompt, 12, rid="r0-")]
    requests += [Req(prompt, 12, rid=f"r{i}-", after=f"r{i - 1}-") for i in (1, 2)]
    result = serve(folder, requests, env=env, chunked_prefill_size=64)
    assert result["r0-"].output_ids == result["r1-"].output_ids == result["r2-"].output_ids
    assert [result[f"r{i}-"].cached_tokens for i in range(3)] == [0, 124, 124]


@pytest.mark.parametrize(
    ("make", "slide"), [(tiny_gemma3, 44), (tiny_gpt_oss, 8)], ids=["gemma3-44", "gpt-oss-8"]
)
def test_with_sliding_layers_a_request_starts_where_a_chunk_a_prompt_or_an_answer_ended(
    tmp_path, make, slide
):
    """Only there does the cache have the windows of those layers, some of more tokens than W."""
    folder = save(make(seed=9, sliding_window=slide), tmp_path / "model")
    env = {**TINY_ENV, "TANGRAM_RETENTION": "0.3"}
    document, alone = random_tokens(300, seed=1), random_tokens(300, seed=2)
    requests = [
        # their last chunks are shorter than R: they go back to the chunk before
        Req(document + random_tokens(10, seed=3), 10, rid="first"),
        Req(document + random_tokens(20, seed=4), 10, rid="user", after="first"),
        Req(document + random_tokens(10, seed=3), 10, rid="again", after="user"),
        Req(alone, 0, rid="alone", after="again"),
        Req(alone + random_tokens(20, seed=5), 40, rid="exact", after="alone"),
        Req(random_tokens(20, seed=6), 10, rid="turn", after="exact", continues=True),
        Req(alone[:200] + random_tokens(20, seed=5), 10, rid="inside", after="turn"),
    ]
    arguments = {"chunked_prefill_size": 64}
    for overlap in (False, True):
        warm = serve(folder, requests, env=env, overlap=overlap, **arguments)
        found = [warm[r.rid].cached_tokens for r in requests]
        assert found == [0, 256, 308, 0, 300, 356, 192]
        again = [Req(warm[r.rid].prompt_ids, r.max_new_tokens, rid=r.rid) for r in requests]
        cold = serve(folder, again, env=env, disable_radix_cache=True, **arguments)
        assert warm.tokens == cold.tokens
        assert_reserved_exactly(warm)


def test_pressure_evicts_and_answers_stay_the_same(folder):
    """At retention 1, where a conversation whose raw tail went and which branches is exact too."""
    env = {**TINY_ENV, "TANGRAM_RETENTION": "1.0"}
    requests = [r for i in range(8) for r in conversation(f"c{i}x", 20 + i, turns=3)]
    cold = serve(folder, requests, env=env, disable_radix_cache=True)
    for overlap in (False, True):
        warm = serve(folder, requests, env=env, max_total_tokens=1600, overlap=overlap)
        assert warm.tokens == cold.tokens
        assert_reserved_exactly(warm)
        hits = sum(out.cached_tokens for out in warm.outputs.values())
        assert 0 < hits < sum(len(out.prompt_ids) for out in warm.outputs.values())


def _retract(control):
    watch(control)
    if control.step in (12, 30, 60):
        control.force_retract()


def test_retraction_with_a_cache_changes_nothing(folder):
    env = {**TINY_ENV, "TANGRAM_RETENTION": "0.3"}
    requests = [r for i in range(4) for r in conversation(f"c{i}x", 40 + i, turns=2)]
    cold = serve(folder, requests, env=env, disable_radix_cache=True)
    for overlap in (False, True):
        warm = serve(folder, requests, env=env, on_step=_retract, overlap=overlap)
        assert len(warm.retractions) >= 2
        assert warm.tokens == cold.tokens


def _abort(step, control):
    watch(control)
    if control.step == step:
        control.abort("gone")


@pytest.mark.parametrize("step", [1, 2, 3, 5, 9])
def test_an_aborted_request_leaves_only_right_pages_behind(folder, step):
    """B1 (sgl-project/sglang#38319): pages published in mid-prefill, then the request again."""
    env = {**TINY_ENV, "TANGRAM_RETENTION": "0.3"}
    prompt = random_tokens(200, seed=5)
    alone = serve(folder, [Req(prompt, 20, rid="x")], env=env)["x"].output_ids
    for overlap in (False, True):
        requests = [Req(prompt, 20, rid="gone"), Req(prompt, 20, rid="again", after="gone")]
        result = serve(
            folder,
            requests,
            env=env,
            overlap=overlap,
            on_step=partial(_abort, step),
            chunked_prefill_size=64,
        )
        assert result["again"].output_ids == alone


def _change_plan(control):
    """As if this process served another plan from now on."""
    watch(control)
    pool = control.scheduler.token_to_kv_pool_allocator.get_kvcache()
    if control.outputs["salted"].finished:
        pool.plan = dataclasses.replace(pool.plan, digest="another plan's")


def test_namespaces_share_nothing(folder):
    """D7 (sgl-project/sglang#24638, LMCache/LMCache#2961): key, adapter, salt and plan.

    SGLang puts the adapter's id into the extra key.
    """
    env = {**TINY_ENV, "TANGRAM_RETENTION": "0.3"}
    prompt = random_tokens(150, seed=6)
    of_namespace = {
        "plain": {},
        "keyed": {"extra_key": "a"},
        "again-keyed": {"extra_key": "a"},
        "adapter": {"lora_id": "b"},
        "again-adapter": {"lora_id": "b"},
        "both": {"extra_key": "a", "lora_id": "b"},
        "salted": {"cache_salt": "a"},
        "other-plan": {},
        "again-other-plan": {},
    }
    requests, before = [], ""
    for rid, fields in of_namespace.items():
        requests.append(Req(prompt, 5, rid=f"{rid}", after=before, fields=fields))
        before = rid
    result = serve(folder, requests, env=env, on_step=_change_plan)
    again = {"again-keyed", "again-adapter", "again-other-plan"}
    assert {r.rid: result[r.rid].cached_tokens for r in requests} == {
        rid: 148 if rid in again else 0 for rid in of_namespace
    }
    assert len({tuple(tokens) for tokens in result.tokens.values()}) == 1


def test_dfs_weight_admits_users_of_a_document_one_after_the_other(folder):
    """Two documents in the cache, users of both in turn: first those of the one with more users."""
    documents = {name: random_tokens(200, seed=i) for i, name in enumerate("xy")}
    requests = [Req(document, 4, rid=f"{name}-") for name, document in documents.items()]
    requests += [
        # all wait when both documents have been read
        Req(documents[name] + random_tokens(9, seed=20 + i), 4, rid=f"{name}{i}-", after="y-")
        for i, name in enumerate("xyxyy")
    ]
    requests.append(Req(random_tokens(20, seed=40), 4, rid="alone", after="y-"))
    plain = serve(folder, requests)
    result = serve(folder, requests, schedule_policy="dfs-weight")
    assert result.tokens == plain.tokens
    order = list(dict.fromkeys(rid for batch in result.batches for rid in batch.rids))
    assert [rid[0] for rid in order] == list("xyyyyxxa")


def test_a_forced_miss_computes_all_and_answers_the_same(folder):
    document = random_tokens(150, seed=1)
    requests = [Req(document, 20, rid="first"), Req([*document, 9], 20, rid="again", after="first")]
    plain = serve(folder, requests)
    missed = serve(folder, requests, env={**TINY_ENV, "SGLANG_RADIX_FORCE_MISS": "1"})
    assert plain["again"].cached_tokens > 0 and missed["again"].cached_tokens == 0
    assert missed.tokens == plain.tokens
