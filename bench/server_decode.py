"""Decode steps of whole servers: ours against SGLang's own backends.

    python -m bench.server_decode [--batch-sizes 1 8 32] [--baselines triton flashinfer]

SGLang's client ``benchmark.one_batch_server`` puts a batch of equal requests on a server, once without
counting it. `step_ms` is what that client reports: the wall time from the last request's first token to
the end, over a request's tokens. Less is better: `times_stock` is how many times as fast as the best
stock backend, and `over_best_stock` the step as a multiple of that backend's.

Requests must all fit and run at once, uncompressed; a larger pool changes nothing.
"""

import argparse
import contextlib
import importlib
import sys
from functools import cache, partial
from pathlib import Path
from types import ModuleType

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bench import client
from bench.experiment import Bench, Experiment
from bench.fleet import Entry
from bench.session import main
from tangram_sglang.cli.server import Server

POOL_TOKENS, RUNNING = 152_000, 64
TOKENS_OVER = 1.06  # room for whole pages


def load_client() -> ModuleType:
    """The first call takes ten seconds."""
    client.load()
    # it prints tables with it, which are not asked for here
    with client.stand_in("tabulate", tabulate=None):
        return importlib.import_module("sglang.benchmark.one_batch_server")


@cache
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def lengths(now: Bench) -> tuple[int, int]:
    """Tokens in and out."""
    return now.length(now.options.input_len), now.length(now.options.output_len)


def check(now: Bench) -> None:
    """Refuses batches that a server would not run at once."""
    largest, running = max(now.options.batch_sizes), now.options.max_running
    if largest > running:
        raise SystemExit(
            f"error: server_decode: a batch of {largest} needs --max-running {largest} or more, it "
            f"is {running}"
        )
    needed = int(TOKENS_OVER * largest * sum(lengths(now)))
    if needed > now.pool.tokens:
        raise SystemExit(
            f"error: server_decode: a batch of {largest} needs a pool of {needed} tokens, it has "
            f"{now.pool.tokens}: give more --pool-tokens or smaller --batch-sizes"
        )


def batch(now: Bench, server: Server, size: int) -> dict[str, float]:
    input_len, output_len = lengths(now)
    # the client reports on stdout, which is for our table
    with contextlib.redirect_stdout(sys.stderr):
        result = load_client().run_one_case(
            server.url,
            batch_size=size,
            input_len=input_len,
            output_len=output_len,
            temperature=0.0,
            ignore_eos=True,
            return_logprob=False,
            stream_interval=1,
            input_len_step_percentage=0.0,
            run_name="",
            result_filename="",
            tokenizer=tokenizer(now.subject.folder),
            dataset_name="random-ids",
        )
    return {
        "step_ms": 1e3 * size / result.output_throughput,
        "last_ttft_s": result.last_ttft,
        "latency_s": result.latency,
    }


def measure(now: Bench, server: Server, size: int, seed: int) -> dict[str, float]:
    if seed == 1:
        batch(now, server, size)  # not counted
    return batch(now, server, size)


def on_server(now: Bench, entry: Entry, server: Server) -> None:
    input_len, output_len = lengths(now)
    for size in now.options.batch_sizes:
        asked = {"batch": size, "input_len": input_len, "output_len": output_len}
        runs = now.runs(partial(measure, now, server, size))
        now.report.add(
            entry, f"batch {size}", asked, runs, "step_ms", lower_is_better=True, over_stock=True
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(repeats=3)  # a run takes a second or two
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-len", type=int, default=2048, help="tokens (%(default)s)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens (%(default)s)")


EXPERIMENT = Experiment(
    *("bench.server_decode", __doc__, POOL_TOKENS, RUNNING, on_server, add_options),
    load_client=load_client,
    check=check,
)

if __name__ == "__main__":
    main(EXPERIMENT)
