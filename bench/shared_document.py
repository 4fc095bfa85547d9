"""One document, many users, one question each: what a shared prefix is worth.

    python -m bench.shared_document [--users 128] [--document 65536]

All users ask at once, of a document that no server has seen, questions of 1,024 tokens with answers of
256. The pool, the common one of 152,000 tokens, holds the document and what 67 of the 128 users add to
it uncompressed, so the rest wait; and every decode step reads the document once per running user.

`answers_per_s` counts finished users. `hit_rate` is the share of prompt tokens that the server took
from its cache.
"""

import argparse
from functools import partial

from bench import client
from bench.experiment import Bench, Experiment
from bench.fleet import Entry
from bench.gauge import Gauge
from bench.session import main
from tangram_sglang.cli.server import Server

POOL_TOKENS, RUNNING = 152_000, 128
QUESTION, ANSWER = 1024, 256


def figures(result: dict, peak: float) -> dict[str, float]:
    """Of one run."""
    return {
        "answers_per_s": result["completed"] / result["duration"],
        "tokens_per_s": sum(result["output_lens"]) / result["duration"],
        "peak_running": peak,
        "median_ttft_s": result["median_ttft_ms"] / 1e3,
        "hit_rate": sum(result["cached_tokens"]) / sum(result["input_lens"]),
        "duration_s": result["duration"],
    }


def measure(now: Bench, server: Server, seed: int) -> dict[str, float]:
    lengths = (now.length(x) for x in (now.options.document, QUESTION, ANSWER))
    flags = client.shared_load(now.options.users, *lengths)
    with Gauge(server.url, "sglang:num_running_reqs") as running:
        result = now.load(server, flags, seed)
    return figures(result, running.peak)


def on_server(now: Bench, entry: Entry, server: Server) -> None:
    asked = {
        "users": now.options.users,
        "document": now.length(now.options.document),
        "question": now.length(QUESTION),
        "answer": now.length(ANSWER),
    }
    runs = now.runs(partial(measure, now, server))
    now.report.add(entry, "shared document", asked, runs, main="answers_per_s")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--users", type=int, default=128)
    parser.add_argument("--document", type=int, default=65_536, help="tokens (%(default)s)")


EXPERIMENT = Experiment(
    "bench.shared_document", __doc__, POOL_TOKENS, RUNNING, on_server, add_options
)

if __name__ == "__main__":
    main(EXPERIMENT)
