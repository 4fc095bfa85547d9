"""Puts settings, plan file and model together into what serving runs with."""

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from tangram_sglang.errors import TangramError
from tangram_sglang.plan.drift import DriftRule, drift_rule
from tangram_sglang.plan.file import PlanFile, check_model, load_plan
from tangram_sglang.plan.gates import GateFile, check_layers, load_gates
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.model_config import model_config
from tangram_sglang.plan.reclaim import ReclaimRule
from tangram_sglang.plan.shape import ModelShape
from tangram_sglang.plan.stats import load_query_stats
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.score import QueryStats, Scorer, create_scorer
from tangram_sglang.settings import Settings

logger = logging.getLogger(__name__)

DEFAULT_WINDOW = 512
FALLBACK_SCORER = "keydiff"


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """The plan in force.

    Attributes:
        name: plan file, or ``uniform``.
        retention: rho asked for.
        scorer_name: which scorer picks tokens.
        scorer: that scorer, or None at retention 1.0, where nothing is picked.
        query_stats: of every full-attention KV head, if the scorer reads them.
        layout: everything static that follows.
        scaling: [H] fp32, factor on q.k before the softmax, of every full-attention KV head; if the
            scorer reads queries.
        inv_freq: [H, rotary_dim / 2] fp64, of the same, if the scorer reads them.
        drift: what to watch of it, if asked for.
        gates: of every full-attention layer, if the scorer reads their scores.
        splits: how decode work is shared out, ``map`` or ``equal``.
        digest: of all that decides which tokens are kept and where they lie; what is cached under
            one digest means nothing under another.
    """

    name: str
    retention: float
    scorer_name: str
    scorer: Scorer | None
    query_stats: QueryStats | None
    layout: KVLayout
    digest: str
    scaling: torch.Tensor | None = None
    inv_freq: torch.Tensor | None = None
    drift: DriftRule | None = None
    gates: GateFile | None = None
    splits: str = "map"


def read_plan(settings: Settings, hf_config: Any) -> PlanFile | None:
    """The plan file the user named, checked against the model, or None.

    Also checks what needs no weights: windows, pages, the scorer and what it reads.
    """
    _rule(settings, None)
    if settings.plan is None:
        drift_rule(settings, None)
    if settings.scorer is not None:
        create_scorer(settings.scorer)
    if settings.plan is None:
        _check_scorer(settings, None)
        return None
    plan = load_plan(settings.plan)
    check_model(plan, model_config(hf_config), settings.plan)
    _rule(settings, plan)
    drift_rule(settings, plan)
    _check_scorer(settings, plan)
    return plan


def _check_scorer(settings: Settings, plan: PlanFile | None) -> None:
    """TangramError where the scorer reads what is not there; gates are ``read_gates``'s."""
    if serving_retention(settings, plan) == 1.0:
        return
    name = serving_scorer(settings, plan)
    needs = create_scorer(name).needs
    if "q_window" in needs and settings.reserve == "uncompressed":
        raise TangramError(
            f"TANGRAM_RESERVE=uncompressed holds no queries, and scorer {name} reads them; set "
            f"TANGRAM_SCORER={FALLBACK_SCORER}"
        )
    if "query_stats" in needs and (plan is None or plan.selection.stats_file is None):
        raise TangramError(
            f"scorer {name} reads calibrated query statistics, and "
            + ("there is no plan" if plan is None else f"plan {settings.plan} has none")
            + f"; give TANGRAM_PLAN a calibrated plan or set TANGRAM_SCORER={FALLBACK_SCORER}"
        )


