"""Times of the Triton kernels on one GPU against the fewest bytes they must read and FlashInfer.

    python -m bench.kernels [--cases 8x32K ...] [--no-flashinfer] [--csv bench/results/kernels-decode.csv]

Decode: one layer of a Llama-3.1-8B shape, its KV as the server lays it out. All 32 layers run one
after the other in a CUDA graph over a pool far larger than the L2 cache; a layer's time is a
32nd of the median replay, the dispatch of the step, the KV write and the merge included. The floor
is the bytes that must be read over the copy bandwidth measured in the same run.
"""

import argparse
import csv
import os
import subprocess
from pathlib import Path

import torch
import triton

from bench.kernel_columns import COLUMNS
from bench.scenes import HEADS, LAYERS, Scene, copy_bandwidth, graph_ms, programs_for
from tangram_sglang.plan.split_map import equal_splits, plan_splits

K = 1024
# 1K to 128K, each request 1.37 times as long as the one before
UNEQUAL = [int(K * 2 ** (7 * i / 15)) for i in range(16)]
DECODE = {
    "8x128K": ([128 * K] * 8, 0.25, 512),
    "32x32K": ([32 * K] * 32, 0.25, 512),
    "8x32K": ([32 * K] * 8, 0.25, 512),
    "unequal16": (UNEQUAL, 0.25, 512),
    "8x128K-W1024": ([128 * K] * 8, 0.25, 1024),
    "8x32K-W1024": ([32 * K] * 8, 0.25, 1024),
    "1x128K": ([128 * K], 0.25, 512),
    "64x4K": ([4 * K] * 64, 0.25, 512),
    "8x32K-rho1": ([32 * K] * 8, 1.0, 512),
}


def commit() -> str:
    """The commit measured; TANGRAM_SHA says it where there is no repository."""
    if named := os.environ.get("TANGRAM_SHA"):
        return named
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Table:
    """Rows on the screen and in a CSV file."""

    def __init__(self, path: Path):
        self.path, self.rows = path, []
        self.fixed = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "sha": commit(),
        }
        print(", ".join(f"{name} {value}" for name, value in self.fixed.items()), flush=True)

    def add(self, case, batch, seq_len, retention, ms, floor_ms, baseline="", baseline_ms=None):
        row = {
            "case": case,
            "batch": batch,
            "seq_len": seq_len,
            "retention": retention,
            "ms": f"{ms:.5f}",
            "floor_ms": f"{floor_ms:.5f}",
            "over_floor": f"{ms / floor_ms:.3f}",
            "baseline": baseline,
            "baseline_ms": "" if baseline_ms is None else f"{baseline_ms:.5f}",
            "speedup": "" if baseline_ms is None else f"{baseline_ms / ms:.3f}",
            **self.fixed,
        }
        self.rows.append(row)
        shown = [str(row[name]) for name in COLUMNS[:10]]
        print(" ".join(f"{text:>12}" for text in shown), flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)


def decode_case(name: str, table: Table, bandwidth: float, with_flashinfer: bool) -> None:
    lengths, retention, window = DECODE[name]
    scene = Scene(lengths, retention, window)
    floor = scene.bytes_read() / bandwidth / LAYERS
    programs = programs_for(scene)
    batch, longest = len(lengths), max(lengths)
    split_map = plan_splits(scene.shares, programs, batch)
    run = scene.step(split_map)
    error = scene.check(run)
    if not error < 1e-2:
        raise RuntimeError(f"{name}: decode is off by {error:.2e}; nothing to time")
    ms = graph_ms(run) / LAYERS

    def add(baseline="", baseline_ms=None):
        table.add(f"decode {name}", batch, longest, retention, ms, floor, baseline, baseline_ms)

    add()
    add("rigid split map", graph_ms(scene.step(split_map, stretched=False)) / LAYERS)
    equal = equal_splits((LAYERS, HEADS), programs, batch)
    add("equal splits", graph_ms(scene.step(equal, stretched=False)) / LAYERS)
    if with_flashinfer:
        from bench.flashinfer_decode import Ragged, full_ms

        run()
        total, alone, difference = Ragged(scene).ms()
        if not difference < 2e-2:
            raise RuntimeError(f"{name}: FlashInfer's result differs by {difference:.2e}")
        add("flashinfer, same ragged KV, with its plan", total)
        add("flashinfer, same ragged KV, without its plan", alone)
        del scene, run
        add("flashinfer, full KV", full_ms(lengths))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=DECODE, default=list(DECODE))
    parser.add_argument("--no-flashinfer", action="store_true")
    parser.add_argument("--csv", type=Path, default=Path("bench/results/kernels-decode.csv"))
    options = parser.parse_args()
    table = Table(options.csv)
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e9:.3f} TB/s; times in ms per layer")
    print(" ".join(f"{name:>12}" for name in COLUMNS[:10]))
    for name in options.cases:
        decode_case(name, table, bandwidth, not options.no_flashinfer)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
