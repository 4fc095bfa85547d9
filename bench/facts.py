"""Last columns of the experiments' CSV files: command, versions, GPU and commit."""

from importlib import metadata

import torch

from bench.gpu_machine import commit
from bench.record import machine


def facts(module: str) -> dict[str, str]:
    found = machine(module)
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    # BENCH_COMMIT says it where there is no repository
    return {**found, "git": commit(), "triton": triton, "gpu": gpu}
