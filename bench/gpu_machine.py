"""What a figure from a GPU depends on beside the code."""

import os
import subprocess

import torch
import triton

from bench.smollm2 import ROOT


def commit() -> str:
    """The commit measured; BENCH_COMMIT says it where there is no repository."""
    if named := os.environ.get("BENCH_COMMIT"):
        return named
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def gpu_machine() -> dict[str, str]:
    """GPU, versions and commit, as the last columns of a CSV file."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sha": commit(),
    }