def serving_plan(
    settings: Settings,
    hf_config: Any,
    shape: ModelShape,
    max_tokens: int,
    device: Any,
    rope: Callable[[], Mapping[int, torch.Tensor]] | None = None,
) -> ServingPlan:
    """Resolve every choice; TangramError says which two do not fit together.

    Args:
        settings: the user's.
        hf_config: the model's Hugging Face text config.
        shape: attention layers of this rank.
        max_tokens: longest request.
        device: where query statistics go.
        rope: reads the frequencies off the model, fp64 by layer id; asked if the scorer needs them.
    """
    plan = read_plan(settings, hf_config)
    rule = _rule(settings, plan, max_tokens)
    retention = serving_retention(settings, plan)
    heads = shape.full_heads
    if plan is None:
        budgets = [retention] * len(heads)
        if retention < 1.0:
            logger.info("tangram: no plan given, every head keeps %.3f of a window", retention)
    else:
        budgets = _budgets(plan, heads, settings.plan)
        if retention != plan.calibration.retention:
            logger.info(
                "tangram: budgets calibrated at retention %.3f are rescaled to %.3f",
                plan.calibration.retention,
                retention,
            )
    layout = KVLayout.build(
        shape,
        rule,
        budgets=budgets,
        retention=retention,
        per_group=settings.group_heads,
        grouping=settings.grouping,
        max_tokens=max_tokens,
    )
    name = serving_scorer(settings, plan)
    scorer, stats, scaling, inv_freq, gates = None, None, None, None, None
    if layout.compresses:
        scorer = create_scorer(name)
        if "query_stats" in scorer.needs:
            path = Path(settings.plan).parent / plan.selection.stats_file
            stats = load_query_stats(path, plan.selection.stats_hash, shape, device)
        if "q_window" in scorer.needs:
            layout = layout.with_queries(shape, scorer.q_window(rule.window))
            scaling = torch.tensor(shape.scalings, device=device)
        if "rope" in scorer.needs:
            frequencies = rope()
            inv_freq = torch.stack([frequencies[layer] for layer, _ in heads]).to(device)
        if gates := read_gates(settings, plan, hf_config):
            check_layers(gates, shape)
            layout = layout.with_scores()
    stats_hash = plan.selection.stats_hash if plan and stats is not None else None
    digest = _digest(layout, name, stats_hash, gates.sha256 if gates else None)
    return ServingPlan(
        settings.plan or "uniform",
        retention,
        name,
        scorer,
        stats,
        layout,
        digest,
        scaling,
        inv_freq,
        drift_rule(settings, plan),
        gates,
        settings.splits,
    )


def serving_retention(settings: Settings, plan: PlanFile | None) -> float:
    """Rho in force."""
    if settings.retention is not None:
        return settings.retention
    return plan.calibration.retention if plan else 1.0


def serving_scorer(settings: Settings, plan: PlanFile | None) -> str:
    """Name of the scorer that picks tokens."""
    return settings.scorer or (plan.selection.scorer if plan else FALLBACK_SCORER)


def read_gates(settings: Settings, plan: PlanFile | None, hf_config: Any) -> GateFile | None:
    """The gates that serving reads, checked against the model's config; None where it reads none."""
    name = serving_scorer(settings, plan)
    if "hidden" not in create_scorer(name).needs:
        if settings.gates is not None:
            raise TangramError(
                f"TANGRAM_GATES={settings.gates}: scorer {name} reads no gates; unset it, or set "
                "TANGRAM_SCORER to one that does"
            )
        return None
    if serving_retention(settings, plan) == 1.0:
        return None
    if settings.gates is not None:
        return load_gates(settings.gates, hf_config)
    if plan is None or plan.selection.gates_file is None:
        raise TangramError(
            f"scorer {name} reads the scores of trained gates, and "
            + ("there is no plan" if plan is None else f"plan {settings.plan} names none")
            + "; give TANGRAM_GATES a file that tangram train-gate made, or set "
            f"TANGRAM_SCORER={FALLBACK_SCORER}"
        )
    found = load_gates(Path(settings.plan).parent / plan.selection.gates_file, hf_config)
    if found.sha256 != plan.selection.gates_hash:
        raise TangramError(
            f"gate file {found.path}: sha256 is {found.sha256}, the plan names "
            f"{plan.selection.gates_hash}; put the plan's own gates beside it, or choose these with "
            "TANGRAM_GATES"
        )
    return found


def _digest(layout: KVLayout, scorer: str, stats_hash: str | None, gates_hash: str | None) -> str:
    """sha256; budgets and retention are in the groups' counts."""
    facts = (layout.rule, layout.groups, layout.per_group, scorer, stats_hash, gates_hash)
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()


def _rule(settings: Settings, plan: PlanFile | None, max_tokens: int = 0) -> WindowRule:
    window = settings.window or (plan.calibration.window if plan else DEFAULT_WINDOW)
    if settings.recent % settings.page:
        raise TangramError(
            f"{settings.recent} recent tokens are no multiple of the page of {settings.page}: the next "
            "turn finds whole pages, and needs all recent tokens in them; choose TANGRAM_RECENT as a "
            "multiple of TANGRAM_PAGE"
        )
    lengths = window, settings.recent, settings.page, settings.sinks
    if settings.reserve == "uncompressed":
        return ReclaimRule(*lengths, longest=max_tokens)
    return WindowRule(*lengths)


def _budgets(plan: PlanFile, heads, path) -> list[float]:
    layers = sorted({layer for layer, _ in heads})
    if plan.layers != layers:
        raise TangramError(
            f"plan file {path}: layers is {plan.layers}, the model's full-attention layers are "
            f"{layers}; calibrate this model"
        )
    if len(plan.budgets) != len(heads):
        raise TangramError(
            f"plan file {path}: {len(plan.budgets)} budgets, the model has {len(heads)} KV heads; "
            "calibrate this model"
        )
    return list(plan.budgets)
