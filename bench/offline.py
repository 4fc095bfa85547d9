"""Offline throughput of whole servers: as many requests as saturate a pool, all there at once.

    python -m bench.offline [--cases short mid long concurrency] [--repeats 3]

`short` has prompts of 16K tokens, `mid` 48K, `long` 120K, and answers of 128. `tokens_per_s` counts
prompts and answers, `peak_running` is the largest value of SGLang's gauge sglang:num_running_reqs,
sampled during the run; `median_itl_ms` is the median time between two tokens of an answer.
`concurrency` asks how many requests of 32K fit and run: there `peak_running` is what is compared with
stock.

Prompts are unrelated; `hit_rate` says that nothing was reused. With prompts this long and answers this
short most of the time is prefill.
"""

import argparse
from dataclasses import dataclass, replace
from functools import partial

from bench import client
from bench.experiment import Bench, Experiment
from bench.fleet import Entry
from bench.gauge import Gauge
from bench.session import main
from tangram_sglang.cli.server import Server

POOL_TOKENS, RUNNING = 152_000, 64  # 20 GB of Llama-3.1-8B


@dataclass(frozen=True)
class Case:
    """Unrelated requests of one length, in tokens."""

    requests: int
    input_len: int
    output_len: int


CASES = {
    "short": Case(24, 16_384, 128),
    "mid": Case(9, 49_152, 128),
    "long": Case(4, 122_880, 128),
    "concurrency": Case(20, 32_768, 256),
}


def figures(result: dict, peak: float) -> dict[str, float]:
    """Of one run."""
    tokens, cached = sum(result["input_lens"]), sum(result["cached_tokens"])
    return {
        "tokens_per_s": (tokens + sum(result["output_lens"])) / result["duration"],
        "peak_running": peak,
        "requests_per_s": result["completed"] / result["duration"],
        "duration_s": result["duration"],
        "mean_ttft_s": result["mean_ttft_ms"] / 1e3,
        "median_itl_ms": result["median_itl_ms"],
        "hit_rate": cached / tokens,
    }


def measure(now: Bench, server: Server, case: Case, seed: int) -> dict[str, float]:
    flags = client.random_load(
        case.requests, now.length(case.input_len), now.length(case.output_len)
    )
    with Gauge(server.url, "sglang:num_running_reqs") as running:
        result = now.load(server, flags, seed)
    return figures(result, running.peak)


def sizes(now: Bench, case: Case) -> dict[str, int]:
    """Of a case, for its row."""
    return {
        "requests": case.requests,
        "input_len": now.length(case.input_len),
        "output_len": now.length(case.output_len),
    }


def on_server(now: Bench, entry: Entry, server: Server) -> None:
    for name in now.options.cases:
        case = CASES[name]
        case = replace(case, requests=now.options.requests or case.requests)
        runs = now.runs(partial(measure, now, server, case))
        figure = "peak_running" if name == "concurrency" else "tokens_per_s"
        now.report.add(entry, name, sizes(now, case), runs, main=figure)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--requests", type=int, help="of every case, instead of its own number")


EXPERIMENT = Experiment("bench.offline", __doc__, POOL_TOKENS, RUNNING, on_server, add_options)

if __name__ == "__main__":
    main(EXPERIMENT)
