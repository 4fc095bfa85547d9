"""The table of kernel times: `bench/results/kernels-*.csv`."""

import csv
import time
from pathlib import Path

from bench.gpu_machine import gpu_machine

COLUMNS = [
    "case",
    "batch",
    "seq_len",
    "retention",
    "ms",
    "floor_ms",
    "over_floor",
    "baseline",
    "baseline_ms",
    "speedup",
    "gpu",
    "torch",
    "triton",
    "sha",
]


class KernelTable:
    """Rows on the screen and in a CSV file, which is complete after every row."""

    def __init__(self, path: Path):
        self.path, self.rows = path, []
        self.fixed, self.started = gpu_machine(), time.monotonic()
        print(", ".join(f"{name} {value}" for name, value in self.fixed.items()), flush=True)

    def add(self, case, batch, seq_len, retention, ms, floor_ms, baseline="", baseline_ms=None):
        row = {
            "case": case,
            "batch": batch,
            "seq_len": seq_len,
            "retention": retention,
            "ms": f"{ms:.5f}",
            "floor_ms": f"{floor_ms:.5f}",
            "over_floor": f"{ms / floor_ms:.3f}" if floor_ms else "",
            "baseline": baseline,
            "baseline_ms": "" if baseline_ms is None else f"{baseline_ms:.5f}",
            "speedup": "" if baseline_ms is None else f"{baseline_ms / ms:.3f}",
            **self.fixed,
        }
        self.rows.append(row)
        shown = [str(row[name]) for name in COLUMNS[:10]]
        after = f"[{time.monotonic() - self.started:4.0f} s]"
        print(after, " ".join(f"{text:>12}" for text in shown), flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
