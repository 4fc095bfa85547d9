"""Several requests on one text: what they reuse, and that none reads what another wrote."""

import dataclasses

import pytest
import torch

from tests.harness import Req
from tests.probes import watch
from tests.reference.tiny import random_tokens, save, tiny_llama
from tests.serving import TINY_ENV, logprob_gap, serve

pytestmark = pytest.mark.server

P = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return save(
        tiny_llama(seed=9, layers=3, q_heads=6, kv_heads=3), tmp_path_factory.mktemp("shared")
    )


def _users(document, **more):
    return [
        Req(
            document + random_tokens(20 + i, seed=10 + i), 8, rid=f"user{i}-", logprobs=True, **more
        )
        for i in range(8)
    ]


def test_eight_users_reuse_all_of_a_long_document_but_a_page(tmp_path):
    """3,000 tokens under the default windows, sealed long ago in the row that brought them.

    The state at the first prompt's end is windows 0..4 and raw tokens from 2,560 on; R of those lie
    in the document, so the users' state is exact.
    """
    torch.set_num_threads(1)
    folder = save(tiny_llama(seed=5, layers=1), tmp_path / "model")
    env = {"TANGRAM_RETENTION": "0.3"}
    document = random_tokens(3000, seed=1)
    first = Req(document + random_tokens(40, seed=2), 300, rid="first")
    warm = serve(folder, [first, *_users(document, after="first")], env=env)
    assert [warm[f"user{i}-"].cached_tokens for i in range(8)] == [2992] * 8
    cold = serve(folder, _users(document)[:1], env=env, disable_radix_cache=True)
    assert warm["user0-"].output_ids == cold["user0-"].output_ids
    assert logprob_gap(warm, cold) < 1e-4


def test_users_of_a_document_sealed_by_a_long_question_branch_one_window_earlier(tmp_path):
    """No raw tail ends in the document; five of its windows match and four are taken.

    Users who come once the first of them is through its prompt find the tail that it left.
    """
    torch.set_num_threads(1)
    folder = save(tiny_llama(seed=5, layers=1), tmp_path / "model")
    document = random_tokens(3000, seed=1)
    first = Req(document + random_tokens(400, seed=2), 5, rid="first")
    result = serve(
        folder, [first, *_users(document, after="first")], env={"TANGRAM_RETENTION": "0.3"}
    )
    cached = [result[f"user{i}-"].cached_tokens for i in range(8)]
    assert set(cached) <= {2048, 2992} and cached[0] == 2048


@pytest.mark.parametrize("retention", [1.0, 0.3])
def test_a_prompt_gives_the_same_answer_cold_cold_and_warm(folder, retention):
    """D1 (sgl-project/sglang#34683, modular/modular#6681); one request at a time."""
    env = {**TINY_ENV, "TANGRAM_RETENTION": str(retention)}
    prompt = random_tokens(203, seed=4)
    requests = [
        Req(prompt, 40, rid="cold0", logprobs=True, top_logprobs=3, fields={"extra_key": "a"}),
        Req(prompt, 40, rid="cold1", logprobs=True, top_logprobs=3, fields={"extra_key": "b"}),
        Req(prompt, 40, rid="warm0", logprobs=True, top_logprobs=3, fields={"extra_key": "a"}),
    ]
    for earlier, i in (("cold0", 1), ("cold1", 2)):
        requests[i] = dataclasses.replace(requests[i], after=earlier)
    result = serve(folder, requests, env=env, chunked_prefill_size=64)
    assert [result[r.rid].cached_tokens for r in requests] == [0, 0, 200]
    first, *others = (result[r.rid] for r in requests)
    for other in others:
        assert other.output_ids == first.output_ids
        assert logprob_gap({"x": other}, {"x": first}) < 1e-5


