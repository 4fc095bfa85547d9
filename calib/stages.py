"""The two stages of a calibration's measuring, each prompt by prompt and resumable.

The first takes the sums over queries and the profiles that read windows alone; the second, only where
it is needed, the profiles that read the query statistics which follow from the first, and the errors.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tangram_sglang.calib import observations as files
from tangram_sglang.calib.profiles import DRIFT, ERROR, queries_of
from tangram_sglang.calib.query_stats import save_query_stats
from tangram_sglang.calib.run_folder import RunFolder
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.score import create_scorer

# of the stored covariances; README.md beside this file has the measurement
RANK = 4
STAGES = ("first", "second")


@dataclass(frozen=True, slots=True)
class Stage:
    """One pass over all prompts.

    Attributes:
        name: ``first`` or ``second``.
        profiles: scorers whose shares are taken.
        error: scorer whose selection errors are measured under, or None.
    """

    name: str
    profiles: tuple[str, ...]
    error: str | None = None


def stages(profiles: tuple[str, ...], selection: str) -> list[Stage]:
    """What has to be run for ``profiles``, and for the limits of ``TANGRAM_DRIFT``."""
    scorers = [name for name in profiles if name != ERROR]
    late = tuple(x for x in scorers if "query_stats" in create_scorer(x).needs)
    early = tuple(x for x in dict.fromkeys((*scorers, DRIFT)) if x not in late)
    found = [Stage("first", early)]
    if late or ERROR in profiles:
        found.append(Stage("second", late, selection if ERROR in profiles else None))
    return found


def tokens_left(folder: RunFolder, wanted: list[Stage]) -> int:
    """Tokens that are still to be measured, over all stages."""
    return sum(sum(folder.run.tokens[folder.done(stage.name) :]) for stage in wanted)


def run_stages(
    folder: RunFolder,
    wanted: list[Stage],
    prompts: list[list[int]],
    rule: WindowRule,
    show: Callable[[Stage, int], None],
) -> None:
    """Measure what is left; ``show`` sends prompt number i of a stage and waits for its answer."""
    for stage in wanted:
        if folder.done(stage.name) == len(prompts):
            continue
        folder.start(_request(folder, stage))
        for i in range(folder.done(stage.name), len(prompts)):
            show(stage, i)
            expected = rule.sealed(len(prompts[i]))
            if (found := files.count_windows(folder.live)) != expected:
                raise TangramError(
                    f"the server showed {found} windows of {expected}: it must serve these prompts "
                    "alone, in one process, and reuse no prefix"
                )
            folder.commit(stage.name, i)


def _request(folder: RunFolder, stage: Stage) -> files.Request:
    asked = {"profiles": list(stage.profiles), "retentions": folder.run.retentions}
    if stage.name == "first":
        sums = folder.sums()
        return files.Request(**asked, sums=None if sums is None else str(sums.resolve()))
    sha256 = save_query_stats(queries_of(folder), RANK, folder.stats)
    return files.Request(
        **asked,
        moments=False,
        stats_file=str(folder.stats.resolve()),
        stats_hash=sha256,
        error=stage.error,
    )
