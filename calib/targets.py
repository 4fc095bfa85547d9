"""Where the files of a calibration go, and whether they would replace those of another one."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tangram_sglang.calib.run_folder import Run
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.file import PlanFile, load_plan


def plan_path(out: Path, model: str, retention: float) -> Path:
    """Where the plan for ``retention`` goes; ``model`` is a model's id, in any case."""
    return out / f"{model.lower()}-rho{retention:g}.json"


def stats_path(out: Path, model: str) -> Path:
    """Where the query statistics of all its plans go."""
    return out / f"{model.lower()}-query-stats.safetensors"


def gates_path(out: Path, model: str) -> Path:
    """Where the copy of the gates that its plans name goes."""
    return out / f"{model.lower()}-gates.safetensors"


def check_targets(
    out: Path,
    run: Run,
    retentions: Sequence[float],
    scope: str,
    alpha: float,
    selection: str,
    gates_hash: str | None = None,
) -> None:
    """TangramError where a plan would take the place of another; nothing is measured before."""
    paths = [plan_path(out, run.model, rho) for rho in retentions]
    if twice := {path.name for path in paths if paths.count(path) > 1}:
        raise TangramError(
            f"--retention {','.join(map(repr, retentions))}: two of them would both be written to "
            f"{twice.pop()}; give values that differ in six digits"
        )
    for path, retention in zip(paths, retentions, strict=True):
        if not path.exists():
            continue
        wanted = {
            "scorers": run.profiles,
            "scope": scope,
            "retention": retention,
            "alpha": alpha,
            "window": run.window,
            "corpus_hash": run.corpus_hash,
            "scorer": selection,
            "gates_hash": gates_hash,
        }
        found = _facts(path, wanted)
        if found != wanted:
            name = next(x for x in wanted if found.get(x) != wanted[x])
            raise TangramError(
                f"{path} is another plan (its {name} is {found.get(name)}, here it is "
                f"{wanted[name]}) and would be overwritten; choose another --out, or give "
                "--overwrite"
            )


def check_beside(
    kind: Literal["stats", "gates"], target: Path, sha256: str, written: Sequence[Path]
) -> None:
    """TangramError where plans beside those ``written`` name another file by the name of ``target``.

    Gates take long to train and no plan may name them yet, so a file of other ones is refused too.
    """
    what = {"stats": "query statistics", "gates": "gates"}[kind]
    for path in sorted(target.parent.glob("*.json")):
        plan = None if path in written else _plan(path)
        if plan is None or getattr(plan.selection, f"{kind}_file") != target.name:
            continue
        if getattr(plan.selection, f"{kind}_hash") != sha256:
            raise TangramError(
                f"{path} belongs to other {what}, which {target.name} of this calibration would "
                "overwrite; choose another --out (all measurements are kept), or give --overwrite"
            )
    if kind == "gates" and target.exists() and sha256 != _sha256(target):
        raise TangramError(
            f"{target} holds other gates and would be overwritten; choose another --out, or give "
            "--overwrite"
        )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _plan(path: Path) -> PlanFile | None:
    try:
        return load_plan(path)
    except TangramError:
        return None


def _facts(path: Path, wanted: dict) -> dict:
    plan = _plan(path)
    if plan is None:
        return {}
    said = {**msgspec.structs.asdict(plan.selection), **msgspec.structs.asdict(plan.calibration)}
    return {name: said[name] for name in wanted}
