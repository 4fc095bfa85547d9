"""Pages under load: admission, capacity, aborts and exhaustion, with the books checked each step."""

from functools import partial

import pytest
import torch

from tests.harness import Req
from tests.probes import watch
from tests.reference.tiny import random_tokens, save, tiny_gemma3, tiny_llama
from tests.serving import TINY_ENV, assert_reserved_exactly, serve

pytestmark = pytest.mark.server

ENV = {**TINY_ENV, "TANGRAM_RETENTION": "0.5"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return save(tiny_llama(seed=6), tmp_path_factory.mktemp("pressure"))


def test_64_short_requests_leave_no_page_behind(folder):
    """A1 (sgl-project/sglang#11970)."""
    requests = [Req(random_tokens(1 + i % 17, seed=i), 6, rid=f"r{i}-") for i in range(64)]
    result = serve(folder, requests, env=ENV, max_running_requests=64)
    assert all(len(out.output_ids) == 6 for out in result.outputs.values())
    assert_reserved_exactly(result)


def test_requests_wait_for_pages_and_prompts_are_never_cut_short(folder):
    """A pool for about two of the prompts: the others wait, none is retracted in its prompt."""
    requests = [Req(random_tokens(300, seed=i), 4, rid=f"r{i}-") for i in range(6)]
    result = serve(folder, requests, env=ENV, max_total_tokens=700, chunked_prefill_size=64)
    assert all(len(out.output_ids) == 4 for out in result.outputs.values())
    assert result.retractions == []
    assert min(record["free"] for record in result.records) < result.collected["total"] // 2
    assert_reserved_exactly(result)


def test_memory_pressure_retracts_and_every_request_still_ends_as_alone(folder):
    # with ignore_eos admission counts on every token; else, so told, on next to none of those that run
    endless = {"ignore_eos": False, "sampling": {"logit_bias": {"2": -100.0}}}
    requests = [
        Req(random_tokens(40, seed=i), 200, rid=f"r{i}-", arrive=3 * i, **endless) for i in range(4)
    ]
    arguments = {"max_total_tokens": 700, "schedule_conservativeness": 0.01}
    alone = {r.rid: serve(folder, [r], env=ENV, **arguments)[r.rid].output_ids for r in requests}
    result = serve(folder, requests, env=ENV, **arguments)
    assert result.retractions, "the pool was never short"
    assert result.tokens == alone
    assert_reserved_exactly(result)


def test_a_request_longer_than_the_pool_ends_by_length_and_the_next_is_served(folder):
    """C3 (sgl-project/sglang PR#19881)."""
    requests = [
        Req(random_tokens(20, seed=1), 4000, rid="long"),
        Req(random_tokens(20, seed=2), 5, rid="next", after="long"),
    ]
    result = serve(folder, requests, env=ENV, max_total_tokens=128)
    assert result["long"].finish_reason["type"] == "length"
    assert 20 + len(result["long"].output_ids) <= 128
    assert len(result["next"].output_ids) == 5


def test_a_prompt_that_fills_the_pool_is_served_in_chunks_that_are_published(folder):
    """The second chunk seals half of the raw tail that the first one left in the prefix cache."""
    request = Req(random_tokens(50, seed=1), 2, rid="a")
    result = serve(folder, [request], env=ENV, max_total_tokens=60, chunked_prefill_size=44)
    assert [b.new_tokens for b in result.batches if b.mode == "extend"] == [(44,), (6,)]
    roomy = serve(folder, [request], env=ENV)
    assert result["a"].output_ids == roomy["a"].output_ids


def test_a_prompt_longer_than_the_uncompressed_pool_is_served(folder):
    prompt = random_tokens(1000, seed=3)
    env = {**ENV, "TANGRAM_RETENTION": "0.25"}
    # bytes of 600 uncompressed tokens: 2 layers x 2 heads x (K and V) x 16 floats
    env["TANGRAM_POOL_BYTES"] = str(600 * 2 * 2 * 2 * 16 * 4)
    result = serve(folder, [Req(prompt, 5, rid="a")], env=env, max_total_tokens=None)
    assert len(result["a"].output_ids) == 5
    assert result.collected["bytes"] <= int(env["TANGRAM_POOL_BYTES"])
    assert result.collected["capacity"] > 1005


def test_bytes_stay_in_budget_and_capacity_grows_with_what_is_dropped(folder):
    """C7 (kvcache-ai/sglang PR#83): the ceiling is not the generic cell size."""
    capacity = {}
    for retention in (1.0, 0.25):
        env = {**ENV, "TANGRAM_RETENTION": str(retention), "TANGRAM_POOL_BYTES": "2000000"}
        result = serve(folder, [Req([9], 1, rid="a")], env=env, max_total_tokens=1_000_000)
        assert result.collected["bytes"] <= 2_000_000
        capacity[retention] = result.collected["capacity"]
    assert capacity[0.25] >= 3.5 * capacity[1.0]


def _abort_at(rid, chunks, control):
    watch(control)
    if control.chunks_done(rid) == chunks and "sent" not in control.data:
        control.data["sent"] = True
        control.abort(rid)


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_an_abort_between_chunks_gives_everything_back(folder, chunks, overlap):
    requests = [
        Req(random_tokens(190, seed=7), 20, rid="gone"),
        Req(random_tokens(30, seed=8), 20, rid="stays"),
        Req(random_tokens(190, seed=7), 20, rid="again", after="gone"),
    ]
    alone = serve(folder, [Req(random_tokens(190, seed=7), 20, rid="x")], env=ENV)["x"].output_ids
    result = serve(
        folder,
        requests,
        env=ENV,
        overlap=overlap,
        on_step=partial(_abort_at, "gone", chunks),
        chunked_prefill_size=64,
    )
    assert result["gone"].finish_reason["type"] == "abort"
    assert len(result["stays"].output_ids) == 20
    assert result["again"].output_ids == alone


def _abort_all_and_flush(control):
    watch(control)
    if control.step == 12:
        control.abort_all()
    if control.step == 20:
        control.flush()


def test_abort_all_then_flush_then_serving_goes_on(folder):
    requests = [Req(random_tokens(50, seed=i), 200, rid=f"r{i}-") for i in range(4)]
    requests.append(Req(random_tokens(50, seed=0), 10, rid="later", arrive=30))
    result = serve(folder, requests, env=ENV, on_step=_abort_all_and_flush)
    assert len(result["later"].output_ids) == 10
    assert all(result[f"r{i}-"].finish_reason["type"] == "abort" for i in range(4))


def test_a_stop_token_gives_back_the_row_of_the_token_it_cut(folder):
    """A7 (sgl-project/sglang PR#35204): committed rows may lead the kept tokens by one."""
    prompt = random_tokens(13, seed=11)
    plain = serve(folder, [Req(prompt, 30, rid="a")], env=ENV)["a"].output_ids
    stop = plain[10]
    request = Req(prompt, 30, rid="a", ignore_eos=False, stop_token_ids=(stop,))
    for overlap in (False, True):
        result = serve(folder, [request], env=ENV, overlap=overlap)
        assert result["a"].finish_reason["type"] == "stop"
        assert result["a"].output_ids == plain[: plain.index(stop) + 1]


def test_a_beam_search_request_is_refused_and_the_server_goes_on(folder):
    requests = [
        Req(random_tokens(30, seed=1), 12, rid="beam", sampling={"beam_width": 2}),
        Req(random_tokens(30, seed=1), 12, rid="plain", after="beam"),
    ]
    result = serve(folder, requests, env=ENV)
    assert result["beam"].finish_reason["type"] == "abort"
    assert "Beam search is not supported" in result["beam"].finish_reason["message"]
    assert len(result["plain"].output_ids) == 12


def test_a_pool_for_just_one_request_with_sliding_layers_serves_shorter_ones(tmp_path):
    """The pool is made for 32 tokens; a request of 29 must not reserve more than that."""
    gemma = save(tiny_gemma3(seed=2), tmp_path / "gemma")
    requests = [
        Req(random_tokens(n, seed=n), 5, rid=f"r{n}-", after=f"r{n - 1}-" if n > 20 else "")
        for n in range(20, 28)
    ]
    result = serve(gemma, requests, env=ENV, max_total_tokens=32)
    assert all(out.output_ids for out in result.outputs.values())


def test_an_empty_prompt_is_refused_and_the_server_goes_on(folder):
    requests = [Req([], 5, rid="empty"), Req([9, 10], 5, rid="next", arrive=2)]
    result = serve(folder, requests)
    assert result["empty"].finish_reason["type"] == "abort"
    assert len(result["next"].output_ids) == 5


def test_what_another_request_sealed_of_a_prompt_that_is_read_raw_is_in_nobodys_way(folder):
    """The raw tail of the prompt passes the border of a window, and the first answer seals that.

    Who starts from the tail does not read the window's pages. Had it pinned them, two would not fit
    into a pool for 476 tokens, and nor would v2, ever, with nothing else running.
    """
    document = random_tokens(396, seed=1)
    requests = [
        *(Req(document, 0, rid="first"), Req(document, 40, rid="u0-", after="first")),
        *(Req(document, 40, rid="u1-", after="first"), Req(document, 40, rid="v1-", after="u0-")),
        Req([*document, 9], 60, rid="v2-", after="v1-"),
    ]
    env = {**ENV, "TANGRAM_RETENTION": "0.3", "TANGRAM_WINDOW": "64", "TANGRAM_RECENT": "32"}
    env |= {"TANGRAM_PAGE": "4", "TANGRAM_POOL_BYTES": "100000"}
    result = serve(folder, requests, env=env, chunked_prefill_size=64)
    ends = {rid: len(out.output_ids) for rid, out in result.outputs.items()}
    assert ends == {"first": 0, "u0-": 40, "u1-": 40, "v1-": 40, "v2-": 60}
    assert all(out.finish_reason["type"] == "length" for out in result.outputs.values())
    assert result["u0-"].cached_tokens == 392
    assert_reserved_exactly(result)
