"""Scorers by themselves: odd windows, what they need, and who refuses what."""

import dataclasses

import pytest
import torch

from tangram_sglang import score
from tangram_sglang.calib.observations import Request, write_request
from tangram_sglang.calib.observer import Observer
from tangram_sglang.errors import TangramError
from tangram_sglang.kernels.select_reference import select_reference
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.score import SCORERS, QueryStats, Window, create_scorer

HEADS, RATIO, DIM = 2, 4, 16
FIELDS = dataclasses.fields(QueryStats)


def window_for(scorer, tokens, sinks=0):
    """A random window with everything that any scorer reads."""
    generator = torch.Generator().manual_seed(tokens)
    k, v = torch.randn(2, HEADS, tokens, DIM, generator=generator)
    mean = torch.randn(HEADS, RATIO, DIM, generator=generator)
    inv_freq = 100.0 ** -(torch.arange(8, dtype=torch.float64) / 8).expand(HEADS, 8)
    scaling = torch.full((HEADS,), 0.25)
    stats = QueryStats(mean, mean[..., None], mean.square(), inv_freq, scaling)
    q = None
    if "q_window" in scorer.needs:
        asked = scorer.q_window(tokens)
        assert 1 <= asked <= tokens
        q = torch.randn(HEADS, RATIO, asked, DIM, generator=generator)
    gate = torch.rand(HEADS, tokens, generator=generator)
    return Window(k, v, 0, torch.arange(HEADS), sinks, stats, q, scaling, inv_freq, gate)


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 31, 32, 33])
def test_a_window_of_any_length_has_one_finite_row_a_kv_head(name, tokens):
    """H1 (NVIDIA/kvpress PR#264, PR#277): a window of 0 would make `[-0:]` all of it.

    H7 (FasterDecoding/SnapKV#16): 8 query heads on 2 KV heads, two rows.
    """
    scorer = create_scorer(name)
    scores = scorer.score(window_for(scorer, tokens))
    assert scores.shape == (HEADS, tokens)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()


def test_streaming_keeps_the_first_four_and_the_last_eight():
    """H15 (mit-han-lab/duo-attention#4): sink and recent sizes swapped."""
    scorer = create_scorer("streaming")
    kept = select_reference(scorer.score(window_for(scorer, 32, sinks=4)), 12, 4)
    assert kept.tolist() == [[*range(4), *range(24, 32)]] * HEADS


@pytest.mark.parametrize("name", ["snapkv", "tova"])
def test_who_asks_is_kept_first_and_the_newest_before_all(name):
    scorer = create_scorer(name)
    window = window_for(scorer, 40)
    scores, asked = scorer.score(window), window.q.shape[2]
    order = scores.argsort(dim=1, descending=True)
    assert (order[:, :asked] == torch.arange(39, 39 - asked, -1)).all()


def test_equal_tokens_tie_in_the_first_layer_whatever_the_last_bits_of_their_scores():
    """Chunks of another size multiply in another order: which of two equal tokens stays must not change."""
    generator = torch.Generator().manual_seed(0)
    scorer = create_scorer("fastkvzip")
    window = window_for(scorer, 60)
    gate = torch.rand(HEADS, 20, generator=generator).repeat(1, 3)
    kept = select_reference(scorer.score(dataclasses.replace(window, gate=gate)), 20, 0)
    noise = 1 + 2e-7 * torch.randn(HEADS, 60, generator=generator)
    noisy = dataclasses.replace(window, gate=gate * noise)
    assert torch.equal(select_reference(scorer.score(noisy), 20, 0), kept)
    assert not torch.equal(select_reference(noisy.gate, 20, 0), kept)


def test_a_scorer_that_needs_what_is_not_there_is_refused(monkeypatch):
    class Hungry:
        needs = frozenset({"q_window", "logits"})

    monkeypatch.setitem(score.SCORERS, "hungry", Hungry)
    with pytest.raises(TangramError, match="scorer hungry needs logits"):
        create_scorer("hungry")


@pytest.mark.parametrize("name", SCORERS)
def test_scoring_never_waits_for_the_device(name):
    """Tensors without data: whatever asked for a value, as no step on a GPU may, would raise."""
    scorer = create_scorer(name)
    window = window_for(scorer, 40, sinks=4)
    stats = QueryStats(*(getattr(window.query_stats, x.name).to("meta") for x in FIELDS))
    tensors = {
        x: getattr(window, x) for x in ("k", "v", "heads", "q", "scaling", "inv_freq", "gate")
    }
    tensors = {x: None if y is None else y.to("meta") for x, y in tensors.items()}
    scores = scorer.score(dataclasses.replace(window, query_stats=stats, **tensors))
    assert (scores.device.type, scores.shape) == ("meta", (HEADS, 40))


def test_gates_are_no_profile(tmp_path):
    shape = ModelShape((LayerShape(0, 4, 2, DIM, None, 0.25),))
    write_request(tmp_path, Request(("fastkvzip",)))
    with pytest.raises(TangramError, match="profile 'fastkvzip' needs hidden"):
        Observer(shape, {0: torch.ones(8)}, WindowRule(16, 8, 4, 2), tmp_path)
