"""From a finished run to plan files, and how a prompt reaches the server that is watched.

Knows the server by its URL only; who starts it is the caller's business.
"""

import json
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tangram_sglang import __version__
from tangram_sglang.calib.profiles import DRIFT, drift_limits, plan_budgets, queries_of
from tangram_sglang.calib.query_stats import save_query_stats
from tangram_sglang.calib.run_folder import RunFolder
from tangram_sglang.calib.stages import RANK
from tangram_sglang.calib.targets import check_beside, gates_path, plan_path, stats_path
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.file import (
    FORMAT,
    Calibration,
    Drift,
    ModelSpec,
    PlanFile,
    Selection,
    config_hash,
    load_plan,
    save_plan,
)
from tangram_sglang.plan.gates import GateFile, check_layers
from tangram_sglang.plan.model_config import model_config
from tangram_sglang.plan.stats import load_query_stats

PROMPT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """How plans follow from a run's measurements.

    Attributes:
        retentions: one plan for each.
        scope: ``global`` or ``layer``.
        alpha: room above the mean in standard deviations.
        selection: scorer that picks tokens when serving; None for the one that was measured with.
        gates: what it reads, if it does.
    """

    retentions: tuple[float, ...]
    scope: str
    alpha: float
    selection: str | None = None
    gates: GateFile | None = None


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
    folder: RunFolder, out: Path, hf_config: Any, recipe: Recipe, overwrite: bool = False
) -> list[Path]:
    """Write one plan per retention and the files they share; returns the plans' paths.

    Args:
        folder: a finished run.
        out: folder for the plans.
        hf_config: the model's Hugging Face config.
        recipe: how plans follow.
        overwrite: replace statistics that other plans in ``out`` name.
    """
    run, queries = folder.run, queries_of(folder)
    stats = stats_path(out, run.model)
    if recipe.gates is not None:
        check_layers(recipe.gates, queries.shape)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".calibrate-") as scratch:
        made = Path(scratch) / stats.name
        stats_hash = save_query_stats(queries, RANK, made)
        load_query_stats(made, stats_hash, queries.shape)
        if not overwrite:
            written = [plan_path(out, run.model, rho) for rho in recipe.retentions]
            check_beside("stats", stats, stats_hash, written)
        shutil.move(made, stats)
    selection = Selection(recipe.selection or run.selection, stats.name, stats_hash)
    if recipe.gates is not None:
        gates = gates_path(out, run.model)
        if recipe.gates.path.resolve() != gates.resolve():
            shutil.copyfile(recipe.gates.path, gates)
        selection = replace(selection, gates_file=gates.name, gates_hash=recipe.gates.sha256)
    config = model_config(hf_config)
    paths = []
    for retention in recipe.retentions:
        found = plan_budgets(folder, recipe.scope, retention, recipe.alpha)
        limits = drift_limits(folder, recipe.scope, retention)
        plan = PlanFile(
            format=FORMAT,
            tool_version=__version__,
            model=ModelSpec(run.model, config, config_hash(config)),
            calibration=Calibration(
                scorers=list(run.profiles),
                scope=recipe.scope,
                retention=retention,
                alpha=recipe.alpha,
                window=run.window,
                samples=found.samples,
                corpus_hash=run.corpus_hash,
            ),
            selection=selection,
            layers=[x.layer_id for x in queries.shape.layers],
            budgets=[round(float(x), 5) for x in found.budgets],
            spread=[round(float(x), 5) for x in found.spread],
            drift=Drift(DRIFT, [round(float(x), 5) for x in limits]),
        )
        path = plan_path(out, run.model, retention)
        save_plan(plan, path)
        load_plan(path)
        paths.append(path)
    return paths
