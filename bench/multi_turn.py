"""Conversations in a pool that cannot remember them all: throughput, time to first token, hits.

    python -m bench.multi_turn [--conversations 12] [--turns 5]

Every conversation starts with 32K tokens and grows by 1K a turn. All run side by side, each sending its
next turn when the last one is answered, so a turn comes back after all others had theirs, and what is
least recently used is what comes next. Scaled from 64 conversations and a pool for 20 of them to 12 in a
pool for 4, so that a run takes a minute; `held` says how many conversations the pool holds
uncompressed.

`tokens_per_s` counts prompts (cached or not) and answers; `ttft_later_s` is the median over turns 2 and
later, `hit_rate` cached tokens, as the server counts them, over prompt tokens of those turns.
"""

import argparse
import statistics
from collections.abc import Sequence
from functools import partial

from bench import client
from bench.experiment import Bench, Experiment
from bench.fleet import Entry
from bench.gauge import Gauge
from bench.session import main
from tangram_sglang.cli.server import Server

POOL_TOKENS, RUNNING = 152_000, 64
FIRST, MORE = 32_768, 1024


def conversation_tokens(first: int, more: int, answer: int, turns: int) -> int:
    """Tokens of a finished conversation."""
    return first + (turns - 1) * more + turns * answer


def by_turn(values: Sequence[float], turns: int) -> list[list[float]]:
    """The client lists a conversation's turns one after the other."""
    return [list(values[turn::turns]) for turn in range(turns)]


def figures(result: dict, turns: int, peak: float) -> dict[str, float]:
    """Of one run."""
    ttfts, prompts, cached = (
        by_turn(result[name], turns) for name in ("ttfts", "input_lens", "cached_tokens")
    )
    later = [x for turn in ttfts[1:] for x in turn]
    tokens = sum(result["input_lens"]) + sum(result["output_lens"])
    return {
        "tokens_per_s": tokens / result["duration"],
        "ttft_later_s": statistics.median(later),
        "hit_rate": sum(map(sum, cached[1:])) / sum(map(sum, prompts[1:])),
        "ttft_first_s": statistics.median(ttfts[0]),
        "peak_running": peak,
        "duration_s": result["duration"],
    }


def measure(now: Bench, server: Server, seed: int) -> dict[str, float]:
    conversations, turns = now.options.conversations, now.options.turns
    lengths = now.length(FIRST), now.length(MORE), turns, now.length(now.options.answer)
    flags = client.conversation_load(conversations, *lengths)
    with Gauge(server.url, "sglang:num_running_reqs") as running:
        result = now.load(server, flags, seed)
    return figures(result, turns, running.peak)


def on_server(now: Bench, entry: Entry, server: Server) -> None:
    options = now.options
    lengths = [now.length(x) for x in (FIRST, MORE, options.answer)]
    held = now.pool.tokens / conversation_tokens(*lengths, options.turns)
    asked = {
        **{"conversations": options.conversations, "turns": options.turns},
        **dict(zip(("first", "more", "answer"), lengths, strict=True)),
        "held": round(held, 2),
    }
    runs = now.runs(partial(measure, now, server))
    now.report.add(entry, "all turns", asked, runs, main="tokens_per_s")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--answer", type=int, default=128, help="tokens of each (%(default)s)")


EXPERIMENT = Experiment("bench.multi_turn", __doc__, POOL_TOKENS, RUNNING, on_server, add_options)

if __name__ == "__main__":
    main(EXPERIMENT)
