"""The plan in force, and what tells it from another."""

import pytest

from tangram_sglang.plan.serving import serving_plan
from tangram_sglang.settings import Settings
from tests.plans import write_plan
from tests.reference.layout import model_shape
from tests.reference.tiny import random_query_stats, save, tiny_llama

BASE = {"retention": 0.5, "window": 32, "recent": 16, "page": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    llama = tiny_llama(seed=1)
    # saving fills in the config's architectures, which a plan file names
    save(llama, tmp_path_factory.mktemp("plans"))
    return llama


def _digest(model, **settings):
    shape = model_shape(model)
    return serving_plan(Settings(**{**BASE, **settings}), model.config, shape, 1024, "cpu").digest


CHANGES = [
    {"retention": 0.25},
    {"scorer": "streaming"},
    {"window": 64},
    {"recent": 20},
    {"page": 8},
    {"sinks": 2},
    {"group_heads": 2},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_another_choice_has_another_digest(model, change):
    """D7 (LMCache/LMCache#2961): the prefix cache's key tells plans from each other."""
    assert _digest(model, **change) != _digest(model) == _digest(model)


def test_other_budgets_and_other_statistics_have_another_digest(model, tmp_path):
    digests = set()
    for seed in (0, 1):
        for name in ("budgets", "statistics"):
            folder = tmp_path / f"{name}{seed}"
            folder.mkdir()
            stats = random_query_stats(model, seed=seed if name == "statistics" else 7)
            path, _ = write_plan(
                model,
                folder,
                scorer="expected_attention",
                stats=stats,
                seed=seed if name == "budgets" else 7,
            )
            digests.add(_digest(model, plan=str(path)))
    assert len(digests) == 4
