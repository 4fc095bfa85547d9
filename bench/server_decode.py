"""Decode steps of whole servers: ours at several retentions against SGLang's own backends.

    python -m bench.server_decode [--model llama-3.1-8b] [--retentions 1.0 0.25] [--batch-sizes 1 8 32]

Servers differ in the backend's flags only; all of a group are started together, then measured in turn by
SGLang's client ``benchmark.one_batch_server`` while the others are idle. A step's time is what that
client reports: the wall time from the last request's first token to the end, over a request's tokens.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from bench.gpu_machine import gpu_machine
from bench.record import RESULTS, append_csv, say
from bench.shapes import NAMES, profile_plan, shape_folder
from tangram_sglang.cli.server import LOOPBACK, Server

TOKENS_OVER = 1.06  # room for answers and whole pages


@dataclass(frozen=True)
class Entry:
    """One server: its name in the table, the flags and variables that make it different."""

    name: str
    flags: tuple[str, ...]
    settings: dict[str, str]


def entries(options, tokens: int) -> list[Entry]:
    """SGLang's own with room for ``tokens``, and ours at every retention in as many bytes or fewer."""
    limit, stock_bytes = ("--max-total-tokens", str(tokens)), tokens * kv_bytes(options.model)
    stock = [Entry(x, ("--attention-backend", x, *limit), {}) for x in options.baselines]
    plan = str(profile_plan(options.model, options.profile))
    ours = [
        Entry(
            f"tangram {retention:g}",
            ("--attention-backend", "tangram"),
            {
                "TANGRAM_PLAN": plan,
                "TANGRAM_RETENTION": f"{retention:g}",
                # short requests hold a raw tail beside what they keep
                "TANGRAM_POOL_BYTES": str(int(stock_bytes * min(1.0, retention + 0.4))),
            },
        )
        for retention in options.retentions
    ]
    return stock + ours


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
    with contextlib.ExitStack() as stack:
        servers = []
        for entry in group:
            environment = {**os.environ, **LOOPBACK, **entry.settings}
            log = options.logs / f"server-{options.model}-{entry.name.replace(' ', '-')}.log"
            server = Server([*common, *entry.flags], environment, log)
            shown = " ".join(f"{name}={value}" for name, value in entry.settings.items())
            say(f"{entry.name}: {shown} {server.command_line}")
            servers.append(stack.enter_context(server))
        # takes 10 s, as do the servers
        from sglang.benchmark.one_batch_server import run_one_case

        tokenizer = AutoTokenizer.from_pretrained(shape_folder(options.model))
        for entry, server in zip(group, servers, strict=True):
            say(f"{entry.name}: ready after {server.wait_until_ready():.0f} s more")
        for entry, server in zip(group, servers, strict=True):
            with contextlib.redirect_stdout(sys.stderr):
                times = step_ms(client_rows(run_one_case, server.url, options, tokenizer))
            yield entry, times
        for server in servers:
            server.ask_to_stop()


def kv_bytes(name: str) -> int:
    """Bytes of one token's K and V in bf16."""
    config = json.loads((shape_folder(name) / "config.json").read_text())
    heads = config["num_key_value_heads"] * config["head_dim"]
    return config["num_hidden_layers"] * 2 * heads * 2


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
        options.logs.mkdir(parents=True, exist_ok=True)
        for at in range(0, len(listed), options.at_once):
            group = listed[at : at + options.at_once]
            for entry, times in measure(group, common_flags(options), options):
                rows = []
                for size, (median, least) in times.items():
                    if not entry.settings:
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
