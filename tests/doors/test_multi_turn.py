"""Every door of SGLang reuses compressed prefixes, all but a page, and answers as without them."""

import urllib.error
from itertools import pairwise

import pytest

from tests.doors.client import (
    RECENT,
    WINDOW,
    ask,
    assert_all_but_a_page,
    assert_close,
    assert_same,
    cached,
    flush,
    logprobs,
    stored,
)
from tests.http_client import post
from tests.reference.tiny import EOS, random_tokens

pytestmark = pytest.mark.server


def words(n, seed) -> str:
    return " ".join(f"w{t}" for t in random_tokens(n, seed=seed))


@pytest.fixture(autouse=True)
def cold_cache(server):
    flush(server)


def chat(server, messages, **more):
    """(reply's text, its log-probabilities, prompt tokens, answer tokens, cached tokens)"""
    body = {"model": "m", "messages": messages, "max_tokens": 24, "temperature": 0, **more}
    reply = post(server, "/v1/chat/completions", {**body, "logprobs": True})
    choice, usage = reply["choices"][0], reply["usage"]
    values = [token["logprob"] for token in choice["logprobs"]["content"]]
    reused = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    text = choice["message"]["content"]
    return text, values, usage["prompt_tokens"], usage["completion_tokens"], reused


def test_chat_completions_with_growing_history(server):
    messages, turns = [], []
    for turn, length in enumerate((150, 20, 33, 9)):
        messages.append({"role": "user", "content": words(length, seed=turn)})
        turns.append((list(messages), chat(server, messages)))
        messages.append({"role": "assistant", "content": turns[-1][1][0]})
    for (_, (*_, prompt, answer, _)), (_, (*_, reused)) in pairwise(turns):
        assert_all_but_a_page(reused, stored(prompt, answer))
    for asked, (text, values, *_) in turns:
        flush(server)
        cold_text, cold_values, *_, reused = chat(server, asked)
        assert reused == 0
        assert text == cold_text
        assert_close(values, cold_values)


def test_chat_history_without_the_stop_string_reuses_what_still_matches(server):
    messages = [{"role": "user", "content": words(150, seed=5)}]
    whole, _, prompt, *_ = chat(server, messages)
    said = whole.split()
    stop = " ".join(said[14:16])
    flush(server)
    text, _, _, answer, _ = chat(server, messages, stop=stop)
    assert text.split() == said[:14] and answer == 16
    # the stop words are in the cache, not in the history; R raw tokens are left before them
    matched, held = prompt + 14, stored(prompt, answer)
    sealed = (held - 1 - RECENT) // WINDOW
    assert matched - sealed * WINDOW >= RECENT
    messages.append({"role": "assistant", "content": text})
    messages.append({"role": "user", "content": words(10, seed=6)})
    warm = chat(server, messages)
    assert_all_but_a_page(warm[-1], matched)
    flush(server)
    cold = chat(server, messages)
    assert cold[-1] == 0
    assert warm[0] == cold[0]
    assert_close(warm[1], cold[1])


def test_token_ids_whose_answers_end_by_length_stop_string_and_eos(server):
    prompt = random_tokens(140, seed=1)
    said = ask(server, prompt, 40)["text"].split()
    stop = " ".join(said[20:22])
    flush(server)
    # logit_bias calls for the end at once; min_new_tokens holds it back
    by_eos = {"ignore_eos": False, "min_new_tokens": 20, "logit_bias": {str(EOS): 100.0}}
    turns = []
    for turn, (kind, limits) in enumerate(
        (("stop", {"stop": [stop]}), ("stop", by_eos), ("length", {}), ("length", {}))
    ):
        warm = ask(server, prompt, 40, **limits)
        turns.append((prompt, limits, warm))
        assert warm["meta_info"]["finish_reason"]["type"] == kind
        assert len(warm["output_ids"]) == (22, 21, 40, 40)[turn]
        prompt = prompt + warm["output_ids"] + random_tokens(11, seed=50 + turn)
    for (asked, _, before), (_, _, warm) in pairwise(turns):
        assert_all_but_a_page(cached(warm), stored(len(asked), len(before["output_ids"])))
    for asked, limits, warm in turns:
        flush(server)
        assert_same(warm, ask(server, asked, 40, **limits))