def _cancel_two(control):
    watch(control)
    gone = control.data.setdefault("gone", set())
    for rid, ready in (
        ("r1-", control.chunks_done("r1-") > 0),
        ("r2-", len(control.outputs["r2-"].output_ids) > 5),
    ):
        if ready and rid not in gone:
            gone.add(rid)
            control.abort(rid)


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_cancelled_and_retried_requests_leave_a_shared_prefix_whole(folder, overlap):
    """D3 (sgl-project/sglang#23392)."""
    env = {**TINY_ENV, "TANGRAM_RETENTION": "0.3"}
    prefix = random_tokens(64, seed=1)
    # their raw tails reach into the prefix, so that every hit is exact
    prompts = [prefix + random_tokens(5 + 3 * i, seed=20 + i) for i in range(4)]
    requests = [Req(prompt, 60, rid=f"r{i}-", logprobs=True) for i, prompt in enumerate(prompts)]
    alone = serve(folder, requests, env=env, disable_radix_cache=True)
    retried = [dataclasses.replace(requests[i], rid=f"again{i}-", after=f"r{i}-") for i in (1, 2)]
    result = serve(
        folder,
        requests + retried,
        env=env,
        overlap=overlap,
        on_step=_cancel_two,
        chunked_prefill_size=32,
    )
    assert [result[f"r{i}-"].finish_reason["type"] == "abort" for i in range(4)] == [0, 1, 1, 0]
    for rid, alone_rid in (("r0-",) * 2, ("again1-", "r1-"), ("again2-", "r2-"), ("r3-",) * 2):
        assert result[rid].output_ids == alone[alone_rid].output_ids
        assert logprob_gap({"x": result[rid]}, {"x": alone[alone_rid]}) < 1e-4
        assert rid == "r0-" or result[rid].cached_tokens >= 64 - P


def _tails(control):
    """Record which pages each decoding request writes to, one a group."""
    watch(control)
    rows = control.scheduler.token_to_kv_pool_allocator.get_kvcache().rows
    request_of = control.scheduler.req_to_token_pool.request_of
    decoding = [row for row, state in rows.live.items() if state.n > state.prompt]
    control.record(
        {request_of[x].rid: rows.tail_page(x, (rows.live[x].n - 1) // P).tolist() for x in decoding}
    )


def test_samples_of_one_prompt_write_to_pages_of_their_own(folder):
    """I8, D5 (sgl-project/sglang#5525, PR#2555): n=3, prompts of one chunk and of three.

    SGLang first runs the prompt for no token, then n requests. Samples differ, so a page written by
    two of them would show in the log-probabilities.
    """
    env = {**TINY_ENV, "TANGRAM_RETENTION": "0.3"}
    prompts = {"short": random_tokens(10, seed=1), "long": random_tokens(150, seed=2)}
    requests = []
    for name, prompt in prompts.items():
        requests.append(Req(prompt, 0, rid=f"prompt-{name}", fields={"stream": False}))
        requests += [
            Req(
                prompt,
                70,
                rid=f"{name}{i}-",
                after=f"prompt-{name}",
                logprobs=True,
                sampling={"temperature": 1.0},
            )
            for i in range(3)
        ]
    result = serve(folder, requests, env=env, on_step=_tails, chunked_prefill_size=64)
    samples = [result[f"{name}{i}-"] for name in prompts for i in range(3)]
    assert len({tuple(out.output_ids) for out in samples}) == 6
    assert [result[f"prompt-{name}"].cached_tokens for name in prompts] == [0, 0]
    assert [out.cached_tokens for out in samples] == [8] * 3 + [148] * 3

    together = [tails for tails in result.records[1::2] if len(tails) > 1]
    assert len(together) > 50
    for tails in together:
        pages = [page for tail in tails.values() for page in tail]
        assert len(set(pages)) == len(pages)

    # each sample's tokens, given as a prompt, are as likely as they were when they were drawn
    scored = [
        Req(
            out.prompt_ids + out.output_ids,
            1,
            rid=f"scored-{out.rid}",
            logprobs=True,
            prompt_logprobs_from=len(out.prompt_ids) - 1,
        )
        for out in samples
    ]
    cold = serve(folder, scored, env=env, disable_radix_cache=True)
    for out in samples:
        expected = cold[f"scored-{out.rid}"].prompt_logprobs[-len(out.output_ids) :]
        assert max(abs(a - b) for a, b in zip(out.logprobs, expected, strict=True)) < 1e-4
