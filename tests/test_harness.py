"""The harness itself: what it isolates, that it is exact, and what a failure looks like."""

import os
import time
from functools import partial

import pytest
import torch

from tests.harness import Req, ScenarioDied, ScenarioFailed, ScenarioTimeout, run_scenario
from tests.reference.tiny import random_tokens, save, tiny_llama

pytestmark = pytest.mark.server

LOOPS = [pytest.param(False, id="normal"), pytest.param(True, id="overlap")]


@pytest.fixture(scope="module")
def hf():
    threads = torch.get_num_threads()
    # two spinning threads beside other jobs make a tiny model a hundred times slower
    torch.set_num_threads(1)
    yield tiny_llama(seed=3)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(hf, tmp_path_factory):
    return save(hf, tmp_path_factory.mktemp("tiny"))


@torch.no_grad()
def greedy(hf, prompt, n):
    """Plain Hugging Face, one request, no end of text."""
    past, step, out = None, torch.tensor([prompt]), []
    for _ in range(n):
        answer = hf(input_ids=step, past_key_values=past, use_cache=True)
        past, step = answer.past_key_values, answer.logits[:, -1:].argmax(-1)
        out.append(step.item())
    return out


def batch_of_8():
    # one prompt of several chunks among short ones, two of them a single token
    lengths = [300, 5, 64, 65, 1, 130, 17, 1]
    return [
        Req(random_tokens(n, seed=i), rid=f"p{i}", max_new_tokens=12 + i)
        for i, n in enumerate(lengths)
    ]


def expected(hf, requests):
    return {r.rid: greedy(hf, r.input_ids, r.max_new_tokens) for r in requests}


def pool_sizes(scheduler):
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    return {
        "free": allocator.available_size(),
        "evictable": tree.evictable_size(),
        "protected": tree.protected_size(),
        "total": scheduler.max_total_num_tokens,
        "rows": len(scheduler.req_to_token_pool.free_slots),
        "all_rows": scheduler.req_to_token_pool.size,
    }


@pytest.mark.parametrize("overlap", LOOPS)
def test_chunked_batch_of_8_equals_hugging_face(hf, model, overlap):
    requests = batch_of_8()
    result = run_scenario(
        model,
        requests,
        server_args={"chunked_prefill_size": 64},
        overlap=overlap,
        collect=pool_sizes,
    )
    assert result.tokens == expected(hf, requests)
    assert all(out.finish_reason["type"] == "length" for out in result.outputs.values())
    # the 300 tokens came in several chunks, and all 8 decoded together
    assert sum("p0" in batch.extend_rids for batch in result.batches) >= 5
    assert max(len(b.rids) for b in result.batches if b.mode == "decode") == 8
    assert sum(sum(b.new_tokens) for b in result.batches if b.mode == "extend") == 583
    assert result.collected["rows"] == result.collected["all_rows"]


def test_logprobs_equal_hugging_face(hf, model):
    prompt = random_tokens(40, seed=9)
    request = Req(
        prompt, rid="a", max_new_tokens=6, logprobs=True, top_logprobs=3, prompt_logprobs_from=0
    )
    out = run_scenario(model, [request], server_args={"chunked_prefill_size": 16})["a"]
    with torch.no_grad():
        want = hf(input_ids=torch.tensor([prompt + out.output_ids])).logits[0].log_softmax(-1)
    of_output, of_prompt = want[39:-1], want[:39].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    close = {"atol": 1e-4, "rtol": 0}
    torch.testing.assert_close(torch.tensor(out.logprobs), of_output.max(-1).values, **close)
    assert [list(top) for top in out.top_logprobs] == of_output.topk(3).indices.tolist()
    assert out.prompt_logprobs[0] is None
    torch.testing.assert_close(torch.tensor(out.prompt_logprobs[1:]), of_prompt, **close)


