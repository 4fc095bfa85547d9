"""What is watched at run time to see whether a plan's calibration still fits (``TANGRAM_DRIFT``)."""

from dataclasses import dataclass

from tangram_sglang.errors import TangramError
from tangram_sglang.plan.file import PlanFile
from tangram_sglang.score import create_scorer
from tangram_sglang.settings import Settings


@dataclass(frozen=True, slots=True)
class DriftRule:
    """How sampled windows are compared with the calibration.

    Attributes:
        scorer: whose shares are taken.
        limits: [H], the share that a head exceeded in few windows of the calibration.
        retention: rho, of whose top share over all heads, or over a layer's, heads get theirs.
        scope: ``global`` or ``layer``.
        every: one window of so many is looked at.
    """

    scorer: str
    limits: tuple[float, ...]
    retention: float
    scope: str
    every: int


def drift_rule(settings: Settings, plan: PlanFile | None) -> DriftRule | None:
    """The rule asked for; TangramError where the plan has nothing to compare with."""
    if not settings.drift:
        return None
    if plan is None or plan.drift is None:
        raise TangramError(
            f"TANGRAM_DRIFT={settings.drift} compares heads with a plan's calibration, and "
            + ("there is no plan" if plan is None else f"{settings.plan} does not hold its limits")
            + "; give TANGRAM_PLAN a plan of this version of tangram calibrate or unset TANGRAM_DRIFT"
        )
    if needs := create_scorer(plan.drift.scorer).needs:
        raise TangramError(
            f"plan file {settings.plan}: drift.scorer is {plan.drift.scorer}, which needs "
            f"{', '.join(sorted(needs))}; drift is watched with scorers that need nothing"
        )
    return DriftRule(
        plan.drift.scorer,
        tuple(plan.drift.limits),
        plan.calibration.retention,
        plan.calibration.scope,
        max(1, round(1 / settings.drift)),
    )
