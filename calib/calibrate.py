"""Calibration of one model: texts through a server in observe mode, then plan files.

Knows the server by its URL and the folder it writes to; who starts it is the caller's business.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram_sglang import __version__
from tangram_sglang.calib.budgets import head_budgets
from tangram_sglang.calib.observations import read_queries, read_shares
from tangram_sglang.calib.query_stats import save_query_stats
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.file import (
    FORMAT,
    Calibration,
    ModelSpec,
    PlanFile,
    Selection,
    config_hash,
    load_plan,
    save_plan,
)
from tangram_sglang.plan.model_config import model_config
from tangram_sglang.plan.stats import load_query_stats

# of the stored covariances; README.md beside this file has the measurement
RANK = 4
SELECTION = "expected_attention"
PROMPT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """How budgets follow from the observations.

    Attributes:
        retentions: one plan for each.
        profiles: scorers whose budgets are averaged.
        scope: ``global`` or ``layer``.
        alpha: room above the mean in standard deviations.
        window: W.
        corpus_hash: sha256 of the texts.
    """

    retentions: tuple[float, ...]
    profiles: tuple[str, ...]
    scope: str
    alpha: float
    window: int
    corpus_hash: str


def feed(url: str, prompt: Sequence[int]) -> None:
    """Send ``prompt``, token ids, to the server at ``url`` and have one token generated."""
    sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"input_ids": list(prompt), "sampling_params": sampling}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    # a proxy for the outside world cannot reach the loopback interface
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=PROMPT_TIMEOUT_S) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        raise TangramError(
            f"the server refused a prompt of {len(prompt)} tokens: {error.read().decode()}"
        ) from None


def write_plans(
    observations: Path, out: Path, model_id: str, hf_config: Any, recipe: Recipe
) -> list[Path]:
    """Write one plan per retention and the statistics they share; returns the plans' paths.

    Args:
        observations: folder that the observer wrote.
        out: folder for the plans.
        model_id: name of the model, in the plans and, in lower case, in the files' names.
        hf_config: the model's Hugging Face config.
        recipe: how to calibrate.
    """
    queries = read_queries(observations)
    stem = model_id.lower()
    stats_path = out / f"{stem}-query-stats.safetensors"
    stats_hash = save_query_stats(queries, RANK, stats_path)
    load_query_stats(stats_path, stats_hash, queries.shape)
    config = model_config(hf_config)
    paths = []
    for retention in recipe.retentions:
        profiles = [read_shares(observations, p, recipe.scope, retention) for p in recipe.profiles]
        found = head_budgets(profiles, recipe.alpha)
        plan = PlanFile(
            format=FORMAT,
            tool_version=__version__,
            model=ModelSpec(model_id, config, config_hash(config)),
            calibration=Calibration(
                scorers=list(recipe.profiles),
                scope=recipe.scope,
                retention=retention,
                alpha=recipe.alpha,
                window=recipe.window,
                samples=found.samples,
                corpus_hash=recipe.corpus_hash,
            ),
            selection=Selection(SELECTION, stats_path.name, stats_hash),
            layers=[x.layer_id for x in queries.shape.layers],
            budgets=[round(float(x), 5) for x in found.budgets],
            spread=[round(float(x), 5) for x in found.spread],
        )
        path = out / f"{stem}-rho{retention:g}.json"
        save_plan(plan, path)
        load_plan(path)
        paths.append(path)
    return paths