def test_requests_arrive_at_their_step_and_after_one_another(hf, model):
    first, more = random_tokens(30, seed=1), random_tokens(20, seed=2)
    result = run_scenario(
        model,
        [
            Req(first, rid="turn1", max_new_tokens=8),
            Req(random_tokens(10, seed=3), rid="late", max_new_tokens=4, arrive=5),
            Req(more, rid="turn2", max_new_tokens=8, after="turn1", continues=True),
        ],
    )
    turn2 = result["turn2"]
    assert turn2.prompt_ids == first + result["turn1"].output_ids + more
    assert turn2.output_ids == greedy(hf, turn2.prompt_ids, 8)
    assert turn2.cached_tokens == 37  # all but the last token, whose KV was never made
    started = {rid: min(b.step for b in result.batches if rid in b.rids) for rid in result.outputs}
    assert started == {"turn1": 0, "late": 5, "turn2": result["turn1"].finish_step + 1}


def test_end_of_text_and_stop_tokens(hf, model):
    prompt = random_tokens(25, seed=5)
    plain = greedy(hf, prompt, 12)
    result = run_scenario(
        model,
        [
            Req(
                prompt, rid="stop", max_new_tokens=12, ignore_eos=False, stop_token_ids=(plain[3],)
            ),
            Req(prompt, rid="free", max_new_tokens=12),
        ],
    )
    cut = plain.index(plain[3]) + 1
    assert result["stop"].output_ids == plain[:cut]
    assert result["stop"].finish_reason == {"type": "stop", "matched": plain[3]}
    assert result["free"].output_ids == plain


# ---- retraction and abort


def retract_at(step, control):
    if control.step == step:
        control.force_retract()


def pause_and_resume(control):
    """A script: retract everything after four tokens, go on two iterations later."""
    while len(control.outputs["a"].output_ids) < 4:
        yield
    control.pause("retract")
    yield
    control.record(control.status("a"))
    yield
    control.resume()


@pytest.mark.parametrize("overlap", LOOPS)
def test_forced_retract_changes_no_token(hf, model, overlap):
    requests = [
        Req(random_tokens(40 + i, seed=i), rid=f"p{i}", max_new_tokens=14) for i in range(3)
    ]
    result = run_scenario(model, requests, overlap=overlap, on_step=partial(retract_at, 6))
    assert [step for step, _ in result.retractions] == [6]
    assert sum(out.retractions for out in result.outputs.values()) == 1
    assert result.tokens == expected(hf, requests)


@pytest.mark.parametrize("overlap", LOOPS)
def test_a_lone_request_is_retracted_by_a_pause(hf, model, overlap):
    request = Req(random_tokens(33, seed=4), rid="a", max_new_tokens=10)
    result = run_scenario(model, [request], overlap=overlap, script=pause_and_resume)
    assert result.records == ["waiting"]
    assert result["a"].retractions == 1
    assert result.tokens == expected(hf, [request])


def abort_after_chunks(rid, chunks, control):
    if control.chunks_done(rid) == chunks and not control.data.get("sent"):
        control.data["sent"] = True
        control.record(control.remaining_prompt_tokens(rid))
        control.abort(rid)


@pytest.mark.parametrize("overlap", LOOPS)
def test_abort_in_the_middle_of_a_prefill_frees_everything(hf, model, overlap):
    other = Req(random_tokens(20, seed=7), rid="other", max_new_tokens=10)
    result = run_scenario(
        model,
        [Req(random_tokens(300, seed=6), rid="long"), other],
        server_args={"chunked_prefill_size": 64, "disable_radix_cache": True},
        overlap=overlap,
        on_step=partial(abort_after_chunks, "long", 2),
        collect=pool_sizes,
    )
    assert 0 < result.records[0] < 300
    assert result["long"].finish_reason["type"] == "abort"
    assert result["long"].output_ids == []
    assert result["other"].output_ids == greedy(hf, other.input_ids, 10)
    sizes = result.collected
    assert sizes["free"] == sizes["total"]
    assert sizes["rows"] == sizes["all_rows"]


# ---- isolation


