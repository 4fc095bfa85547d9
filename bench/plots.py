"""Draws the curves of the experiments from their CSV files, on any machine.

    python -m bench.plots [bench/results/arrival.csv ...]

Writes a PNG beside each file. Needs matplotlib (``pip install 'tangram-sglang[report]'``).
"""

import argparse
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.record import RESULTS


@dataclass(frozen=True)
class Curve:
    """Which columns of a file are drawn against each other, a line for each server."""

    x: str
    y: str
    x_label: str
    y_label: str
    cases: tuple[str, ...] = ()  # of which rows; none: of all


CURVES = {
    "arrival": Curve(
        "rate", "mean_ttft_s", "requests a second", "mean time to first token, seconds"
    ),
    "offline": Curve(
        "input_len", "tokens_per_s", "prompt tokens", "tokens/s", ("short", "mid", "long")
    ),
}
Row = Mapping[str, str]


def lines(rows: Sequence[Row], curve: Curve) -> dict[str, list[tuple[float, float]]]:
    """Points of each server from left to right; of equal ones the last measured counts."""
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        if curve.cases and row["case"] not in curve.cases:
            continue
        line = found.setdefault(f"{row['model']} {row['server']}", {})
        line[float(row[curve.x])] = float(row[curve.y])
    return {name: sorted(points.items()) for name, points in found.items()}


def draw(path: Path) -> Path:
    """Draw what is known of a CSV file by its name; returns the PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curve = CURVES[path.stem]
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, points in lines(rows, curve).items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xlabel=curve.x_label, ylabel=curve.y_label, ylim=(0, None))
    axes.set_title(f"{rows[-1]['gpu']}, commit {rows[-1]['git']}", fontsize=9)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    out = path.with_suffix(".png")
    figure.savefig(out, dpi=150)
    pyplot.close(figure)
    return out


def main() -> None:
    known = [RESULTS / f"{name}.csv" for name in CURVES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path, nargs="*", help="(those of bench/results that are there)")
    for path in parser.parse_args().csv or [x for x in known if x.exists()]:
        if path.stem not in CURVES:
            raise SystemExit(f"error: {path}: expected one of {', '.join(CURVES)}")
        if not path.exists():
            raise SystemExit(f"error: {path}: no such file")
        print(draw(path))


if __name__ == "__main__":
    main()
