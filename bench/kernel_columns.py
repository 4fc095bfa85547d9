"""Columns of every `bench/results/kernels-*.csv`."""

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
