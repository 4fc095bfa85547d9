"""Requests end, leave and come back at awkward moments; pages and rows go where they belong."""

import dataclasses
import random
from functools import partial

import pytest
import torch

from tests.harness import Req
from tests.probes import watch
from tests.reference.tiny import random_tokens, save, tiny_llama
from tests.serving import TINY_ENV, logprob_gap, serve

pytestmark = pytest.mark.server

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return save(tiny_llama(seed=6), tmp_path_factory.mktemp("interrupted"))


def _env(retention):
    return {**TINY_ENV, "TANGRAM_RETENTION": str(retention)}


def _note_rows(control):
    """Record (iteration, row) whenever a row is opened; raise if one goes with a step to run."""
    watch(control)
    if control.step:
        return
    rows = control.scheduler.token_to_kv_pool_allocator.get_kvcache().rows
    runner = control.scheduler.tp_worker.model_runner
    granted, closed = set(), {}
    advance, open_row, close, forward = rows.advance, rows.open, rows.close, runner.forward

    def noting_advance(targets):
        if granted:
            raise RuntimeError(f"rows {sorted(granted)} have a step that was not handed over")
        granted.update(row for row, _ in targets)
        advance(targets)

    def noting_forward(*args, **kwargs):
        granted.clear()
        return forward(*args, **kwargs)

    def noting_close(row):
        if row in granted:
            raise RuntimeError(f"row {row} is given back before its step runs")
        closed[row] = control.step
        close(row)

    def noting_open(row, *args):
        control.record({"row": row, "waited": control.step - closed.get(row, -100)})
        open_row(row, *args)

    rows.advance, rows.open, rows.close = noting_advance, noting_open, noting_close
    runner.forward = noting_forward


def test_a_row_taken_over_under_overlap_is_never_read_for_its_last_request(folder):
    """A9 (sgl-project/sglang#18744, PR#18803): two rows, twelve answers that end when they like.

    A step is handed to the forward stream before the host gives its rows and pages back; as steps
    run in order, what the next request writes there comes later.
    """
    stop = tuple(range(10, 40))
    requests = [
        Req(random_tokens(20 + 13 * i, seed=i), 40, f"r{i}-", ignore_eos=False, stop_token_ids=stop)
        for i in range(12)
    ]
    one_by_one = [
        dataclasses.replace(r, after=f"r{i - 1}-" if i else "") for i, r in enumerate(requests)
    ]
    alone = serve(folder, one_by_one, env=_env(0.4), disable_radix_cache=True)
    result = serve(
        folder,
        requests,
        env=_env(0.4),
        overlap=True,
        on_step=_note_rows,
        max_running_requests=2,
        max_total_tokens=400,
    )
    assert result.tokens == alone.tokens
    opened = [record for record in result.records if "row" in record]
    assert {record["row"] for record in opened} == {1, 2}
    assert sum(record["waited"] <= 1 for record in opened) >= 8


def _note_books(control):
    pool = control.scheduler.token_to_kv_pool_allocator.get_kvcache()
    control.record(
        {
            "free": pool.ledger.free == pool.ledger.num_pages,
            "promised": pool.rows.promised,
            "locked": pool.store.trie.locked_pages,
            "nodes": len(pool.store.trie.nodes()),
            "table": int(abs(pool.rows.table).sum()),
        }
    )


EMPTY = {"free": True, "promised": 0, "locked": 0, "nodes": 0, "table": 0}


def _books(result):
    return [record for record in result.records if "nodes" in record]


def _leave_at_chunk_2(abort, control):
    """Abort, or ask for an empty cache, when two chunks are written; later flush and ask again."""
    while control.chunks_done("a-") < 2:
        yield
    if abort:
        control.abort("a-")
    control.flush()
    yield
    _note_books(control)
    while not control.outputs["a-"].finished:
        yield
    for _ in range(3):
        yield
    control.flush()
    yield
    _note_books(control)
    control.submit(Req(random_tokens(230, seed=1), 20, rid="b-"))


@LOOPS
def test_a_flush_in_the_middle_of_a_prompt_is_refused_and_a_later_one_empties_all(folder, overlap):
    """A11 (sgl-project/sglang PR#12107, #21413): a prompt of four chunks."""
    result = serve(
        folder,
        [Req(random_tokens(230, seed=1), 20, rid="a-")],
        env=_env(0.5),
        overlap=overlap,
        script=partial(_leave_at_chunk_2, False),
        chunked_prefill_size=64,
    )
    assert [reply.success for reply in result.replies] == [False, True]
    assert "Cache not flushed because there are pending requests" in result.log
    busy, end = _books(result)
    assert busy["nodes"] > 0 and busy["locked"] > 0 and busy["promised"] > 0
    assert end == EMPTY
    assert result["b-"].cached_tokens == 0
    assert result["b-"].output_ids == result["a-"].output_ids


@LOOPS
def test_an_abort_with_two_of_four_chunks_written_brings_the_books_back_to_the_start(
    folder, overlap
):
    """B3 (sgl-project/sglang PR#36926): the third chunk may be under way already."""
    request = Req(random_tokens(230, seed=1), 20, rid="a-")
    result = serve(
        folder,
        [request],
        env=_env(0.5),
        overlap=overlap,
        script=partial(_leave_at_chunk_2, True),
        chunked_prefill_size=64,
    )
    assert result["a-"].finish_reason["type"] == "abort"
    assert result["a-"].output_ids == []
    assert sum("a-" in batch.rids for batch in result.batches) in (2, 3)
    assert [reply.success for reply in result.replies] == [False, True]
    assert _books(result)[-1] == EMPTY
    alone = serve(folder, [request], env=_env(0.5), chunked_prefill_size=64)
    assert result["b-"].output_ids == alone["a-"].output_ids


