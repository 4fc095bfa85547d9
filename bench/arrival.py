"""Time to first token against arrival rate: requests of 20K to 40K tokens, 30K in the mean.

    python -m bench.arrival [--rates 0.5 0.7] [--requests 40]

Requests arrive at random intervals, and every server gets the same ones at the same moments. Rates are
in requests a second and go up. A server's higher rates are left out once its mean time to first token
passes `--enough-s`: the queue only grows then, and takes the time of the others.

What is compared with stock, at the same rate, is the mean time to first token. There must be enough
requests for a queue to grow: of n that arrive at a rate r and are served at a lower rate s, the mean one
waits n/2 (1/s - 1/r). A server that needs two seconds for each reaches a mean of 20 s with 20 requests
only if they all come at once; one that needs three would get to 31 s with 40 at 0.7 a second.
"""

import argparse
from functools import partial

from bench import client
from bench.experiment import Bench, Experiment
from bench.fleet import Entry
from bench.record import say
from bench.session import main
from tangram_sglang.cli.server import Server

POOL_TOKENS, RUNNING = 152_000, 64
LONGEST, LEAST = 40_000, 0.5


def figures(result: dict) -> dict[str, float]:
    """Of one run."""
    return {
        "mean_ttft_s": result["mean_ttft_ms"] / 1e3,
        "median_ttft_s": result["median_ttft_ms"] / 1e3,
        "p99_ttft_s": result["p99_ttft_ms"] / 1e3,
        "requests_per_s": result["completed"] / result["duration"],
        "duration_s": result["duration"],
        "hit_rate": sum(result["cached_tokens"]) / sum(result["input_lens"]),
    }


def measure(now: Bench, server: Server, rate: float, seed: int) -> dict[str, float]:
    options = now.options
    flags = client.random_load(
        options.requests, now.length(LONGEST), now.length(options.output_len), LEAST
    )
    return figures(now.load(server, [*flags, "--request-rate", f"{rate:g}"], seed))


def on_server(now: Bench, entry: Entry, server: Server) -> None:
    options = now.options
    for rate in sorted(options.rates):
        runs = now.runs(partial(measure, now, server, rate))
        asked = {
            **{"rate": rate, "requests": options.requests},
            **{"mean_input": now.length(LONGEST * (1 + LEAST) / 2)},
            "longest_output": now.length(options.output_len),
        }
        now.report.add(entry, f"{rate:g}/s", asked, runs, "mean_ttft_s", lower_is_better=True)
        if any(run["mean_ttft_s"] > options.enough_s for run in runs):
            say(f"{entry.name}: higher rates are left out")
            break


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rates", type=float, nargs="+", default=[0.5, 0.7], help="requests/s (%(default)s)")
    add("--requests", type=int, default=40, help="at each rate (%(default)s)")
    add("--output-len", type=int, default=512, help="longest (%(default)s)")
    add("--enough-s", type=float, default=20)


EXPERIMENT = Experiment("bench.arrival", __doc__, POOL_TOKENS, RUNNING, on_server, add_options)

if __name__ == "__main__":
    main(EXPERIMENT)
