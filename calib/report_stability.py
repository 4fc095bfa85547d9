"""The report's tables on the texts: halves of them, kinds of them, and how many samples it takes."""

from collections.abc import Iterator, Sequence

import numpy as np

from tangram_sglang.calib.budgets import average, held
from tangram_sglang.calib.report_tables import Case, Table, clipped, spearman

DRAWS = 20
SAMPLE_COUNTS = (10, 25, 50, 100)
PLAN = "plan"


def halves_table(cases: Sequence[Case]) -> Table:
    table = Table(
        "halves",
        "Budgets from two halves of the texts",
        f"Spearman correlation over heads, {DRAWS} splits in which each kind of text falls on both "
        "sides; no text is in both halves. plan: the mean of all profiles.",
    )
    for case in cases:
        halves = list(_splits(case))
        for name in _names(case) if halves else ():
            found = [
                spearman(_budgets(case, name, half), _budgets(case, name, ~half)) for half in halves
            ]
            table.rows.append(
                {
                    **{"retention": case.retention, "profile": name, "splits": len(found)},
                    **{"mean": np.mean(found), "worst": np.min(found)},
                }
            )
    return table


def kinds_table(cases: Sequence[Case]) -> Table:
    table = Table(
        "kinds",
        "A plan from one kind of text, on the others",
        "Spearman correlation with budgets from all other kinds, and demand of the other kinds' "
        "windows that rescaled budgets clip: those from this kind, and those from the others.",
    )
    for case in cases:
        for name in _names(case):
            for kind in sorted({str(k) for k in case.profiles[0].kinds}):
                prompts = _prompts_of(case, kind)
                if not _divides(case, prompts):
                    continue
                mine, rest = _budgets(case, name, prompts), _budgets(case, name, ~prompts)
                table.rows.append(
                    {
                        **{"retention": case.retention, "profile": name, "kind": kind},
                        "windows": int(prompts[case.profiles[0].prompts].sum()),
                        "spearman": spearman(mine, rest),
                        # what a mean of profiles should meet, no single profile's demand says
                        "clipped": "" if name == PLAN else _clipped(case, name, mine, ~prompts),
                        "clipped_by_the_others_own": (
                            "" if name == PLAN else _clipped(case, name, rest, ~prompts)
                        ),
                    }
                )
    return table


def samples_table(cases: Sequence[Case]) -> Table:
    table = Table(
        "samples",
        "How many samples it takes",
        f"{DRAWS} draws of windows: Spearman correlation with the budgets of all, and demand of the "
        "windows that were not drawn which the rescaled budgets clip.",
    )
    for case in cases:
        for profile in case.profiles:
            shares = profile.shares(case.retention)
            everything = profile.budgets(case.retention, case.alpha).budgets
            rng = np.random.default_rng(0)
            for count in (n for n in SAMPLE_COUNTS if n < len(shares)):
                ranks, lost = [], []
                for _ in range(DRAWS):
                    drawn = np.zeros(len(shares), dtype=bool)
                    drawn[rng.permutation(len(shares))[:count]] = True
                    mine = profile.budgets(case.retention, case.alpha, drawn).budgets
                    ranks.append(spearman(mine, everything))
                    served = held(mine, case.retention)
                    lost.append(np.mean([clipped(s, served) for s in shares[~drawn]]))
                table.rows.append(
                    {
                        **{"retention": case.retention, "profile": profile.profile},
                        **{"samples": count, "of": len(shares), "spearman": np.mean(ranks)},
                        **{"spearman_worst": np.min(ranks)},
                        **{"clipped": np.mean(lost), "clipped_spread": np.std(lost)},
                    }
                )
    return table


def _names(case: Case) -> list[str]:
    names = [x.profile for x in case.profiles]
    return names if len(names) == 1 else [*names, PLAN]


def _chosen(case: Case, name: str):
    return case.profiles if name == PLAN else [x for x in case.profiles if x.profile == name]


def _budgets(case: Case, name: str, prompts: np.ndarray) -> np.ndarray:
    """Budgets from the windows of some prompts, a mask."""
    return average(
        [x.budgets(case.retention, case.alpha, prompts[x.prompts]) for x in _chosen(case, name)]
    ).budgets


def _clipped(case: Case, name: str, budgets: np.ndarray, prompts: np.ndarray) -> float:
    served = held(budgets, case.retention)
    return float(
        np.mean(
            [
                clipped(shares, served)
                for x in _chosen(case, name)
                for shares in x.shares(case.retention)[prompts[x.prompts]]
            ]
        )
    )


def _prompts_of(case: Case, kind: str) -> np.ndarray:
    return np.array([k == kind for k in _kinds(case)])


def _kinds(case: Case) -> list[str]:
    """Kind of each prompt."""
    kinds: dict[int, str] = {}
    for x in case.profiles:
        kinds |= dict(zip(x.prompts.tolist(), x.kinds.tolist(), strict=True))
    return [kinds.get(i, "") for i in range(max(kinds) + 1)]


def _splits(case: Case) -> Iterator[np.ndarray]:
    """Masks over prompts; every profile has windows on both sides."""
    kinds, rng = np.array(_kinds(case)), np.random.default_rng(0)
    for draw in range(DRAWS):
        half = np.zeros(len(kinds), dtype=bool)
        turn = draw % 2
        for kind in sorted(set(kinds.tolist())):
            mine = rng.permutation(np.flatnonzero(kinds == kind))
            # a kind of an odd number of texts gives the extra one to either side in turn
            half[mine[turn::2]] = True
            turn = 1 - turn
        if _divides(case, half):
            yield half


def _divides(case: Case, prompts: np.ndarray) -> bool:
    """Whether every profile has windows of these prompts and of the others."""
    return all(0 < prompts[x.prompts].sum() < len(x.prompts) for x in case.profiles)