def test_requests_on_a_prefix_of_a_page_and_a_half_are_retracted_and_end_as_without(folder):
    """C1 (sgl-project/sglang PR#4977): 6 shared tokens, pages of 4, memory that runs out.

    At retention 1, where it makes no difference if a resumed request branches.
    """
    prefix = random_tokens(6, seed=1)
    requests = [
        Req(
            prefix + random_tokens(30, seed=10 + i),
            150,
            rid=f"r{i}-",
            arrive=3 * i,
            logprobs=True,
            # with ignore_eos, admission counts on every token
            ignore_eos=False,
            sampling={"logit_bias": {"2": -100.0}},
        )
        for i in range(4)
    ]
    plenty = serve(folder, requests, env=_env(1.0))
    assert plenty.retractions == []
    for overlap in (False, True):
        result = serve(
            folder,
            requests,
            env=_env(1.0),
            overlap=overlap,
            max_total_tokens=500,
            schedule_conservativeness=0.01,  # admission expects next to nothing of those that run
        )
        assert result.retractions, "the pool was never short"
        assert result.tokens == plenty.tokens
        assert logprob_gap(result, plenty) < 1e-4
        assert [result[f"r{i}-"].cached_tokens for i in range(1, 4)] == [4, 4, 4]


def _retract(control):
    watch(control)
    if control.step in (20, 45):
        control.force_retract()


def test_a_request_retracted_behind_a_hit_keeps_what_it_would_have_kept(folder):
    """C5 (sgl-project/sglang PR#29471): two users behind the end of one prompt, retention 0.5."""
    document = random_tokens(150, seed=1)
    requests = [Req(document, 5, rid="first", logprobs=True)]
    requests += [
        Req(
            document + random_tokens(31 + i, seed=2 + i),
            80,
            rid=f"user{i}-",
            after="first",
            logprobs=True,
        )
        for i in range(2)
    ]
    plain = serve(folder, requests, env=_env(0.5), chunked_prefill_size=64)
    assert plain.retractions == []
    for overlap in (False, True):
        retracted = serve(
            folder,
            requests,
            env=_env(0.5),
            overlap=overlap,
            on_step=_retract,
            chunked_prefill_size=64,
        )
        assert len(retracted.retractions) == 2
        for rid in ("user0-", "user1-"):
            # the state at the end of the first prompt is exact, and the hit is there to lose
            assert plain[rid].cached_tokens == 148
            assert len(plain.collected["kept"][rid]) > 0
            assert retracted.collected["kept"][rid] == plain.collected["kept"][rid]
        assert retracted.tokens == plain.tokens
        assert logprob_gap(retracted, plain) < 1e-4


def _abort_as_planned(plan, control):
    watch(control)
    for rid in plan.get(control.step, ()):
        control.abort(rid)
    if control.step % 25 == 24 and len(control.active()) > 3:
        control.flush()


def _flush_at_the_end(rids, control):
    while not all(control.outputs[rid].finished for rid in rids):
        yield
    for _ in range(3):
        yield
    control.flush()
    yield
    _note_books(control)


def test_200_aborts_at_random_moments_leave_the_pool_as_it_was(folder):
    """A third of the requests share a document, the pool is short, and five answers are waited for.

    They are aborted while they wait, between chunks, in decode; asked for an empty cache meanwhile,
    the scheduler refuses.
    """
    rng = random.Random(7)
    document, requests, plan = random_tokens(190, seed=0), [], {}
    for i in range(200):
        prompt = random_tokens(rng.choice([rng.randint(1, 40)] * 4 + [150]), seed=1 + i)
        if i % 3 == 0:
            prompt = document[: rng.randint(60, 190)] + prompt[:40]
        arrive = rng.randint(0, 180)
        requests.append(Req(prompt, 100, rid=f"gone{i}-", arrive=arrive))
        plan.setdefault(arrive + rng.randint(1, 30), []).append(f"gone{i}-")
    stay = [
        Req(random_tokens(30 + 29 * i, seed=900 + i), 60, rid=f"stay{i}-", arrive=30 * i)
        for i in range(5)
    ]
    alone = serve(folder, stay, env=_env(0.4), disable_radix_cache=True)
    for overlap in (False, True):
        result = serve(
            folder,
            requests + stay,
            env=_env(0.4),
            overlap=overlap,
            on_step=partial(_abort_as_planned, plan),
            script=partial(_flush_at_the_end, [r.rid for r in requests + stay]),
            chunked_prefill_size=96,
            max_total_tokens=4000,
            max_running_requests=20,
        )
        assert all(result[r.rid].finish_reason["type"] == "abort" for r in requests)
        ran = {rid for batch in result.batches for rid in batch.rids}
        spoke = [r.rid for r in requests if result[r.rid].output_ids]
        print(f"{len(spoke)} of 200 had begun to answer, {len(ran) - 5} had begun at all")
        assert 100 < len(spoke) < len(ran) - 5 < 200
        *busy, idle = [reply.success for reply in result.replies]
        assert idle and len(busy) > 5 and not any(busy)
        assert _books(result) == [EMPTY]
        assert {r.rid: result.tokens[r.rid] for r in stay} == alone.tokens
