"""The reference's scorers and its choice of tokens, beside the package's."""

import dataclasses

import pytest
import torch

from tangram_sglang.kernels.select_reference import select_reference
from tangram_sglang.score import QueryStats, Window, create_scorer
from tests.reference.scorers import SCORERS, Asked, select
from tests.reference.tiny import (
    random_gates,
    tiny_llama,
)


def _window(heads=3, tokens=37, dim=16, start=64, sinks=0, stats=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, heads, tokens, dim, generator=generator)
    # a common direction, as keys have
    k += 2 * torch.randn(heads, 1, dim, generator=generator)
    return Window(k, v, start, torch.arange(heads), sinks, stats)


def _stats(rotary_dim, heads=3, ratio=3, dim=16, rank=2, seed=5):
    generator = torch.Generator().manual_seed(seed)
    inv_freq = 100.0 ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    return QueryStats(
        mean=torch.randn(heads, ratio, dim, generator=generator),
        factor=torch.randn(heads, ratio, dim, rank, generator=generator),
        diagonal=torch.rand(heads, ratio, dim, generator=generator),
        # slow enough, and not alike in the heads, that the mean rotation does not vanish
        inv_freq=inv_freq * torch.tensor([[0.01], [0.02], [0.05]], dtype=torch.float64)[:heads],
        scaling=torch.rand(heads, generator=generator) / 4,
    )


@pytest.mark.parametrize("start, sinks", [(0, 4), (0, 0), (64, 0), (3700, 0)])
@pytest.mark.parametrize(
    "name, stats",
    [
        pytest.param("keydiff", None, id="keydiff"),
        pytest.param("streaming", None, id="streaming"),
        pytest.param("random", None, id="random"),
        pytest.param("expected_attention", _stats(16), id="expected_attention-rotary16"),
        pytest.param("expected_attention", _stats(6), id="expected_attention-rotary6"),
        pytest.param(
            "expected_attention_local", _stats(16), id="expected_attention_local-rotary16"
        ),
        pytest.param("expected_attention_local", _stats(6), id="expected_attention_local-rotary6"),
        pytest.param("knorm", None, id="knorm"),
        pytest.param("snapkv", _stats(16), id="snapkv"),
        pytest.param("tova", _stats(16), id="tova"),
    ],
)
def test_scorers_agree_with_the_package(name, stats, start, sinks):
    window, scorer = _window(start=start, sinks=sinks, stats=stats), create_scorer(name)
    q = torch.randn(3, 2, 37, 16, generator=torch.Generator().manual_seed(1))
    if stats is not None:
        window = dataclasses.replace(window, scaling=stats.scaling, inv_freq=stats.inv_freq)
    if "q_window" in scorer.needs:
        window = dataclasses.replace(window, q=q[:, :, -scorer.q_window(37) :])
    theirs = scorer.score(window)
    assert theirs.std(dim=1).min() > 1e-3
    for head in range(3):
        k, v = window.k[head], window.v[head]
        asked = None
        if stats is not None:
            asked = Asked(q[head], float(stats.scaling[head]), stats.inv_freq[head])
        mine = SCORERS[name](k, v, start, sinks, head, stats, asked)
        assert mine.dtype == torch.float32
        # sinks are kept anyway; some scorers score them, some do not
        torch.testing.assert_close(mine[sinks:], theirs[head, sinks:], atol=1e-5, rtol=1e-5)


def test_gates_agree_with_the_package():
    model = tiny_llama(layers=3, q_heads=6, kv_heads=3)
    gates = random_gates(model, seed=2)
    hidden = torch.randn(37, 96, generator=torch.Generator().manual_seed(1))
    for layer in range(3):
        theirs = gates.projected_in(torch.float32).layer(layer).scores(hidden)
        assert theirs.std(dim=0).min() > 1e-2
        for head in range(3):
            gate = {x: getattr(gates, x)[layer, head] for x in ("q", "k", "sinks", "bias")}
            gate |= {x: getattr(gates, x)[layer] for x in ("q_norm", "k_norm")}
            asked = Asked(None, 1.0, None, hidden, gate)
            mine = SCORERS["fastkvzip"](None, None, 0, 0, head, None, asked)
            # the reference rounds to 11 bits
            torch.testing.assert_close(mine, theirs[:, head], atol=0, rtol=2**-11)


def test_expected_attention_is_the_mean_over_drawn_queries():
    """The closed form against its meaning: E[exp(a q.k)] over normal queries, turned on average."""
    stats, draws = _stats(16, ratio=1, heads=1), 400_000
    window = _window(heads=1, tokens=9, stats=stats)
    generator = torch.Generator().manual_seed(1)
    factor = stats.factor[0, 0] @ torch.randn(2, draws, generator=generator)
    noise = stats.diagonal[0, 0, :, None].sqrt() * torch.randn(16, draws, generator=generator)
    q = (stats.mean[0, 0, :, None] + factor + noise).double()
    # the mean of the rotated queries, by complex numbers: (x_i + i x_{i+8}) e^{i t w}
    t = torch.arange(64 + 9, 64 + 9 + 512, dtype=torch.float64)
    turn = torch.exp(1j * t * stats.inv_freq[0, :, None]).mean(dim=1, keepdim=True)
    turned = torch.complex(q[:8], q[8:]) * turn
    q = torch.cat([turned.real, turned.imag])
    weight = (window.k[0].double() @ q * stats.scaling[0]).exp().mean(dim=1)
    expected = weight / weight.sum() * window.v[0].norm(dim=1)
    mine = SCORERS["expected_attention"](window.k[0], window.v[0], 64, 0, 0, stats)
    torch.testing.assert_close(mine.double(), expected, rtol=0.05, atol=0)


def test_select():
    scores = torch.tensor([0.0, 5.0, 1.0, 5.0, 5.0, -2.0, 9.0, 1.0])
    assert select(scores, 3, 0) == [1, 3, 6]
    assert select(scores, 5, 0) == [1, 2, 3, 4, 6]
    assert select(scores, 3, 1) == [0, 1, 6]
    assert select(scores, 2, 2) == [0, 1]
    assert select(scores, 8, 0) == list(range(8))
    with pytest.raises(ValueError, match="NaN"):
        select(torch.tensor([1.0, torch.nan]), 1, 0)


def test_select_agrees_with_the_package_on_ties():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 5, (6, 37), generator=generator).float()
    for kept, sinks in ((1, 0), (4, 4), (17, 3), (37, 0)):
        theirs = select_reference(scores, kept, sinks).tolist()
        assert [select(row, kept, sinks) for row in scores] == theirs


# the folders that other tests serve
