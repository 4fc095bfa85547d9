"""A conversation goes on from compressed KV as it would without a cache, however answers end."""

import dataclasses
from collections import Counter

import pytest
import torch

from tests.harness import Req
from tests.plans import write_plan
from tests.reference.layout import layout_for
from tests.reference.tiny import (
    random_query_stats,
    random_tokens,
    save,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_llama,
)
from tests.serving import TINY_ENV, assert_reserved_exactly, logprob_gap, serve

pytestmark = pytest.mark.server

W, R, P = 32, 16, 4
END_OF_TEXT = tuple(range(10, 22))
STOP = tuple(range(30, 42))


MAKERS = {
    "llama": lambda: tiny_llama(seed=9, layers=3, q_heads=6, kv_heads=3),
    # every other layer sees 8 tokens, or some more than a window and its recent tokens
    "gemma3": lambda: tiny_gemma3(seed=9),
    "gemma3-wide": lambda: tiny_gemma3(seed=9, sliding_window=60),
    "gpt-oss": lambda: tiny_gpt_oss(seed=9, sliding_window=16),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models with twelve ends of text among their 256 tokens, so that answers do end by them."""
    torch.set_num_threads(1)
    made = {}

    def folder(name):
        if name not in made:
            model = MAKERS[name]()
            model.config.eos_token_id = model.generation_config.eos_token_id = list(END_OF_TEXT)
            made[name] = save(model, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.fixture
def folder(folders):
    return folders("llama")


def conversation(i, turns=5):
    """Turn after turn, each with its own kind of end; lengths meet no page or window border."""
    ends = (
        {"ignore_eos": False},
        {"ignore_eos": False, "stop_token_ids": STOP},
        {"ignore_eos": True},
    )
    return [
        Req(
            random_tokens(17 + 7 * turn if turn else 40 + 13 * i, seed=100 * i + turn),
            [40, 33, 1, 48, 20][(i + turn) % 5],
            rid=f"c{i}t{turn}-",
            after=f"c{i}t{turn - 1}-" if turn else "",
            continues=turn > 0,
            logprobs=True,
            top_logprobs=3,
            **ends[(i + turn) % 3],
        )
        for turn in range(turns)
    ]


@pytest.mark.parametrize(("name", "retention"), [("llama", 1.0), *((name, 0.3) for name in MAKERS)])
def test_five_turns_reuse_all_but_a_page_and_change_nothing(folders, name, retention):
    """Ten conversations; log-probabilities may differ by rounding, for batches differ."""
    folder = folders(name)
    env = {**TINY_ENV, "TANGRAM_RETENTION": str(retention)}
    requests = [r for i in range(10) for r in conversation(i)]
    # nothing may be evicted
    arguments = {"chunked_prefill_size": 64, "max_total_tokens": 30_000}
    cold = serve(folder, requests, env=env, disable_radix_cache=True, **arguments)
    ends = Counter(
        "length" if out.finish_reason["type"] == "length" else out.finish_reason["matched"] in STOP
        for out in cold.outputs.values()
    )
    # tiny Gemmas like few tokens
    stops, texts = (1, 1) if "gemma" in name else (5, 10)
    assert ends["length"] >= 10 and ends[True] >= stops and ends[False] >= texts, ends
    for overlap in (False, True):
        warm = serve(folder, requests, env=env, overlap=overlap, **arguments)
        assert warm.tokens == cold.tokens
        assert logprob_gap(warm, cold) < 1e-4
        assert_reserved_exactly(warm)
        for request in requests:
            output = warm[request.rid]
            if request.continues:
                said = len(output.prompt_ids) - len(request.input_ids)
                # the last token of an answer is not stored, unless overlap ran a step too many
                stopped = warm[request.after].finish_reason["type"] == "stop"
                last = said if overlap and stopped else said - 1
                assert said - 1 - P < output.cached_tokens <= last
            else:
                assert output.cached_tokens == 0
            assert cold[request.rid].cached_tokens == 0


def test_a_rewritten_answer_goes_on_from_the_end_of_its_prompt(folder):
    """A chat template that strips or rewrites the last answer leaves its prompt's state usable.

    That state ends in raw tokens, which a long answer has sealed in the request that said it.
    """
    env = {**TINY_ENV, "TANGRAM_RETENTION": "0.3"}
    # a raw tail that crosses a window border, one of R tokens and a few, one in between
    lengths = [(n, answer) for n in (161, 176, 190) for answer in (3, 40, 110)]
    requests = []
    for n, answer in lengths:
        prompt, rid = random_tokens(n, seed=n + answer), f"{n}and{answer}-"
        requests.append(Req(prompt, answer, rid=f"first{rid}"))
        rewritten = prompt + random_tokens(30, seed=n + answer + 1000)
        requests.append(
            Req(rewritten, 12, rid=f"next{rid}", after=f"first{rid}", logprobs=True, top_logprobs=3)
        )
    alone = [dataclasses.replace(r, after="") for r in requests[1::2]]
    cold = serve(folder, alone, env=env, disable_radix_cache=True)
    # nothing may be evicted here: a request whose raw tail went branches
    arguments = {"chunked_prefill_size": 64, "max_total_tokens": 16_000}
    for overlap in (False, True):
        warm = serve(folder, requests, env=env, overlap=overlap, **arguments)
        assert {rid: warm.tokens[rid] for rid in cold.tokens} == cold.tokens
        assert logprob_gap(warm, cold) < 1e-4
        for n, answer in lengths:
            assert n - P < warm[f"next{n}and{answer}-"].cached_tokens <= n


@pytest.mark.parametrize("scorer", ["keydiff", "expected_attention"])
def test_what_is_kept_does_not_depend_on_the_question_and_the_answer_stays(tmp_path, scorer):
    """D11 (AnswerDotAI/cold-compress#42, NVIDIA/kvpress#154).

    Two questions about one document, each with a cache of its own; then a second turn.
    """
    model = tiny_llama(seed=9, layers=2, q_heads=6, kv_heads=3)
    folder = save(model, tmp_path / "model")
    stats = random_query_stats(model) if scorer == "expected_attention" else None
    path, budgets = write_plan(model, tmp_path, scorer=scorer, window=W, stats=stats)
    env = {**TINY_ENV, "TANGRAM_PLAN": str(path), "TANGRAM_RETENTION": "0.3"}
    document, answer = random_tokens(200, seed=1), 3 * W
    requests = [
        Req(document + random_tokens(21, seed=2), answer, rid="first", fields={"extra_key": "a"}),
        Req(document + random_tokens(33, seed=3), 8, rid="other", fields={"extra_key": "b"}),
        Req(
            random_tokens(70, seed=4),
            8,
            rid="second",
            after="first",
            continues=True,
            fields={"extra_key": "a"},
        ),
    ]
    result = serve(folder, requests, env=env)
    assert result["other"].cached_tokens == 0
    kept = result.collected["kept"]
    for (layer, head, window), positions in kept["other"].items():
        if (window + 1) * W <= len(document):
            assert kept["first"][layer, head, window] == positions

    stored = 221 + answer - 1
    assert stored - P < result["second"].cached_tokens <= stored
    # every window of the answer that turn 2 sees sealed has as many tokens as any other
    layout = layout_for(model, retention=0.3, budgets=budgets, window=W, recent=R, page=P)
    both = {**kept["first"], **kept["second"]}
    for window in range(len(document) // W, stored // W):
        for (layer, head), (group, _) in layout.place.items():
            positions = both[layer, head, window]
            assert len(positions) == layout.groups[group].kept
            assert set(positions) <= set(range(window * W, (window + 1) * W))
