"""The report's tables: budgets, regularity, clipped demand, memory and pages reclaimed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tangram_sglang.calib.budgets import Budgets, average, held
from tangram_sglang.calib.profiles import ERROR, Samples
from tangram_sglang.plan.counts import kept_counts
from tangram_sglang.plan.grouping import Head, group_heads
from tangram_sglang.plan.window import WindowRule

ALPHAS = (0.0, 1.0, 2.0)
GROUP_SIZES = (1, 2, 4, 8, 16)
SCHEMES = ("none", "adjacent", "per layer", "across layers")


@dataclass(frozen=True)
class Table:
    """One table, its CSV file and, if somebody draws it, its plot.

    Attributes:
        name: of its files.
        title, note: what it shows.
        rows: dicts with equal keys.
    """

    name: str
    title: str
    note: str
    rows: list[dict] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """All profiles of a run at one retention."""

    retention: float
    alpha: float
    heads: tuple[Head, ...]
    rule: WindowRule
    profiles: tuple[Samples, ...]

    def budgets(self, alpha: float | None = None) -> Budgets:
        """The plan's budgets, or those with another alpha."""
        alpha = self.alpha if alpha is None else alpha
        return average([x.budgets(self.retention, alpha) for x in self.profiles])


def heat_table(cases: Sequence[Case]) -> Table:
    table = Table(
        "budgets",
        "Budgets of every head",
        "asked: as in the plan. held: scaled by one factor, capped at 1, to the asked retention; "
        "serving does the same and rounds to pages. spread: standard deviation over the samples.",
    )
    for case in cases:
        found = case.budgets()
        scaled = held(found.budgets, case.retention)
        for (layer, head), asked, mine, spread in zip(
            case.heads, found.budgets, scaled, found.spread, strict=True
        ):
            table.rows.append(
                {
                    **{"retention": case.retention, "layer": layer, "head": head},
                    **{"asked": asked, "held": mine, "spread": spread},
                }
            )
    return table


def regularity_table(cases: Sequence[Case]) -> Table:
    table = Table(
        "regularity",
        "Rank stability: does every sample order the heads alike?",
        "Spearman correlation of one window's shares with the mean of all other windows.",
    )
    for case in cases:
        for profile in case.profiles:
            shares = profile.shares(case.retention)
            rest = (shares.sum(axis=0) - shares) / max(1, len(shares) - 1)
            for i, (mine, others) in enumerate(zip(shares, rest, strict=True)):
                table.rows.append(
                    {
                        **{"retention": case.retention, "profile": profile.profile, "sample": i},
                        **{"kind": str(profile.kinds[i]), "spearman": spearman(mine, others)},
                    }
                )
    return table


def clipping_table(cases: Sequence[Case]) -> Table:
    table = Table(
        "clipping",
        "Share of demand clipped",
        "What windows ask for above the budgets that the other windows give (leaving one out), as a "
        "share of all they ask for. rescaled: budgets scaled to the retention, as they are served.",
    )
    for case in cases:
        for profile in case.profiles:
            shares = profile.shares(case.retention)
            for alpha in ALPHAS if profile.profile != ERROR else (0.0,):
                rows = []
                for i in range(len(shares)):
                    others = np.arange(len(shares)) != i
                    mine = profile.budgets(case.retention, alpha, others).budgets
                    rows.append(
                        (
                            clipped(shares[i], mine),
                            clipped(shares[i], held(mine, case.retention)),
                            mine.mean(),
                        )
                    )
                asked, rescaled, mean = np.mean(rows, axis=0)
                table.rows.append(
                    {
                        **{"retention": case.retention, "profile": profile.profile},
                        **{"alpha": alpha, "mean_budget": mean},
                        **{"clipped": asked, "clipped_rescaled": rescaled, "samples": len(rows)},
                    }
                )
    return table


def memory_table(cases: Sequence[Case], per_group: int, page: int) -> Table:
    table = Table(
        "memory",
        "Memory before and after rescaling",
        f"Share of a sealed window's bytes. served: in pages of {page} tokens, groups of {per_group} "
        "heads across layers, padding counted.",
    )
    for case in cases:
        for alpha in ALPHAS:
            budgets = case.budgets(alpha).budgets
            groups = group_heads(case.heads, budgets, per_group, "global")
            at = dict(zip(case.heads, budgets, strict=True))
            tops = [max(at[head] for head in group) for group in groups]
            count = len(case.heads)
            kept = kept_counts(tops, case.rule, case.retention, count, per_group)
            asked = np.ceil(np.array(tops) * case.rule.window / page) * page
            whole = count * case.rule.window
            table.rows.append(
                {
                    **{"retention": case.retention, "alpha": alpha},
                    "asked": float(budgets.mean()),
                    "asked_in_pages": float(asked.sum() * per_group / whole),
                    "served": float(kept.sum() * per_group / whole),
                }
            )
    return table


def grouping_table(cases: Sequence[Case]) -> Table:
    table = Table(
        "grouping",
        "Pages reclaimed by grouping",
        "Share of a sealed window's bytes that is free again when every group keeps what its largest "
        "head keeps of the rescaled budgets. none: one table for all heads, as in a stock cache.",
    )
    for case in cases:
        scaled = held(case.budgets().budgets, case.retention)
        for scheme in SCHEMES:
            for size in GROUP_SIZES:
                table.rows.append(
                    {
                        **{"retention": case.retention, "scheme": scheme, "group_heads": size},
                        "reclaimed": reclaimed(case.heads, scaled, case.rule, scheme, size),
                    }
                )
    return table


def reclaimed(
    heads: Sequence[Head], budgets: np.ndarray, rule: WindowRule, scheme: str, size: int
) -> float:
    """Share of a window's bytes that a way of grouping frees; padding columns are not free."""
    if scheme == "none":
        groups, size = [tuple(heads)], len(heads)
    elif scheme == "adjacent":
        groups = [tuple(heads[i : i + size]) for i in range(0, len(heads), size)]
    else:
        scope = "layer" if scheme == "per layer" else "global"
        # a layer that has fewer heads is one group
        size = min(size, len(heads) // (len({x for x, _ in heads}) if scope == "layer" else 1))
        groups = group_heads(heads, budgets, size, scope)
    at = dict(zip(heads, budgets, strict=True))
    pages = [np.ceil(max(at[h] for h in g) * rule.window / rule.page - 1e-9) for g in groups]
    return 1 - float(np.maximum(pages, 1).sum()) * size * rule.page / (rule.window * len(heads))


def clipped(shares: np.ndarray, budgets: np.ndarray) -> float:
    """Share of the demand above the budgets."""
    return float(np.maximum(shares - budgets, 0).sum() / shares.sum())


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation; ties get their mean rank, and where nothing varies it is 0."""
    x, y = (_ranks(np.asarray(z)) for z in (a, b))
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / norm if norm else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + last - 1) / 2)[group]
