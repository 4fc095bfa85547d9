"""The quality table: means over texts with their spread, and ratios to uniform budgets, with a plot.

python -m bench.quality_table FOLDER    # of the rows in FOLDER/texts.csv, without measuring
"""

import argparse
import csv
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.record import machine, say

FULL = "full"
# what ways to compress differ in beside scorer, budgets and retention
SHARED = ("window", "recent", "scope", "alpha", "grouping", "group_heads")
SETTING = "W{window} R{recent} {scope} a{alpha} {grouping}:{group_heads}"
# half the width of a 95 % interval in standard errors, by degrees of freedom (Student)
T95 = (0, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
# KL below this is rounding; it would decide a geometric mean
LEAST_KL = 1e-7


def read(path: Path, model: str | None = None) -> list[dict]:
    """Rows of a ``texts.csv``, of one model or of all."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if model in (None, row["model"])]
    for row in rows:
        row["retention"] = float(row["retention"])
    return rows


def summarise(rows: Sequence[Mapping]) -> list[dict]:
    """One row for each way to compress and each of turn 1 and later turns.

    KL is the geometric mean over documents of each one's mean, ``kl_factor`` the factor of one
    standard deviation. The ratio to uniform budgets, which know neither scope nor alpha and hardly
    groups, is paired by document.
    """
    by = defaultdict(lambda: defaultdict(list))
    for row in rows:
        turn = "turn 1" if int(row["turn"]) == 1 else "later"
        shared = () if row["scorer"] == FULL else tuple(row.get(x, "") for x in SHARED)
        way = (float(row["retention"]), row["scorer"], row["budgets"], turn, *shared)
        by[way][row["task"], row["tokens_sha256"]].append(row)
    order = {name: i for i, name in enumerate((FULL, "uniform"))}
    ways = sorted(by, key=lambda x: (-x[0], x[1], x[4:], order.get(x[2], 9), x[2], x[3] == "later"))
    uniform = {(x[0], x[1], *x[3:6]): by[x] for x in ways if x[2] == "uniform"}
    return [_summary(way, by[way], uniform.get((way[0], way[1], *way[3:6]), {})) for way in ways]


def _summary(way: tuple, texts: Mapping, uniform_texts: Mapping) -> dict:
    rho, scorer, budgets, turn, *shared = way
    kl = _means(texts, "kl", "kl")
    uniform = _means(uniform_texts, "kl", "kl")
    logs = np.array([math.log(max(x, LEAST_KL)) for x in kl.values()])
    found = {
        **{"retention": rho, "scorer": scorer, "budgets": budgets, "turn": turn},
        **dict(zip(SHARED, shared or [""] * len(SHARED), strict=True)),
        **{"texts": len(kl), "held": "", "kl": "", "kl_factor": "", "top1": "", "top1_spread": ""},
        **{"ratio": "", "ratio_low": "", "ratio_high": "", "better": ""},
        **{"facts": 0, "right": "", "right_error": ""},
    }
    everything = [row for rows in texts.values() for row in rows]
    found["held"] = float(everything[0]["held"])
    if len(kl) and scorer != FULL:
        top1 = list(_means(texts, "kl", "top1").values())
        found |= {"kl": math.exp(logs.mean()), "top1": float(np.mean(top1))}
        if len(kl) > 1:
            found |= {"kl_factor": math.exp(logs.std(ddof=1)), "top1_spread": np.std(top1, ddof=1)}
    if budgets != "uniform" and scorer != FULL:
        found |= _ratio(kl, uniform)
    facts = [int(row["right"]) for row in everything if row["task"] == "facts"]
    if facts:
        share = float(np.mean(facts))
        error = math.sqrt(share * (1 - share) / len(facts))
        found |= {"facts": len(facts), "right": share, "right_error": error}
    return found


def _means(texts: Mapping, task: str, name: str) -> dict:
    return {
        key: float(np.mean([float(row[name]) for row in rows]))
        for key, rows in texts.items()
        if key[0] == task
    }


def _ratio(kl: Mapping, uniform: Mapping) -> dict:
    """Geometric mean of the paired ratios and its 95 % interval."""
    logs = np.array(
        [
            math.log(max(kl[x], LEAST_KL)) - math.log(max(uniform[x], LEAST_KL))
            for x in kl
            if x in uniform
        ]
    )
    if not len(logs):
        return {}
    found = {"ratio": math.exp(logs.mean()), "better": f"{int((logs < 0).sum())}/{len(logs)}"}
    if len(logs) > 1:
        half = T95[min(len(logs) - 1, len(T95) - 1)] * logs.std(ddof=1) / math.sqrt(len(logs))
        found |= {
            "ratio_low": math.exp(logs.mean() - half),
            "ratio_high": math.exp(logs.mean() + half),
        }
    return found


def table(summary: Sequence[Mapping]) -> str:
    """The summary as text."""
    lines = [
        f"{'rho':>4} {'scorer':25}{'budgets':36}{'setting':31}{'turn':8}{'n':>3}{'KL':>9}{'x/÷':>6}{'top-1':>8}"
        f"{'to uniform':>21}{'better':>8}{'facts':>7}{'right':>13}"
    ]
    for x in summary:
        ratio = ""
        if x["ratio"] != "":
            ratio = f"{x['ratio']:.2f}"
            if x["ratio_low"] != "":
                ratio += f" [{x['ratio_low']:.2f}, {x['ratio_high']:.2f}]"
        right = f"{x['right']:.2f} ± {x['right_error']:.2f}" if x["right"] != "" else ""
        setting = "" if x["scorer"] == FULL else SETTING.format(**x)
        lines.append(
            f"{x['retention']:4g} {x['scorer']:25}{x['budgets']:36}{setting:31}{x['turn']:8}{x['texts']:3}"
            f"{_cell(x['kl'], 4):>9}{_cell(x['kl_factor'], 1):>6}{_cell(x['top1'], 3):>8}"
            f"{ratio:>21}{x['better']:>8}{x['facts']:7}{right:>13}"
        )
    return "\n".join(lines)


def write_summary(summary: Sequence[Mapping], path: Path, record: Mapping[str, str]) -> None:
    """The summary as CSV, with what it depends on in every row."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*summary[0], *record])
        writer.writeheader()
        for row in summary:
            cells = {k: f"{x:.5f}" if isinstance(x, float) else x for k, x in row.items()}
            writer.writerow({**cells, **record})


def draw(summary: Sequence[Mapping], path: Path) -> None:
    """KL of every way to compress, a panel for each retention and turn; nothing without matplotlib.

    Where settings differ, those that most ways have.
    """
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed; pip install 'tangram-sglang[report]'")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [x for x in summary if x["kl"] != "" and "@" not in x["budgets"]]
    if not shown:
        return
    (usual, _), *_ = Counter(tuple(x[y] for y in SHARED) for x in shown).most_common()
    shown = [x for x in shown if tuple(x[y] for y in SHARED) == usual]
    retentions, budgets = (
        list(dict.fromkeys(x[y] for x in shown)) for y in ("retention", "budgets")
    )
    colours = {name: f"C{i}" for i, name in enumerate(budgets)}
    figure, axes = pyplot.subplots(
        len(retentions), 2, figsize=(13, 3.2 * len(retentions)), squeeze=False, sharey="row"
    )
    for line, rho in zip(axes, retentions, strict=True):
        for axis, turn in zip(line, ("turn 1", "later"), strict=True):
            mine = [x for x in shown if (x["retention"], x["turn"]) == (rho, turn)]
            # bars of a scorer stand side by side, scorers apart
            at, ticks, place = [], {}, 0.0
            for before, x in zip([None, *mine], mine, strict=False):
                place += 1 if before is None or before["scorer"] == x["scorer"] else 2
                at.append(place)
                ticks.setdefault(x["scorer"], []).append(place)
            axis.bar(at, [x["kl"] for x in mine], color=[colours[x["budgets"]] for x in mine])
            axis.set_yscale("log")
            middles = [float(np.mean(x)) for x in ticks.values()]
            axis.set_xticks(middles, ticks, rotation=25, ha="right", fontsize=8)
            axis.set_title(f"retention {rho:g}, {turn}", fontsize=10)
        line[0].set_ylabel("KL to full KV")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=x) for x in colours.values()]
    figure.legend(handles, colours, title="budgets", fontsize=8, loc="lower center", ncols=4)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _cell(value, digits: int) -> str:
    return "" if value == "" else f"{value:.{digits}f}"


def publish(rows: Sequence[Mapping], folder: Path, module: str) -> None:
    """Print the table of ``rows`` and write it and its plot into ``folder``."""
    summary = summarise(rows)
    print(table(summary))
    write_summary(summary, folder / "quality.csv", machine(module))
    draw(summary, folder / "quality.png")
    say(f"written to {folder}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    rows = read(folder / "texts.csv")
    if not rows:
        say(f"error: {folder / 'texts.csv'} holds no rows; python -m bench.quality measures some")
        return 2
    publish(rows, folder, "bench.quality_table")
    return 0


if __name__ == "__main__":
    sys.exit(main())
