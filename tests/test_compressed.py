"""Serving at retention below 1 equals the slow reference, which applies docs/design.md word by word."""

from dataclasses import dataclass

import pytest
import torch

from tests.harness import Req
from tests.plans import write_plan
from tests.reference.layout import layout_for
from tests.reference.run import CompressedRun
from tests.reference.tiny import (
    random_query_stats,
    random_tokens,
    save,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_llama,
)
from tests.serving import TINY_ENV, assert_reserved_exactly, assert_same_kept, serve

pytestmark = pytest.mark.server


@dataclass(frozen=True)
class Case:
    """``planned``: skewed budgets from a plan file; else every head keeps the same share."""

    scorer: str
    retention: float = 0.5
    planned: bool = True
    grouping: str = "global"
    window: int = 32
    recent: int = 16
    page: int = 4
    group_heads: int = 4
    sinks: int = 4
    prompt: int = 203
    chunk: int = 64

    def __str__(self):
        plan = "plan" if self.planned else "uniform"
        return (
            f"{self.scorer}-{plan}-{self.grouping}-rho{self.retention}-W{self.window}"
            f"-R{self.recent}-P{self.page}-N{self.prompt}-C{self.chunk}"
        )


CASES = [
    Case("keydiff"),
    Case("keydiff", planned=False),
    Case("expected_attention"),
    # heads of one layer keep unequal counts, groups are padded in every layer
    Case("keydiff", grouping="layer"),
    Case("random", retention=0.25),
    Case("streaming", retention=0.8, sinks=0),
    # one head a group: no head gets more than its budget
    Case("keydiff", group_heads=1),
    # windows sealed within chunks, across chunks, and by decode only
    Case("keydiff", window=48, recent=24, page=8, sinks=2, chunk=512),
    Case("keydiff", chunk=1, prompt=70),
    Case("keydiff", recent=0, prompt=65),
    # the first token past an epoch border is a decoded one
    Case("keydiff", prompt=112),
    # every group at its least, one page
    Case("keydiff", retention=0.01),
    Case("knorm"),
    # queries of a window's end: from one chunk, from several, from decoded tokens
    Case("snapkv"),
    Case("snapkv", chunk=257, group_heads=3),
    Case("snapkv", chunk=2048, recent=0),
    Case("snapkv", chunk=1, prompt=70),
    # and of several windows that wait to be sealed
    Case("snapkv", chunk=37, window=16, recent=40),
    Case("tova", chunk=64, recent=32),
    Case("expected_attention_local", chunk=50),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.set_num_threads(1)
    model = tiny_llama(seed=1, layers=3, q_heads=6, kv_heads=3)
    return model, save(model, tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kept_positions_and_tokens_equal_the_reference(llama, tmp_path, case):
    model, folder = llama
    stats = random_query_stats(model) if case.scorer == "expected_attention" else None
    env = {
        "TANGRAM_RETENTION": str(case.retention),
        "TANGRAM_WINDOW": str(case.window),
        "TANGRAM_RECENT": str(case.recent),
        "TANGRAM_PAGE": str(case.page),
        "TANGRAM_GROUP_HEADS": str(case.group_heads),
        "TANGRAM_SINKS": str(case.sinks),
        "TANGRAM_GROUPING": case.grouping,
        "TANGRAM_SCORER": case.scorer,
    }
    budgets = None
    if case.planned:
        path, budgets = write_plan(
            model, tmp_path, scorer=case.scorer, window=case.window, stats=stats
        )
        env["TANGRAM_PLAN"] = str(path)
    prompt = random_tokens(case.prompt, seed=case.prompt)
    result = serve(folder, [Req(prompt, 70, rid="a")], env=env, chunked_prefill_size=case.chunk)

    layout = layout_for(
        model,
        retention=case.retention,
        budgets=budgets,
        window=case.window,
        recent=case.recent,
        page=case.page,
        sinks=case.sinks,
        group_heads=case.group_heads,
        grouping=case.grouping,
    )
    reference = CompressedRun(model, layout, case.scorer, stats)
    assert result["a"].output_ids == reference.greedy(prompt, 70)
    kept = result.collected["kept"]["a"]
    stored = layout.rule.sealed(case.prompt + 69)
    expected = {key: value for key, value in reference.kept.items() if key[2] < stored}
    assert len(expected) == stored * 9
    assert kept == expected
    assert_reserved_exactly(result)


@pytest.mark.parametrize("make", [tiny_gemma3, tiny_gpt_oss], ids=["gemma3", "gpt-oss"])
def test_sliding_layers_keep_their_window_and_are_never_compressed(tmp_path, make):
    """GPT-OSS has attention sinks too, and SGLang's own list of backends for it."""
    model = make(seed=2)
    folder = save(model, tmp_path / "model")
    prompt = random_tokens(150, seed=5)
    env = {**TINY_ENV, "TANGRAM_RETENTION": "0.5"}
    layout = layout_for(model, retention=0.5, window=32, recent=16, page=4)
    reference = CompressedRun(model, layout, "keydiff")
    expected = reference.greedy(prompt, 40)
    for chunk in (16, 41, 512):
        result = serve(folder, [Req(prompt, 40, rid="a")], env=env, chunked_prefill_size=chunk)
        assert result["a"].output_ids == expected
        # both full-attention layers of two heads, and no other
        assert {key[0] for key in result.collected["kept"]["a"]} == {1, 3}
        kept = {key: reference.kept[key] for key in result.collected["kept"]["a"]}
        assert result.collected["kept"]["a"] == kept
        assert_reserved_exactly(result)


def test_three_turns_of_a_growing_chat_equal_the_reference(llama):
    model, folder = llama
    turns = [random_tokens(n, seed=n) for n in (90, 31, 44)]
    requests = [
        Req(turns[0], 64, rid="turn0"),
        Req(turns[1], 64, rid="turn1", after="turn0", continues=True),
        Req(turns[2], 64, rid="turn2", after="turn1", continues=True),
    ]
    env = {**TINY_ENV, "TANGRAM_RETENTION": "0.4"}
    result = serve(folder, requests, env=env, chunked_prefill_size=64)
    layout = layout_for(model, retention=0.4, window=32, recent=16, page=4)
    reference, found = CompressedRun(model, layout, "keydiff"), result.collected["kept"]
    for rid, turn in zip(("turn0", "turn1", "turn2"), turns, strict=True):
        assert result[rid].output_ids == reference.greedy(turn, 64)
    # what turn 0 sealed is reused by turns 1 and 2
    kept = {key: p for rid in ("turn0", "turn1", "turn2") for key, p in found.get(rid, {}).items()}
    stored = layout.rule.sealed(90 + 31 + 44 + 191)
    assert_same_kept(kept, {k: v for k, v in reference.kept.items() if k[2] < stored})


def test_log_probabilities_equal_the_reference_within_1e_4(llama):
    model, folder = llama
    prompt = random_tokens(180, seed=9)
    env = {**TINY_ENV, "TANGRAM_RETENTION": "0.3"}
    request = Req(prompt, 1, rid="a", logprobs=True, prompt_logprobs_from=0)
    result = serve(folder, [request], env=env, chunked_prefill_size=50)
    layout = layout_for(model, retention=0.3, window=32, recent=16, page=4)
    logits = CompressedRun(model, layout, "keydiff").extend(prompt)
    logprobs = logits.log_softmax(dim=-1)
    expected = [float(logprobs[i, t]) for i, t in enumerate(prompt[1:])]
    found = [x for x in result["a"].prompt_logprobs if x is not None]
    assert len(found) == len(expected)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-4


def test_a_text_shorter_than_a_window_is_not_compressed(llama):
    """H1 (NVIDIA/kvpress PR#264): 1, 2, 3 tokens and around a window, at the least retention."""
    model, folder = llama
    for length in (1, 2, 3, 31, 32, 33):
        prompt = random_tokens(length, seed=length)
        env = {**TINY_ENV, "TANGRAM_RETENTION": "0.01"}
        result = serve(folder, [Req(prompt, 8, rid="a")], env=env)
        layout = layout_for(model, retention=0.01, window=32, recent=16, page=4)
        assert result["a"].output_ids == CompressedRun(model, layout, "keydiff").greedy(prompt, 8)
