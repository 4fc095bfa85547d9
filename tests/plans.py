"""Writes plan files for tiny models, as calibration would."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file

from tangram_sglang import __version__
from tangram_sglang.plan.file import (
    FORMAT,
    Calibration,
    Drift,
    ModelSpec,
    PlanFile,
    Selection,
    config_hash,
    save_plan,
)
from tangram_sglang.plan.model_config import model_config
from tests.reference.layout import model_shape


def write_plan(
    model,
    folder: Path,
    *,
    scorer="keydiff",
    retention=0.5,
    window=32,
    stats=None,
    seed=0,
    drift=None,
) -> tuple[Path, list[float]]:
    """A plan with skewed budgets for a Hugging Face ``model``; its path and the budgets."""
    shape = model_shape(model)
    heads = shape.full_heads
    generator = torch.Generator().manual_seed(seed)
    budgets = (torch.rand(len(heads), generator=generator) ** 2).tolist()
    name, sha256 = None, None
    if stats is not None:
        name = "stats.safetensors"
        fields = ("mean", "factor", "diagonal", "inv_freq")
        save_file({x: getattr(stats, x).contiguous() for x in fields}, folder / name)
        sha256 = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    config = model_config(model.config)
    plan = PlanFile(
        format=FORMAT,
        tool_version=__version__,
        model=ModelSpec("tiny", config, config_hash(config)),
        calibration=Calibration(["keydiff"], "global", retention, 2.0, window, 50, "0" * 64),
        selection=Selection(scorer, name, sha256),
        layers=sorted({layer for layer, _ in heads}),
        budgets=budgets,
        spread=[0.05] * len(budgets),
        drift=None if drift is None else Drift("keydiff", drift),
    )
    path = folder / f"plan-{scorer}.json"
    save_plan(plan, path)
    return path, budgets
