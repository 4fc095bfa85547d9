"""TANGRAM_RESERVE=uncompressed: prompts are held whole and compressed at their end, for comparison."""

import pytest
import torch

from tests.harness import Req
from tests.reference.tiny import random_tokens, save, tiny_llama
from tests.serving import TINY_ENV, assert_reserved_exactly, serve
from tests.test_spare_pages import spared, steps

pytestmark = pytest.mark.server

BUDGET = {**TINY_ENV, "TANGRAM_RETENTION": "0.25"}
WHOLE = {**BUDGET, "TANGRAM_RESERVE": "uncompressed"}
GROUPS = 2  # 8 heads, 4 a group


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return save(tiny_llama(seed=6, layers=4), tmp_path_factory.mktemp("reclaim"))


def test_a_prompt_is_held_whole_until_its_end_and_shared_with_nobody(folder):
    prompt = random_tokens(203, seed=1)
    requests = [Req(prompt, 70, rid="first"), Req(prompt, 5, rid="again", after="first")]
    answers = []
    for chunk in (50, 512):
        result = serve(folder, requests, env=WHOLE, chunked_prefill_size=chunk)
        answers.append(result["first"].output_ids)
        assert result["again"].output_ids == answers[-1][:5]
        assert result["again"].cached_tokens == 0
        assert "not for production" in result.log
        assert_reserved_exactly(result)
        held = [row[:2] for record in result.records for row in record["rows"].values()]
        in_prompt = {n: pages for n, pages in held if n < len(prompt)}
        assert all(pages == -(-n // 4) * GROUPS for n, pages in in_prompt.items())
        assert in_prompt.keys() == ({50, 100, 150, 200} if chunk == 50 else set())
        # 5 windows of 32 keep 8 each
        assert (203, (5 * 8 + 203 - 5 * 32 + 3) // 4 * GROUPS) in held
        kept = result.collected["kept"]["first"]
    # decode goes on as ever: the next windows are sealed one by one
    assert {window for _, _, window in kept} == set(range(7))
    assert answers[0] == answers[1]
    budget = serve(folder, requests[:1], env=BUDGET).collected["kept"]["first"]
    # K and V of the first layer are those of the tokens
    first = {key: positions for key, positions in budget.items() if key[:1] == (0,) and key[2] < 5}
    assert first == {key: kept[key] for key in first} and len(first) == 5 * 2


def spared_and_retracted(control) -> None:
    """``on_step``: one retraction, as soon as two requests decode."""
    live = control.scheduler.token_to_kv_pool_allocator.get_kvcache().rows.live.values()
    if sum(state.n > state.prompt for state in live) == 2 and not hasattr(control, "retracted"):
        control.retracted = True
        control.force_retract()
    spared(control)


def test_fewer_requests_run_at_once_and_the_books_close_under_pressure(folder):
    """Prompts end in steps that hand out pages they still read; retracted ones come back."""
    requests = [Req(random_tokens(300, seed=i), 40, rid=f"r{i}-") for i in range(5)]
    # whole, a prompt takes 150 pages of 4 heads x (K and V) x 4 tokens x 16 floats; compressed, 54
    at_once = {}
    for name, env in (("budget", BUDGET), ("whole", WHOLE)):
        result = serve(
            folder,
            requests,
            env={**env, "TANGRAM_POOL_BYTES": str(221 * 4 * 2 * 4 * 16 * 4)},
            on_step=spared_and_retracted,
            chunked_prefill_size=128,
        )
        assert result.collected["total"] <= 220
        assert all(len(out.output_ids) == 40 for out in result.outputs.values())
        assert result.retractions
        assert_reserved_exactly(result)
        lost = [step["lost"] for step in steps(result)]
        assert 0 < max(lost) <= steps(result)[0]["spare"]
        at_once[name] = max(len(record["rows"]) for record in result.records)
    assert at_once == {"budget": 3, "whole": 2}
