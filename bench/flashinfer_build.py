"""Compiles the FlashInfer kernels that are compared with, side by side: one by one they take minutes.

python -m bench.flashinfer_build [decode|tensor-decode|fa2|fa3]
"""

import subprocess
import sys

import torch

from bench.llama import DIM, DTYPE, HEADS, RATIO

KERNELS = ("decode", "tensor-decode", "fa2", "fa3")


def build_all() -> None:
    """Compile every kernel in a process of its own; what is there already takes seconds."""
    command = [sys.executable, "-m", "bench.flashinfer_build"]
    started = [subprocess.Popen([*command, name]) for name in KERNELS]
    failed = [name for name, p in zip(KERNELS, started, strict=True) if p.wait()]
    if failed:
        raise RuntimeError(f"FlashInfer did not compile {', '.join(failed)}: see above")


def build(name: str) -> None:
    """Compile one kernel, by running it once."""
    if name.endswith("decode"):
        from bench.flashinfer_decode import full_ms

        full_ms([64], layers=1, kinds=(name != "decode",))
        return
    import flashinfer

    q, k, v = (
        torch.zeros(64, heads * HEADS, DIM, device="cuda", dtype=DTYPE) for heads in (RATIO, 1, 1)
    )
    flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, backend=name)
    torch.cuda.synchronize()


if __name__ == "__main__":
    build(sys.argv[1]) if len(sys.argv) > 1 else build_all()
