"""The plan file: calibrated budgets of one model for one retention.

Readable JSON. Grouping and counts are computed from it at load and never stored. Query
statistics lie in a safetensors file beside it, named by ``selection.stats_file``.
"""

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tangram_sglang.errors import TangramError

FORMAT = "tangram-plan/1"

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Retention = Annotated[float, Meta(gt=0.0, le=1.0)]
Count = Annotated[int, Meta(ge=1)]


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model a plan was calibrated on.

    ``config`` holds the fields that decide what its keys look like, one by one, so that a loader
    can name the one that differs; ``config_hash`` is the sha256 of the same fields.
    """

    id: str
    config: dict[str, int | float | str | bool | list[int | str] | None]
    config_hash: str


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the budgets come from.

    Attributes:
        scorers: profiles whose mean budgets these are.
        scope: ``global`` or ``layer``, over which heads the top share of a window was taken.
        retention: rho, share of tokens kept.
        alpha: budgets are min(1, mean + alpha * spread); of profile ``error`` it has no part in them.
        window: W, tokens per window.
        samples: windows measured.
        corpus_hash: sha256 of the calibration texts.
    """

    scorers: list[str]
    scope: str
    retention: Retention
    alpha: float
    window: Count
    samples: Count
    corpus_hash: str


class Selection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The scorer that picks tokens; statistics and gates to read, files beside the plan with sha256."""

    scorer: str
    stats_file: str | None = None
    stats_hash: str | None = None
    gates_file: str | None = None
    gates_hash: str | None = None


class Drift(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What calibration saw heads ask for, to be compared with what they ask for when serving.

    Attributes:
        scorer: whose shares; one that reads K, V and positions only.
        limits: mean + 2 standard deviations of each head's share, in global head order.
    """

    scorer: str
    limits: list[Share]


class PlanFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One plan.

    Attributes:
        budgets: share kept per KV head, in global head order: ``layers`` in turn, heads in each.
        spread: standard deviation of each head's share over the samples.
        layers: ids of the full-attention layers.
        tool_version: version of tangram_sglang that wrote the file.
        drift: for ``TANGRAM_DRIFT``.
    """

    format: str
    tool_version: str
    model: ModelSpec
    calibration: Calibration
    selection: Selection
    layers: list[int]
    budgets: list[Share]
    spread: list[Annotated[float, Meta(ge=0.0)]]
    drift: Drift | None = None


def config_hash(config: dict) -> str:
    """sha256 of the canonical JSON of ``config``."""
    return hashlib.sha256(msgspec.json.encode(config, order="deterministic")).hexdigest()


def save_plan(plan: PlanFile, path: Path) -> None:
    """Write ``plan`` as indented JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n")


def load_plan(path: str | Path) -> PlanFile:
    """Read a plan file and check it in itself; TangramError names the field that is wrong."""
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TangramError(
            f"plan file {path} cannot be read ({error.strerror}); correct TANGRAM_PLAN"
        ) from None
    try:
        found = msgspec.json.decode(raw)
        written = found.get("format") if isinstance(found, dict) else None
        if written != FORMAT:
            raise TangramError(
                f"plan file {path}: format is {written!r}, this version reads {FORMAT!r}; "
                "calibrate again or install the version that wrote it"
            )
        plan = msgspec.json.decode(raw, type=PlanFile)
    except msgspec.DecodeError as error:
        raise TangramError(f"plan file {path} is not a plan: {error}; calibrate again") from None
    _check(plan, path)
    return plan


def _check(plan: PlanFile, path: Path) -> None:
    def wrong(field: str, found, expected) -> TangramError:
        return TangramError(
            f"plan file {path}: {field} is {found}, expected {expected}; the file was changed by "
            "hand or is damaged: calibrate again"
        )

    if config_hash(plan.model.config) != plan.model.config_hash:
        raise wrong("model.config_hash", plan.model.config_hash, config_hash(plan.model.config))
    if plan.calibration.scope not in ("global", "layer"):
        raise wrong("calibration.scope", plan.calibration.scope, "global or layer")
    if len(plan.spread) != len(plan.budgets):
        raise wrong("length of spread", len(plan.spread), len(plan.budgets))
    if plan.drift is not None and len(plan.drift.limits) != len(plan.budgets):
        raise wrong("length of drift.limits", len(plan.drift.limits), len(plan.budgets))
    if not plan.layers or len(plan.budgets) % len(plan.layers):
        raise wrong("length of budgets", len(plan.budgets), f"a multiple of {len(plan.layers)}")
    selection = plan.selection
    if (selection.stats_file is None) != (selection.stats_hash is None):
        raise wrong("selection.stats_hash", selection.stats_hash, "set with stats_file")
    if (selection.gates_file is None) != (selection.gates_hash is None):
        raise wrong("selection.gates_hash", selection.gates_hash, "set with gates_file")


def check_model(plan: PlanFile, config: dict, path: str | Path) -> None:
    """Refuse a plan of another model, naming every field of ``config`` that differs."""
    if found := differences(plan.model.config, config, "in the plan"):
        raise TangramError(
            f"plan file {path} was calibrated on {plan.model.id}, another model: {found}; calibrate "
            "this model or unset TANGRAM_PLAN"
        )


def differences(theirs: dict, config: dict, where: str) -> str:
    """Fields of a model's ``config`` that differ from those kept ``where``; empty if none does."""
    return "; ".join(
        f"{name} is {theirs.get(name)!r} {where} and {config.get(name)!r} in the model"
        for name in sorted({*theirs, *config})
        if theirs.get(name) != config.get(name)
    )
