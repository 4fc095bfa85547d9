"""Where a server's time goes under a load: milliseconds of the GPU by class of work, and the floor.

    python -m bench.breakdown [--cases long mid short concurrency multi_turn shared_document]

Loads are those of `bench/offline.py`, `bench/multi_turn.py` and `bench/shared_document.py`, in this
command's pool. A kernel's class is looked up by its name in `bench/kernel_classes.py`; one that is not
there is `other`, whose largest are listed. `bench/trace.py` says what overlapping kernels and gaps count
for, `bench/floors.py` what a floor is: arithmetic at `--tflops`, reads at `--terabytes` a second.

The profiler slows a server down, between kernels above all: `tokens_per_s`, of the profiled span, beside
that of the same load in `offline.csv` says by how much. The kernels behind each class go to a second
file, `...-kernels.csv`. On a CPU the load is carried and then refused, since no GPU kernel was recorded.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import client, multi_turn, offline, profiled, shared_document
from bench.experiment import Bench, Experiment
from bench.fleet import Entry
from bench.floors import Kept, Load, Model, Rates, floors_ms
from bench.kernel_classes import CLASSES, OTHER
from bench.record import append_csv, say
from bench.report import Report, rounded
from bench.session import main
from bench.trace import ROWS, Breakdown
from tangram_sglang.cli.server import Server

CONVERSATIONS, TURNS, ANSWER = 12, 5, 128
USERS, DOCUMENT = 32, 65_536
ITEMSIZE = 2
NAME = 100  # characters of a kernel's


def unrelated(name: str) -> Callable[[Bench], list[str]]:
    case = offline.CASES[name]

    def flags(now: Bench) -> list[str]:
        lengths = now.length(case.input_len), now.length(case.output_len)
        return client.random_load(now.options.requests or case.requests, *lengths)

    return flags


def conversations(now: Bench) -> list[str]:
    first, more = now.length(multi_turn.FIRST), now.length(multi_turn.MORE)
    count = now.options.requests or CONVERSATIONS
    return client.conversation_load(count, first, more, TURNS, now.length(ANSWER))


def users(now: Bench) -> list[str]:
    lengths = (DOCUMENT, shared_document.QUESTION, shared_document.ANSWER)
    return client.shared_load(now.options.requests or USERS, *map(now.length, lengths))


LOADS = {
    **{name: unrelated(name) for name in offline.CASES},
    **{"multi_turn": conversations, "shared_document": users},
}


@dataclass(frozen=True)
class Run:
    """One profiled load."""

    time: Breakdown
    floors: Mapping[str, float]
    tokens: int

    def figures(self, row: str) -> dict[str, float]:
        return {
            "ms": self.time.ms[row],
            "share": self.time.share(row),
            "launches": self.time.launches[row],
            "decode_steps": self.time.graphs,
            "span_ms": self.time.span_ms,
            "tokens_per_s": 1e3 * self.tokens / self.time.span_ms,
        }


def measure(now: Bench, entry: Entry, server: Server, case: str, seed: int) -> Run:
    options = now.options
    place = (options.traces or now.scratch) / f"{entry.name.replace(' ', '-')}-{case}-{seed}"
    result, time = profiled.load(now, server, LOADS[case](now), seed, place)
    if time.misplaced:
        say(f"decode outside of graphs or prefill in them, so classes are mixed: {time.misplaced}")
    load = Load.of(result)
    model = Model.of(json.loads((now.subject.folder / "config.json").read_text()), ITEMSIZE)
    rates = Rates(1e12 * options.tflops, 1e12 * options.terabytes)
    kept = Kept.of(entry, model, options.context_length)
    floors = floors_ms(load, time.graphs, model, kept, rates)
    return Run(time, floors, sum(load.prompts) + sum(load.answers))


def record(now: Bench, entry: Entry, case: str, runs: Sequence[Run]) -> None:
    """Rows of both files."""
    if not runs:
        return
    for row in ROWS:
        floors = [run.floors[row] for run in runs if row in run.floors]
        floor = rounded(statistics.median(floors)) if floors else ""
        asked = {"load": case, "class": row, "floor_ms": floor}
        figures = [run.figures(row) for run in runs]
        now.report.add(entry, f"{case}: {row}", asked, figures, main="ms", lower_is_better=True)
    say_others(entry, case, runs[-1])
    common = {"model": now.subject.name, "load": case, "server": entry.name}
    append_csv(
        now.options.csv.with_stem(f"{now.options.csv.stem}-kernels"),
        [
            {**common, "class": work, "kernel": brief(name), "ms": rounded(ms), **now.report.facts}
            for work in CLASSES
            for name, ms in runs[-1].time.largest(work).items()
        ],
    )


def brief(kernel: str) -> str:
    """The start of a name, on one line; C++ writes all parameters of a template into it."""
    return " ".join(kernel.split())[:NAME]


def say_others(entry: Entry, case: str, run: Run) -> None:
    """The largest kernels of no class, so that nothing hides."""
    found = "".join(
        f"\n{ms:11.1f} ms  {brief(name)}" for name, ms in run.time.largest(OTHER).items()
    )
    say(f"{case}, {entry.name}: {OTHER}:{found or ' nothing'}")


def table(report: Report) -> str:
    """Servers of a load side by side."""
    loads = dict.fromkeys(row["load"] for row in report.rows)
    return "\n\n".join(
        side_by_side(load, [row for row in report.rows if row["load"] == load]) for load in loads
    )


def side_by_side(load: str, rows: Sequence[Mapping[str, Any]]) -> str:
    by_server: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        by_server.setdefault(row["server"], {})[row["class"]] = row
    servers, width = by_server.values(), 27
    lines = [
        f"{load:25}" + "".join(f"{name:>{width}}" for name in by_server),
        f"{'':25}" + f"{'ms':>11}{'share':>7}{'floor':>9}" * len(by_server),
    ]
    for name in ROWS:
        cells = [f"{x[name]['ms']:11.1f}{x[name]['share']:7.1%}" for x in servers]
        floors = [f"{x[name]['floor_ms']:>9}" for x in servers]
        lines.append(f"{name:25}" + "".join(a + b for a, b in zip(cells, floors, strict=True)))
    for name, figure in (("all", "span_ms"), ("decode steps", "decode_steps")):
        cells = [f"{x[ROWS[0]][figure]:11.1f}{'':16}" for x in servers]
        lines.append(f"{name:25}" + "".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def on_server(now: Bench, entry: Entry, server: Server) -> None:
    for case in now.options.cases:
        record(now, entry, case, now.runs(partial(measure, now, entry, server, case)))


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cases", nargs="+", choices=LOADS, default=["long"], help="loads (%(default)s)")
    add("--requests", type=int, help="requests, conversations or users of every case")
    add("--tflops", type=float, default=790.0, help="that matrix products reach (%(default)s)")
    add("--terabytes", type=float, default=4.27, help="a second that copies reach (%(default)s)")
    add("--traces", type=Path, help="new folder that keeps the traces; default: thrown away")


EXPERIMENT = Experiment(
    *("bench.breakdown", __doc__, offline.POOL_TOKENS, offline.RUNNING, on_server, add_options),
    table=table,
)

if __name__ == "__main__":
    main(EXPERIMENT)
