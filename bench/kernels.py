"""Times of the Triton kernels on one GPU against their floors and FlashInfer.

    python -m bench.kernels [--only decode|prefill] [--cases 8x32K ...] [--no-flashinfer] [--out FOLDER]

prints the table and writes `kernels-decode.csv` and `kernels-prefill.csv`. What is timed and how:
`kernels_decode.py`, `kernels_prefill.py`.
"""

import argparse
from pathlib import Path

import torch

from bench import kernels_decode, kernels_prefill
from bench.kernel_table import COLUMNS, KernelTable
from bench.record import RESULTS
from bench.scenes import copy_bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cases = {**kernels_decode.DECODE, **kernels_decode.SHARED}
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases))
    parser.add_argument("--no-flashinfer", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not options.no_flashinfer:
        from bench.flashinfer_build import build_all

        build_all()
    print(" ".join(f"{name:>12}" for name in COLUMNS[:10]))
    if options.only != "prefill":
        decode = KernelTable(options.out / "kernels-decode.csv")
        bandwidth = copy_bandwidth()
        print(f"copy bandwidth {bandwidth / 1e9:.3f} TB/s; times in ms per layer")
        for name in options.cases:
            if name in kernels_decode.SHARED:
                kernels_decode.shared_case(name, decode, bandwidth)
            else:
                kernels_decode.decode_case(name, decode, bandwidth, not options.no_flashinfer)
            torch.cuda.empty_cache()
    if options.only != "decode":
        table = KernelTable(options.out / "kernels-prefill.csv")
        kernels_prefill.run(table, not options.no_flashinfer)
    if options.only != "prefill" and not options.no_flashinfer:
        for name in [x for x in options.cases if x in kernels_decode.DECODE]:
            kernels_decode.ragged_case(name, decode)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
