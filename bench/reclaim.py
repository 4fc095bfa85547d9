"""What Budget Reservation saves in prefill, against a compress-and-reclaim mode of our own.

    python -m bench.reclaim [--cases alone together] [--input 32768] [--requests 24]

The same model, budgets, scorer and kernels, and as many pages for requests:

- stock SGLang and ours at 1.0, which the gate needs;
- `reserve`: windows are sealed on the way, and a prompt is admitted for what it keeps;
- `reclaim`: a prompt is admitted for all of its K and V and holds them until its last chunk, which scores
  it, writes what is kept and gives the rest back (`TANGRAM_RESERVE=uncompressed`). Its queries, but for
  the last, see all tokens before them. Neither shares a prefix, as prompts are unrelated.

`alone`: one prompt after the other, answers of one token; so prefill alone, without a queue. `together`:
all at once, as many as saturate the pool, and answers of `--answer` tokens.

`prefill_s` is the time to first token summed over `alone` prompts, and `together` the time until the last
prompt has its first token, decode steps in between included; `prefill_tokens_per_s` is all prompts'
tokens over it. `saved`, in the row of `reclaim`, is the share of its time that `reserve` does without: of
`prefill_s` when `alone`, of `duration_s` when `together`. `peak_running` is the largest value of SGLang's
gauge sglang:num_running_reqs, sampled every quarter of a second.

The last chunk of `reclaim` writes to pages that it still reads, and copies them to spare pages first. So
its pool has more spare pages than that of `reserve`, for one prompt of `--context-length` tokens as it is
kept. They come on top of the bytes that both have, and are given to nobody.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import client
from bench.experiment import Bench, Experiment
from bench.fleet import Entry
from bench.gauge import Gauge
from bench.offline import POOL_TOKENS, RUNNING
from bench.record import say
from bench.report import medians
from bench.session import main
from tangram_sglang.cli.server import Server
from tangram_sglang.plan.described import plan_layout
from tangram_sglang.plan.file import load_plan
from tangram_sglang.settings import Settings

RESERVE, RECLAIM = "reserve", "reclaim"
# and the time that is compared
CASES = {"alone": "prefill_s", "together": "duration_s"}


def spare_bytes(entry: Entry, context: int, itemsize: int = 2) -> int:
    """Bytes of the spare pages that ``entry`` has and would not have if it reserved."""
    settings = Settings.from_env(dict(entry.settings))
    layout = plan_layout(load_plan(Path(entry.settings["TANGRAM_PLAN"])), settings, context)
    rule = layout.rule
    longer = rule.pages(context) - rule.pages(rule.window + rule.recent)
    pages = np.minimum(layout.sealed_slots, max(0, longer)).sum()
    return int(pages) * layout.page_bytes(itemsize)


def servers(now: Bench) -> list[Entry]:
    """Stock and ours at 1.0, then the two that are compared."""
    options = now.options
    reclaim = {"name": RECLAIM, "reserve": "uncompressed"}
    if not options.cpu:
        # on a CPU there are no spare pages
        extra = spare_bytes(now.ours(options.retention), options.context_length)
        say(f"{RECLAIM}: {extra} bytes of spare pages on top of the pool")
        reclaim["pool_bytes"] = now.pool.bytes + extra
    return [
        *now.stocks(),
        now.ours(1.0),
        now.ours(options.retention, name=RESERVE),
        now.ours(options.retention, **reclaim),
    ]


def figures(result: dict, peak: float, together: bool) -> dict[str, float]:
    """Of one run."""
    first, tokens = result["ttfts"], sum(result["input_lens"])
    prefill_s = max(first) if together else sum(first)
    return {
        "prefill_tokens_per_s": tokens / prefill_s,
        "mean_ttft_s": sum(first) / len(first),
        "peak_running": peak,
        "tokens_per_s": (tokens + sum(result["output_lens"])) / result["duration"],
        "prefill_s": prefill_s,
        "duration_s": result["duration"],
    }


def measure(now: Bench, server: Server, case: str, seed: int) -> dict[str, float]:
    options = now.options
    if case == "alone":
        flags = client.random_load(options.alone, now.length(options.input), 1)
        flags += ["--max-concurrency", "1"]
    else:
        lengths = now.length(options.input), now.length(options.answer)
        flags = client.random_load(options.requests, *lengths)
    with Gauge(server.url, "sglang:num_running_reqs") as running:
        result = now.load(server, flags, seed)
    return figures(result, running.peak, case == "together")


def saved(rows: Sequence[Mapping[str, Any]], case: str, runs: Sequence[dict]) -> float | str:
    """Share of the time of `reclaim`'s ``runs`` that `reserve`, measured before, did without."""
    before = [x[CASES[case]] for x in rows if (x["server"], x["case"]) == (RESERVE, case)]
    if not (before and runs):
        return ""
    return round(1 - before[-1] / medians(runs)[CASES[case]], 4)


def on_server(now: Bench, entry: Entry, server: Server) -> None:
    options = now.options
    for case in options.cases:
        runs = now.runs(partial(measure, now, server, case))
        asked = {
            "requests": options.alone if case == "alone" else options.requests,
            "input_len": now.length(options.input),
            "output_len": 1 if case == "alone" else now.length(options.answer),
            "saved": saved(now.report.rows, case, runs) if entry.name == RECLAIM else "",
        }
        now.report.add(entry, case, asked, runs, main="prefill_tokens_per_s")


def add_options(parser: argparse.ArgumentParser) -> None:
    # the table and the spare pages of `reclaim` grow with it
    parser.set_defaults(context_length=40_960)
    add = parser.add_argument
    add("--retention", type=float, default=0.25)
    add("--cases", nargs="+", choices=CASES, default=list(CASES))
    add("--input", type=int, default=32_768, help="tokens (%(default)s)")
    add("--answer", type=int, default=256, help="tokens (%(default)s)")
    add("--alone", type=int, default=5, help="prompts in turn (%(default)s)")
    add("--requests", type=int, default=24, help="together (%(default)s)")


EXPERIMENT = Experiment(
    "bench.reclaim", __doc__, POOL_TOKENS, RUNNING, on_server, add_options, servers
)

if __name__ == "__main__":
    main(EXPERIMENT)
