"""Whole schedulers on a GPU: graphs, overlap, pressure; books checked before every step.

In bfloat16 a batch of another size rounds differently, and two tokens that stand within rounding of
each other may change places. Only such ties are let pass, and a request is compared up to its first.
"""

import pytest
import torch

from tests.gpu.watch import collect, forbid_waits, watch
from tests.harness import Req, Result
from tests.reference.tiny import random_tokens, save, tiny_gemma3, tiny_gpt_oss, tiny_llama
from tests.serving import serve

pytestmark = [pytest.mark.gpu, pytest.mark.server]

ENV = {"TANGRAM_WINDOW": "32", "TANGRAM_RECENT": "16", "TANGRAM_RETENTION": "0.4"}
# of the log-probabilities of the two best tokens, below which bfloat16 may prefer either
TIE = 0.1


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = tiny_llama(seed=3, head_dim=64)
    return model, save(model, tmp_path_factory.mktemp("llama"))


def requests() -> list[Req]:
    """Prompts and answers of many lengths, so that a batch shrinks from five to one."""
    sizes = [(40, 60), (130, 20), (7, 45), (220, 33), (90, 12)]
    return [
        Req(random_tokens(n, seed=i), more, rid=f"r{i}-", logprobs=True, top_logprobs=2)
        for i, (n, more) in enumerate(sizes)
    ]


def on_gpu(folder, reqs, *, env=ENV, on_step=watch, **args) -> Result:
    return serve(folder, reqs, env=env, on_step=on_step, collect=collect, gpu=True, **args)


def assert_same_but_ties(found: Result, expected: Result, tie: float = TIE) -> None:
    """Tokens agree, up to a place where the expected run hardly preferred its own."""
    gaps = []
    for rid, want in expected.outputs.items():
        mine = found[rid].output_ids
        assert len(mine) == len(want.output_ids) > 0
        for i, (a, b) in enumerate(zip(mine, want.output_ids, strict=True)):
            if a != b:
                best, second = sorted(want.top_logprobs[i].values(), reverse=True)[:2]
                print(f"{rid}: token {i} of {len(mine)} differs at a gap of {best - second:.3f}")
                assert best - second < tie, f"{rid}: token {i} is {a}, expected {b}"
                break
            gaps.append(abs(found[rid].logprobs[i] - want.logprobs[i]))
    gaps.sort()
    print(f"log-probabilities of {len(gaps)} tokens differ by {gaps[-1]:.3f} at most")
    assert gaps[-1] < tie and gaps[len(gaps) * 9 // 10] < TIE


@pytest.fixture(scope="module")
def eager(llama):
    return on_gpu(llama[1], requests(), cuda_graph_backend_decode="disabled")


@pytest.mark.parametrize("largest", [2, 8])
def test_graphs_equal_eager_steps(llama, eager, largest):
    """F1, F3: a batch of five shrinks to one, through eager steps, padded graphs and full ones."""
    for overlap in (False, True):
        found = on_gpu(llama[1], requests(), cuda_graph_max_bs_decode=largest, overlap=overlap)
        assert_same_but_ties(found, eager)


def test_prefill_graphs_equal_eager_steps(llama, eager):
    """SGLang's breakable graphs, its default: attention runs between their parts."""
    found = on_gpu(llama[1], requests(), disable_prefill_cuda_graph=False, chunked_prefill_size=128)
    assert_same_but_ties(found, eager)


def test_decode_steps_never_wait_for_the_device(llama, eager):
    """Sealing steps included; torch raises at the first wait."""
    found = on_gpu(llama[1], requests(), on_step=forbid_waits, cuda_graph_max_bs_decode=8)
    # the longest answer has 60 tokens, the first of them from prefill
    assert found.collected["decode_steps"] >= 59
    assert found.collected["seconds"] > 0
    assert_same_but_ties(found, eager)


def test_a_tight_pool_and_overlap_change_no_token(llama):
    """Stale tables: pages change hands at once, while the step before may still run.

    Prompts are computed in other chunks and batches, whose rounding may change what a window keeps.
    """
    reqs = [
        Req(
            random_tokens(60 + 37 * i % 150, seed=i),
            40,
            rid=f"r{i}-",
            logprobs=True,
            top_logprobs=2,
        )
        for i in range(12)
    ]
    roomy = on_gpu(llama[1], reqs)
    tight = on_gpu(llama[1], reqs, overlap=True, max_total_tokens=400, chunked_prefill_size=64)
    assert tight.retractions or max(len(b.rids) for b in tight.batches) < 12
    assert_same_but_ties(tight, roomy, tie=5 * TIE)


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_a_prefix_hit_changes_no_token(llama, tmp_path, name):
    """A second turn behind cached windows and a raw tail, and the same without a prefix cache.

    GPT-OSS has cached pages of its sliding windows too, of one page each.
    """
    folder = llama[1]
    if name == "gpt-oss":
        folder = save(tiny_gpt_oss(seed=3, head_dim=64, sliding_window=16), tmp_path)
    turns = [
        Req(random_tokens(150, seed=1), 40, rid="t0-", logprobs=True, top_logprobs=2),
        Req(random_tokens(25, seed=2), 40, rid="t1-", after="t0-", continues=True,
            logprobs=True, top_logprobs=2),
    ]  # fmt: skip
    cached = on_gpu(folder, turns, overlap=True)
    assert cached["t1-"].cached_tokens >= 176
    again = Req(cached["t1-"].prompt_ids, 40, rid="t1-", logprobs=True, top_logprobs=2)
    cold = on_gpu(folder, [again], disable_radix_cache=True)
    assert cold["t1-"].cached_tokens == 0
    assert_same_but_ties(cached, cold, tie=5 * TIE)


MAKERS = {"llama": tiny_llama, "gemma3": tiny_gemma3, "gpt-oss": tiny_gpt_oss}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_uncompressed_logprobs_equal_hugging_face(tmp_path, make):
    """G1, G3: sliding windows of 8 tokens, prompts and answers of many windows."""
    model = make(seed=5, head_dim=64)
    folder = save(model, tmp_path)
    reqs = [
        Req(random_tokens(n, seed=n), 40, rid=f"n{n}-", logprobs=True, top_logprobs=2)
        for n in (20, 150, 61)
    ]
    env = {**ENV, "TANGRAM_RETENTION": "1.0"}
    found = on_gpu(folder, reqs, env=env, chunked_prefill_size=64)
    with torch.no_grad():
        for req in reqs:
            output = found[req.rid].output_ids
            logits = model(torch.tensor([req.input_ids + output])).logits[0]
            expected = logits.log_softmax(-1)[len(req.input_ids) - 1 : -1]
            gap = expected[range(len(output)), output] - torch.tensor(found[req.rid].logprobs)
            print(f"{req.rid}: log-probabilities differ by {gap.abs().max():.3f} at most")
            assert float(gap.abs().max()) < 0.25
