"""What each part of the design is worth: budgets, groups, the split map, heads in a group.

    python -m bench.ablation [--steps uniform layer global map] [--heads 1 2 4 8 16]

Requests of 32K tokens that saturate the pool, as in `bench.offline`. In this order:

- stock SGLang and ours at 1.0, which the gate needs and the others are compared with;
- `uniform`: no plan, so every head keeps as much, and equal splits: every head of a decode step gets as
  many programs (`TANGRAM_SPLITS=equal`);
- `layer`: the plan's budgets, and groups of heads of one layer;
- `global`: the same, and groups across layers;
- `map`: the same, and the split map;
- `H1` .. `H16`: `map` with so many heads in a group (H_p).

All compressed ones keep the same share, and their pools have the same bytes: budgets are scaled so that
what all groups keep sums to the retention. A step therefore shows what it costs or saves in time, and
its gain in what is kept shows in `python -m bench.quality`, not here. `kept_share` is what sealed
windows keep of all entries; `spread`, the most a head keeps of a window over the least, says how
uneven the work is. Most of the time is prefill, which the split map does not touch: its gain shows in
`median_itl_ms`, the median time between two tokens of an answer.
"""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench import offline
from bench.experiment import Bench, Experiment
from bench.fleet import Entry
from bench.session import main
from tangram_sglang.cli.server import Server
from tangram_sglang.plan.described import plan_layout
from tangram_sglang.plan.file import load_plan
from tangram_sglang.settings import Settings

STEPS = {
    "uniform": {"splits": "equal"},
    "layer": {"grouping": "layer", "splits": "equal"},
    "global": {"grouping": "global", "splits": "equal"},
    "map": {"grouping": "global", "splits": "map"},
}
CASE = offline.CASES["concurrency"]


def steps(now: Bench) -> list[Entry]:
    """Stock and ours at 1.0, then what was asked for."""
    options = now.options
    found = [*now.stocks(), now.ours(1.0)]
    share = options.retention
    found += [
        now.ours(share, plan=name != "uniform", name=name, **STEPS[name]) for name in options.steps
    ]
    found += [now.ours(share, name=f"H{n}", group_heads=n) for n in options.heads]
    return found


def described(entry: Entry, max_tokens: int) -> dict[str, float | str]:
    """What the plan in force keeps; without a plan all heads keep the same."""
    if entry.stock or "TANGRAM_PLAN" not in entry.settings:
        return {"kept_share": entry.retention, "spread": 1.0}
    settings = Settings.from_env(dict(entry.settings))
    layout = plan_layout(load_plan(Path(entry.settings["TANGRAM_PLAN"])), settings, max_tokens)
    kept = [int(x) for x in layout.kept if x]
    return {"kept_share": round(layout.retention_held, 4), "spread": max(kept) / min(kept)}


def on_server(now: Bench, entry: Entry, server: Server) -> None:
    case = replace(CASE, requests=now.options.requests)
    runs = now.runs(partial(offline.measure, now, server, case))
    asked = {**offline.sizes(now, case), **described(entry, now.options.context_length)}
    now.report.add(entry, "32K", asked, runs, main="tokens_per_s")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--retention", type=float, default=0.25)
    parser.add_argument("--steps", nargs="*", choices=STEPS, default=list(STEPS))
    parser.add_argument("--heads", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--requests", type=int, default=CASE.requests)


EXPERIMENT = Experiment(
    *("bench.ablation", __doc__, offline.POOL_TOKENS, offline.RUNNING),
    *(on_server, add_options, steps),
)

if __name__ == "__main__":
    main(EXPERIMENT)
