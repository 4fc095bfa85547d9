"""Figures of an experiment as rows: medians, ratios to stock SGLang, a CSV file."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.fleet import Entry
from bench.gate import Verdict
from bench.record import append_csv

NO_VERDICT = Verdict(False, "none")


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each figure over all runs of a case."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def rounded(value: float) -> float:
    """Five digits that count."""
    return float(f"{value:.5g}")


class Report:
    """Appends a row as soon as a case is measured; a run that is cut off keeps what it has.

    A ratio over stock is of the case's main figure, to the best stock entry measured before it in
    this run: more is better. It is only there when the gate passed.
    """

    def __init__(self, path: Path, common: Mapping[str, Any], facts: Mapping[str, Any]):
        self._path, self._common, self.facts = path, common, facts
        self._stock: dict[str, float] = {}
        self.verdict = NO_VERDICT
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        entry: Entry,
        case: str,
        asked: Mapping[str, Any],
        runs: Sequence[Mapping[str, float]],
        main: str,
        lower_is_better: bool = False,
        over_stock: bool = False,
    ) -> None:
        """``asked``: the case's sizes. ``runs``: figures of each run; without one there is no row.

        ``main`` names the figure that is compared. ``over_stock`` adds it as a multiple of stock's.
        """
        if not runs:
            return
        found = medians(runs)
        value = found[main]
        if entry.stock:
            before = self._stock.get(case, value)
            self._stock[case] = (min if lower_is_better else max)(before, value)
        base, multiple, ratio = self._stock.get(case), "", ""
        if base and value and self.verdict.passed:
            multiple = rounded(value / base)
            ratio = rounded(base / value) if lower_is_better else multiple
        row = {
            **self._common,
            **{"case": case, "server": entry.name, "retention": entry.retention},
            **asked,
            **{name: rounded(value) for name, value in found.items()},
            **({"over_best_stock": multiple} if over_stock else {}),
            **{"times_stock": ratio, "of": main},
            **{"runs": len(runs), "gate": self.verdict.text},
        }
        self.rows.append(row)
        append_csv(self._path, [{**row, **self.facts}])

    def table(self) -> str:
        """The rows without what is the same in all; speed-ups only behind a gate that passed."""
        if not self.rows:
            return "nothing measured"
        varying = [
            x for x in self.rows[0] if len({str(row[x]) for row in self.rows}) > 1 or x == "server"
        ]
        cells = [varying, *([str(row[x]) for x in varying] for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(varying))]
        lines = [
            "  ".join(f"{cell:>{n}}" for cell, n in zip(line, widths, strict=True))
            for line in cells
        ]
        return "\n".join([f"gate: {self.verdict.text}", *lines])
