"""Draws curves of the experiments and what all are over stock, from their CSV files, on any machine.

    python -m bench.plots [bench/results/arrival.csv ...]

Writes a PNG beside each file and, where none is named, `times-stock.png`: how many times as good as the
best stock backend of the same run, as the files say. Of what was measured twice the later row counts.
Needs matplotlib (``pip install 'tangram-sglang[report]'``).
"""

import argparse
import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.record import RESULTS

Row = Mapping[str, str]


@dataclass(frozen=True)
class Curve:
    """Which columns of a file are drawn against each other, a line for each server."""

    x: str
    y: str
    x_label: str
    y_label: str
    cases: tuple[str, ...] = ()  # of which rows; none: of all

    def of(self, rows: Iterable[Row]) -> list[Row]:
        return [row for row in rows if not self.cases or row["case"] in self.cases]


CURVES = {
    "arrival": Curve(
        "rate", "mean_ttft_s", "requests a second", "mean time to first token, seconds"
    ),
    "offline": Curve(
        "input_len", "tokens_per_s", "prompt tokens", "tokens/s", ("short", "mid", "long")
    ),
}
# file and case (none: every one of its cases), from top to bottom
BARS = {
    ("offline", "short"): "tokens/s, prompts of 16K",
    ("offline", "mid"): "tokens/s, prompts of 48K",
    ("offline", "long"): "tokens/s, prompts of 120K",
    ("offline", "concurrency"): "requests of 32K at once",
    ("multi_turn", ""): "tokens/s, conversations of 32K",
    ("shared_document", ""): "answers/s, a shared document of 64K",
    ("arrival", ""): "mean time to first token, {case}",
    ("server_decode", ""): "decode steps, {case}",
}
COLOURS = {
    **{"tangram 1": "tab:orange", "tangram 0.25": "tab:green"},
    **{"flashinfer": "tab:blue", "triton": "tab:gray"},
}


def lines(rows: Sequence[Row], curve: Curve) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """By model and server: points from left to right."""
    found: dict[str, dict[str, dict[float, float]]] = {}
    for row in curve.of(rows):
        line = found.setdefault(row["model"], {}).setdefault(row["server"], {})
        line[float(row[curve.x])] = float(row[curve.y])
    return {
        model: {server: sorted(points.items()) for server, points in servers.items()}
        for model, servers in sorted(found.items())
    }


def compared(tables: Mapping[str, Sequence[Row]]) -> list[tuple[str, Row]]:
    """Rows of ours that have a ratio to stock, with what they are of, in the order of ``BARS``."""
    return [
        (label.format(case=row["case"]), row)
        for (name, case), label in BARS.items()
        for row in tables.get(name, ())
        if case in ("", row["case"]) and row["server"].startswith("tangram")
        if row["times_stock"]  # empty where no gate was passed
    ]


def bars(rows: Iterable[tuple[str, Row]]) -> dict[str, dict[str, dict[str, float]]]:
    """By model, by what is compared, by server: times stock."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for label, row in rows:
        of_model = found.setdefault(row["model"], {})
        of_model.setdefault(label, {})[row["server"]] = float(row["times_stock"])
    return dict(sorted(found.items()))


def title(rows: Iterable[Row]) -> str:
    """Where and of which commits they are."""
    rows = list(rows)
    gpus, commits = (sorted({row[name] for row in rows}) for name in ("gpu", "git"))
    return f"{', '.join(gpus)}, commit {', '.join(commits)}"


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def draw(path: Path) -> Path:
    """Draw what is known of a CSV file by its name; returns the PNG."""
    from matplotlib.figure import Figure

    curve, rows = CURVES[path.stem], read(path)
    models = lines(rows, curve)
    figure = Figure(figsize=(4.6 * len(models), 4.2), layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, (model, servers) in zip(panels, models.items(), strict=True):
        for server, points in servers.items():
            colour = COLOURS.get(server)
            axes.plot(*zip(*points, strict=True), marker="o", label=server, color=colour)
        axes.set(xlabel=curve.x_label, xlim=(0, None))
        axes.set_title(model, fontsize=9)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    panels[0].set(ylabel=curve.y_label, ylim=(0, None))
    figure.suptitle(title(curve.of(rows)), fontsize=9)
    return save(figure, path.with_suffix(".png"))


def draw_bars(tables: Mapping[str, Sequence[Row]], out: Path) -> Path:
    """Draw all ratios to stock; those below 1 point to the left."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    rows = compared(tables)
    models = bars(rows)
    counts = [len(labels) for labels in models.values()]
    figure = Figure(figsize=(8, 1 + 0.45 * sum(counts)), layout="constrained")
    panels = figure.subplots(len(models), 1, sharex=True, squeeze=False, height_ratios=counts)
    for axes, (model, labels) in zip(panels[:, 0], models.items(), strict=True):
        # the whole cache above the compressed
        servers = sorted({x for found in labels.values() for x in found}, reverse=True)
        thick = 0.8 / len(servers)
        for i, server in enumerate(servers):
            places = [n + thick * i for n, found in enumerate(labels.values()) if server in found]
            ratios = [found[server] for found in labels.values() if server in found]
            drawn = axes.barh(
                places,
                [ratio - 1 for ratio in ratios],
                thick,
                left=1,
                label=server,
                color=COLOURS.get(server),
            )
            for bar, ratio in zip(drawn, ratios, strict=True):
                end = max(1, ratio) * 1.015
                axes.text(end, bar.get_y() + thick / 2, f"{ratio:.2f}", va="center", fontsize=7)
        middle = thick * (len(servers) - 1) / 2
        axes.set_yticks([n + middle for n in range(len(labels))], list(labels), fontsize=8)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([0.5, 1, 1.5, 2, 3, 5, 10, 20]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:g}x")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.margins(x=0.08)
        axes.set_title(model, fontsize=9)
        axes.grid(axis="x", alpha=0.3)
    panels[0, 0].legend(fontsize=8, loc="lower right")
    panels[-1, 0].set_xlabel("times stock SGLang, its better backend", fontsize=8)
    figure.suptitle(title(row for _, row in rows), fontsize=9)
    return save(figure, out)


def save(figure, out: Path) -> Path:
    # without the date and the like, the same rows give the same file
    figure.savefig(out, dpi=150, metadata={"Software": None})
    return out


def main() -> None:
    known = [RESULTS / f"{name}.csv" for name in CURVES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path, nargs="*", help="(those of bench/results that are there)")
    named = parser.parse_args().csv
    for path in named or [x for x in known if x.exists()]:
        if path.stem not in CURVES:
            raise SystemExit(f"error: {path}: expected one of {', '.join(CURVES)}")
        if not path.exists():
            raise SystemExit(f"error: {path}: no such file")
        print(draw(path))
    files = {name: RESULTS / f"{name}.csv" for name, _ in BARS}
    tables = {name: read(path) for name, path in files.items() if path.exists()}
    if not named and compared(tables):
        print(draw_bars(tables, RESULTS / "times-stock.png"))


if __name__ == "__main__":
    main()
