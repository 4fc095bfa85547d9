"""What is kept is a function of the tokens: never of chunks, batches, overlap or preemption."""

import pytest
import torch

from tests.harness import Req
from tests.plans import write_plan
from tests.probes import watch
from tests.reference.tiny import random_tokens, save, tiny_llama
from tests.serving import TINY_ENV, assert_reserved_exactly, serve

pytestmark = pytest.mark.server

LENGTHS = [700, 5, 64, 65, 1, 333, 48, 129]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Model folder, environment, and each request served alone in one chunk."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("invariance")
    model = tiny_llama(seed=4, layers=2, q_heads=6, kv_heads=3)
    save(model, folder / "model")
    path, _ = write_plan(model, folder)
    env = {**TINY_ENV, "TANGRAM_PLAN": str(path), "TANGRAM_RETENTION": "0.4"}
    alone = {}
    for request in requests():
        result = serve(folder / "model", [request], env=env, chunked_prefill_size=2048)
        alone[request.rid] = (
            result[request.rid].output_ids,
            result.collected["kept"].get(request.rid, {}),
        )
    return folder / "model", env, alone


def requests():
    return [Req(random_tokens(n, seed=n), 40, rid=f"p{i}-") for i, n in enumerate(LENGTHS)]


def assert_as_alone(result, alone):
    for rid, (tokens, kept) in alone.items():
        assert result[rid].output_ids == tokens, rid
        assert result.collected["kept"].get(rid, {}) == kept, rid
    assert_reserved_exactly(result)


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize("chunk", [64, 257, 2048])
def test_a_batch_of_8_in_any_chunks_equals_each_alone(served, chunk, overlap):
    folder, env, alone = served
    result = serve(folder, requests(), env=env, overlap=overlap, chunked_prefill_size=chunk)
    assert max(len(batch.rids) for batch in result.batches) == 8
    assert_as_alone(result, alone)


def _retract_twice(control):
    watch(control)
    if control.step in (25, 40):
        control.force_retract()


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_retracted_requests_go_on_as_if_nothing_had_happened(served, overlap):
    folder, env, alone = served
    result = serve(
        folder,
        requests(),
        env=env,
        overlap=overlap,
        on_step=_retract_twice,
        chunked_prefill_size=257,
    )
    assert len(result.retractions) == 2
    assert_as_alone(result, alone)


def test_a_cold_row_beside_a_continued_one_equals_both_alone(served):
    """B11 (sgl-project/sglang#22291): prefix lengths (64, 0) in one extend batch."""
    folder, env, alone = served
    first, second = requests()[3], requests()[1]
    result = serve(folder, [first, second], env=env, chunked_prefill_size=64)
    mixed = [b for b in result.batches if b.mode == "extend" and sorted(b.prefix_lens) == [0, 64]]
    assert mixed, "no batch held a continued and a cold row"
    for request in (first, second):
        assert result[request.rid].output_ids == alone[request.rid][0]


@pytest.mark.parametrize("radix", [False, True], ids=["no-radix", "radix"])
def test_every_token_is_forwarded_once(served, radix):
    """B5 (sgl-project/sglang#36855): chunks go on where the last one ended, cache or none."""
    folder, env, alone = served
    request = requests()[5]
    result = serve(
        folder, [request], env=env, chunked_prefill_size=70, disable_radix_cache=not radix
    )
    chunks = [(b.prefix_lens[0], b.new_tokens[0]) for b in result.batches if b.mode == "extend"]
    assert chunks == [(0, 70), (70, 70), (140, 70), (210, 70), (280, 53)]
    assert result[request.rid].cached_tokens == 0
    assert result[request.rid].output_ids == alone[request.rid][0]


def test_chunking_off_serves_a_long_prompt_in_one_piece(served):
    """B7 (sgl-project/sglang#9142)."""
    folder, env, alone = served
    result = serve(folder, requests()[:1], env=env, chunked_prefill_size=-1)
    assert [b.new_tokens for b in result.batches if b.mode == "extend"] == [(700,)]
    assert result["p0-"].output_ids == alone["p0-"][0]