def test_a_session_with_a_branch_and_a_replaced_turn(server):
    session = post(server, "/open_session", {"capacity_of_str_len": 1000})

    def turn(ids, after=None, **more):
        rid = after["meta_info"]["id"] if after else None
        return ask(server, ids, session={"id": session, "rid": rid, **more})

    a, b, c, d = (random_tokens(n, seed=70 + n) for n in (130, 20, 31, 17))
    first = turn(a)
    prompt2 = a + first["output_ids"] + b
    second = turn(b, first)
    prompt3 = prompt2 + second["output_ids"] + c
    third = turn(c, second)
    branch = turn(d, first)
    again = turn(c, second, replace=True)
    assert_all_but_a_page(cached(second), stored(len(a), 24))
    assert_all_but_a_page(cached(third), stored(len(prompt2), 24))
    # the second turn has stored the last token of the first answer by then
    assert_all_but_a_page(cached(branch), len(a) + 24)
    # the same prompt again: one token is always computed
    assert_all_but_a_page(cached(again), len(prompt3) - 1)
    for warm, prompt in (
        (first, a),
        (second, prompt2),
        (third, prompt3),
        (branch, a + first["output_ids"] + d),
        (again, prompt3),
    ):
        assert warm["meta_info"]["prompt_tokens"] == len(prompt)
        flush(server)
        assert_same(warm, ask(server, prompt))
    post(server, "/close_session", {"session_id": session})
    with pytest.raises(urllib.error.HTTPError) as failure:
        turn(d)
    assert failure.value.code == 400
    assert "does not exist" in failure.value.read().decode()


def test_a_frontend_program_that_forks(server):
    import sglang as sgl

    options = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}

    @sgl.function
    def program(s, document, questions):
        s += document + " "
        s += sgl.gen("start", **options)
        # the client sends a fork's common text ahead only if it has that text already
        assert s["start"]
        forks = s.fork(len(questions))
        for fork, question in zip(forks, questions, strict=True):
            fork += question
            fork += sgl.gen("one", **options)
            fork += " w77 w78 "
            fork += sgl.gen("two", **options)
        forks.join()
        s["forks"] = list(forks)

    document = words(150, seed=8)
    questions = [f" {words(7 + 6 * i, seed=30 + i)} " for i in range(3)]
    state = program.run(
        document, questions, backend=sgl.RuntimeEndpoint(server.url, chat_template_name="chatml")
    )
    start, common = state.get_meta_info("start"), f"{document} {state['start']}"
    assert start["cached_tokens"] == 0
    asked = [(f"{document} ", state["start"])]
    for fork, question in zip(state["forks"], questions, strict=True):
        one, two = (fork.get_meta_info(name) for name in ("one", "two"))
        # the common text was sent before, all of it prompt
        assert_all_but_a_page(one["cached_tokens"], start["prompt_tokens"] + 20)
        assert_all_but_a_page(two["cached_tokens"], stored(one["prompt_tokens"], 20))
        text = common + question
        asked += [(text, fork["one"]), (f"{text}{fork['one']} w77 w78 ", fork["two"])]
    for text, answer in asked:
        flush(server)
        cold = ask(server, text=text, n=20)
        assert cached(cold) == 0
        assert cold["text"] == answer


def test_parallel_samples_write_to_tails_of_their_own(server):
    """D5, I8: three samples from one prompt that ends within a page, each against its own replay."""
    prompt = random_tokens(146, seed=9)
    params = {"n": 3, "max_new_tokens": 40, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
    samples = post(server, "/generate", body)
    assert len({tuple(sample["output_ids"]) for sample in samples}) == 3
    assert [cached(sample) for sample in samples] == [144] * 3
    for sample in samples:
        flush(server)
        body = {
            "input_ids": prompt + sample["output_ids"],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            # the first of them is null
            "logprob_start_len": len(prompt) - 1,
        }
        replay = post(server, "/generate", body)
        assert cached(replay) == 0
        found = [value for value, *_ in replay["meta_info"]["input_token_logprobs"][1:]]
        assert_close(found, logprobs(sample))
