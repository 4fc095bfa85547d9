"""TANGRAM_DRIFT: what heads ask for when serving, beside what calibration saw them ask for."""

import numpy as np
import pytest
import torch

from tangram_sglang.backend.drift import DriftWatch, top_shares
from tangram_sglang.calib.shares import window_shares
from tangram_sglang.plan.drift import DriftRule
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.score import Window, create_scorer
from tests.harness import Req, ScenarioFailed, run_scenario
from tests.plans import write_plan
from tests.pool.test_rows import FULL, layout
from tests.reference.tiny import random_tokens, save, tiny_llama
from tests.serving import TINY_ENV


@pytest.mark.parametrize("retention", [0.1, 0.37, 1.0])
def test_shares_are_those_of_the_calibration(retention):
    generator = torch.Generator().manual_seed(0)
    # few values, so that many tie
    scores = torch.randint(0, 5, (6, 32), generator=generator).float()
    expected = window_shares(scores.numpy(), [retention], [6])["global"][0]
    assert np.allclose(top_shares(scores, retention).numpy(), expected)


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("every", [1, 3])
def test_counts_are_those_of_the_windows_looked_at(scope, every):
    form = layout(WindowRule(16, 4, 4, 2), shape=FULL)
    generator = torch.Generator().manual_seed(1)
    windows = torch.randn(7, 2, 4, 16, 8, generator=generator)
    scorer = create_scorer("keydiff")
    shares = []
    for i, (k, v) in enumerate(windows):
        scores = scorer.score(Window(k, v, 16 * i, torch.arange(4), 2 if i == 0 else 0, None))
        shares.append(window_shares(scores.numpy(), [0.3], [2, 2])[scope][0])
    limits = np.median(shares, axis=0)
    watch = DriftWatch(DriftRule("keydiff", tuple(limits), 0.3, scope, every), form, "cpu")
    assert watch.heads == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # a forward pass shows all its windows layer by layer
    for batch in ([0, 1, 2], [3], [4, 5, 6]):
        for layer in (0, 1):
            for i in batch:
                if watch.wants(layer):
                    heads = slice(2 * layer, 2 * layer + 2)
                    watch.window(layer, 16 * i, windows[i, 0, heads], windows[i, 1, heads])
    watch.read()
    chosen = np.array(shares)[::every]
    assert watch.read()[0] == len(chosen)
    assert np.array_equal(watch.read()[1], (chosen > limits.astype(np.float32)).sum(axis=0))


def _drift(scheduler):
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    pool, registry = scheduler.token_to_kv_pool_allocator.get_kvcache(), CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    page = generate_latest(registry).decode().splitlines()
    return pool.drift.heads, pool.drift.read(), [x for x in page if x.startswith("tangram:drift")]


@pytest.mark.server
def test_a_server_counts_heads_above_their_limits(tmp_path):
    """Limits that every window exceeds, and such that none does; windows of prompts are looked at."""
    model = tiny_llama(seed=6)
    folder = save(model, tmp_path)
    heads = 4
    path, _ = write_plan(model, tmp_path, drift=[0.0, 1.0, 0.0, 1.0][:heads])
    env = {**TINY_ENV, "TANGRAM_PLAN": str(path), "TANGRAM_DRIFT": "0.5"}
    arguments = {"attention_backend": "tangram", "chunked_prefill_size": 64}
    requests = [Req(random_tokens(n, seed=n), 4, rid=f"n{n}-") for n in (150, 90)]
    result = run_scenario(
        folder, requests, server_args={**arguments, "enable_metrics": True}, env=env, collect=_drift
    )
    names, (windows, exceeded), page = result.collected
    assert names == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # (150 - 1 - 16) // 32 and (90 - 1 - 16) // 32 windows, every second one of them
    assert windows == 3
    assert exceeded.tolist() == [3, 0, 3, 0]
    assert sorted(page) == [
        'tangram:drift_exceeded_total{head="0",layer="0"} 3.0',
        'tangram:drift_exceeded_total{head="0",layer="1"} 3.0',
        "tangram:drift_windows_total 3.0",
    ]


@pytest.mark.server
def test_drift_needs_a_plan_with_limits(tmp_path):
    model = tiny_llama(seed=6)
    folder = save(model, tmp_path)
    path, _ = write_plan(model, tmp_path)
    for plan, words in (({}, "there is no plan"), ({"TANGRAM_PLAN": str(path)}, "its limits")):
        with pytest.raises(ScenarioFailed) as failure:
            run_scenario(
                folder,
                [Req([9], 1)],
                server_args={"attention_backend": "tangram", "enable_metrics": True},
                env={**TINY_ENV, **plan, "TANGRAM_DRIFT": "0.1"},
            )
        assert words in str(failure.value.error)
