"""Decode steps of whole servers: ours at several retentions against SGLang's own backends.

    python -m bench.server_decode [--model llama-3.1-8b] [--retentions 1.0 0.25] [--batch-sizes 1 8 32]

Servers differ in the backend's flags only; all of a group are started together, then measured in turn by
SGLang's client ``benchmark.one_batch_server`` while the others are idle. A step's time is what that
client reports: the wall time from the last request's first token to the end, over a request's tokens.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from transformers import AutoTokenizer

from bench.fleet import Entry, Fleet, Pool, groups, ours, stock
from bench.gpu_machine import gpu_machine
from bench.record import RESULTS, append_csv
from bench.shapes import NAMES, profile_plan, shape_folder, token_bytes
from tangram_sglang.cli.server import LOOPBACK

TOKENS_OVER = 1.06  # room for answers and whole pages


def entries(options, tokens: int) -> list[Entry]:
    """SGLang's own with room for ``tokens``, and ours at every retention in as many bytes or fewer."""
    pool, plan = (
        Pool(tokens, token_bytes(options.model)),
        profile_plan(options.model, options.profile),
    )
    # short requests hold a raw tail beside what they keep
    smaller = {x: int(pool.tokens * min(1.0, x + 0.4)) for x in options.retentions}
    return [
        *(stock(x, pool) for x in options.baselines),
        *(ours(x, plan, replace(pool, tokens=n)) for x, n in smaller.items()),
    ]


def common_flags(options) -> list[str]:
    """Flags that all servers share."""
    largest = max(options.batch_sizes)
    return [
        *("--model-path", str(shape_folder(options.model)), "--load-format", "dummy"),
        *("--dtype", "bfloat16", "--context-length", str(options.context_length)),
        *("--max-running-requests", str(largest)),
        *("--cuda-graph-max-bs-decode", str(largest), "--chunked-prefill-size", "8192"),
        *("--mem-fraction-static", "0.9", "--random-seed", "0", "--disable-prefill-cuda-graph"),
    ]


def client_rows(run_case, url: str, options, tokenizer) -> list[tuple[int, float]]:
    """(batch, milliseconds of a step) of every case, after one that is not counted."""
    found = []
    for size in options.batch_sizes:
        for i in range(options.repeats + 1):
            result = run_case(
                url,
                batch_size=size,
                input_len=options.input_len,
                output_len=options.output_len,
                temperature=0.0,
                ignore_eos=True,
                return_logprob=False,
                stream_interval=1,
                input_len_step_percentage=0.0,
                run_name="",
                result_filename="",
                tokenizer=tokenizer,
                dataset_name="random-ids",
            )
            if i:
                found.append((size, 1e3 * size / result.output_throughput))
    return found


def step_ms(rows: list[tuple[int, float]]) -> dict[int, tuple[float, float]]:
    """Median and best milliseconds of a decode step, by batch size."""
    times: dict[int, list[float]] = {}
    for size, ms in rows:
        times.setdefault(size, []).append(ms)
    return {size: (statistics.median(found), min(found)) for size, found in times.items()}


def measure(group: list[Entry], common: list[str], options):
    """Start a group together; yields (entry, times) one after the other."""
    with Fleet(group, common, {**os.environ, **LOOPBACK}, options.logs) as fleet:
        # takes 10 s, as do the servers
        from sglang.benchmark.one_batch_server import run_one_case

        tokenizer = AutoTokenizer.from_pretrained(shape_folder(options.model))
        fleet.wait_until_ready()
        for entry, server in fleet:
            with contextlib.redirect_stdout(sys.stderr):
                times = step_ms(client_rows(run_one_case, server.url, options, tokenizer))
            yield entry, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=NAMES, default="llama-3.1-8b")
    parser.add_argument("--profile", choices=("fastkvzip", "keydiff"), default="fastkvzip")
    parser.add_argument("--retentions", type=float, nargs="+", default=[1.0, 0.5, 0.25])
    parser.add_argument("--baselines", nargs="*", default=["triton", "flashinfer"])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-len", type=int, default=2048)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--context-length", type=int, default=131072)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=5, help="servers in memory together")
    parser.add_argument("--csv", type=Path, default=RESULTS / "server-decode.csv")
    parser.add_argument("--logs", type=Path, default=None)
    options = parser.parse_args()
    tokens = int(TOKENS_OVER * max(options.batch_sizes) * (options.input_len + options.output_len))
    listed = entries(options, tokens)
    machine, best = gpu_machine(), {}
    os.environ.update(LOOPBACK)
    with tempfile.TemporaryDirectory() as scratch:
        options.logs = options.logs or Path(scratch)
        for group in groups(listed, options.at_once):
            for entry, times in measure(group, common_flags(options), options):
                rows = []
                for size, (median, least) in times.items():
                    if entry.stock:
                        best[size] = min(best.get(size, median), median)
                    ratio = f"{median / best[size]:.3f}" if size in best else ""
                    rows.append(
                        {
                            "model": options.model,
                            "server": entry.name,
                            "batch": size,
                            "input_len": options.input_len,
                            "output_len": options.output_len,
                            "step_ms": f"{median:.3f}",
                            "best_step_ms": f"{least:.3f}",
                            "over_best_stock": ratio,
                            "repeats": options.repeats,
                            **machine,
                        }
                    )
                    print(*list(rows[-1].values())[:9], flush=True)
                append_csv(options.csv, rows)


if __name__ == "__main__":
    main()