def read_and_spoil(scheduler):
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler as module

    seen = (
        os.environ.get("TANGRAM_RETENTION"),
        os.environ.get("TANGRAM_WINDOW"),
        envs.SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION.get(),
        getattr(module, "spoiled", False),
        torch.is_inference_mode_enabled(),
    )
    module.spoiled = True
    return seen


def test_scenarios_do_not_leak_into_each_other(model, monkeypatch):
    monkeypatch.setenv("TANGRAM_WINDOW", "256")
    run = partial(run_scenario, model, [Req([9, 8, 7], max_new_tokens=2)], collect=read_and_spoil)
    first = run(env={"TANGRAM_RETENTION": "0.5", "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "77"})
    second = run(env={"TANGRAM_WINDOW": None})
    third = run()
    assert first.collected == ("0.5", "256", 77, False, False)
    assert second.collected == (None, None, 4096, False, False)
    assert third.collected == (None, "256", 4096, False, False)
    assert "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION" not in os.environ


def read_import_time_switch(scheduler):
    from sglang.srt.managers import scheduler as module

    return module.TEST_RETRACT


def test_only_a_fresh_interpreter_sees_what_is_read_at_import(model):
    env = {"SGLANG_TEST_RETRACT": "1"}
    run = partial(run_scenario, model, [Req([9, 8, 7], max_new_tokens=2)], env=env)
    assert run(collect=read_import_time_switch).collected is False
    assert run(collect=read_import_time_switch, fresh=True).collected is True


# ---- failures


def raise_at_3(control):
    if control.step == 3:
        raise KeyError("planned")


def exit_at_3(control):
    if control.step == 3:
        os._exit(7)


def sleep_at_3(control):
    if control.step == 3:
        time.sleep(600)


def leak_a_token(control):
    if control.step == 3:
        control.scheduler.token_to_kv_pool_allocator.alloc(1)


def pause_for_good(control):
    if control.step == 3:
        control.pause("in_place")


FAILURES = [
    pytest.param(raise_at_3, ScenarioFailed, "run.*raise_at_3.*KeyError: 'planned'", id="raises"),
    pytest.param(exit_at_3, ScenarioDied, "exit code 7 .*Prefill batch", id="dies"),
    pytest.param(sleep_at_3, ScenarioTimeout, "after 4 s of running.*in sleep_at_3", id="hangs"),
    pytest.param(leak_a_token, ScenarioFailed, "run.*pool memory leak detected", id="leaks"),
    pytest.param(pause_for_good, ScenarioFailed, r"no end in sight.*\['a'\]", id="stalls"),
]


@pytest.mark.parametrize(("on_step", "error", "message"), FAILURES)
def test_a_failure_says_what_and_where(model, on_step, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        run_scenario(
            model,
            [Req([9, 8, 7], rid="a")],
            on_step=on_step,
            timeout_s=4 if on_step is sleep_at_3 else 60,
        )


BAD_ARGUMENTS = [
    pytest.param({"attention_backend": "nonesuch"}, "invalid choice: 'nonesuch'", id="choice"),
    pytest.param({"schedule_conservativeness": -1}, "must be non-negative", id="check"),
    pytest.param({"no_such_flag": 1}, "unrecognized arguments: --no-such-flag", id="flag"),
]


@pytest.mark.parametrize(("server_args", "message"), BAD_ARGUMENTS)
def test_refused_arguments(model, server_args, message):
    with pytest.raises(ScenarioFailed, match=f"(?s)arguments.*{message}") as caught:
        run_scenario(model, server_args=server_args)
    assert caught.value.stage == "arguments"


def test_rids_that_sglang_would_abort_together_are_refused(model):
    with pytest.raises(ScenarioFailed, match="one is a prefix of the other"):
        run_scenario(model, [Req([9], rid="r1"), Req([9], rid="r10")])


def test_a_scenario_takes_seconds(model):
    """A loose bound for a busy machine; alone on two cores it is about 1.5 s."""
    result = run_scenario(model, [Req([9, 8, 7], max_new_tokens=4)])
    assert result.total_s < 15, f"boot {result.boot_s:.1f} s, run {result.run_s:.1f} s"
