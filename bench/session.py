"""Experiments on servers that are started once: what is done, and in which order.

For each group of servers that fit into memory together: the gate, then one experiment after the other,
each on all servers of the group in turn. So what was begun first is finished first.
"""

import argparse
import contextlib
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import gate, lively
from bench.experiment import Bench, Experiment
from bench.facts import facts
from bench.fleet import Entry, Fleet, Pool, groups
from bench.record import say
from bench.report import NO_VERDICT, Report
from bench.subject import subject
from tangram_sglang.cli.server import Server

WINDOW = 512
Asked = tuple[Experiment, argparse.Namespace]


def main(experiment: Experiment) -> None:
    """The command of one experiment."""
    sys.exit(run(experiment.module, [(experiment, experiment.parser().parse_args())]))


def run(module: str, asked: Sequence[Asked]) -> int:
    """Measure all that is asked; returns the exit status.

    Tables are printed at the end, also when it was cut short. ``module`` is the command's. Options of
    servers are those of the first.
    """
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as scratch:
        benches = opened(module, asked, Path(scratch))
        experiments = [experiment for experiment, _ in asked]
        for experiment, now in zip(experiments, benches, strict=True):
            experiment.check(now)
        try:
            failed = measure(experiments, benches)
        finally:
            print(tables(experiments, benches), flush=True)
    return 1 if failed else 0


def opened(module: str, asked: Sequence[Asked], scratch: Path) -> list[Bench]:
    """One for each experiment; they share all but options and report."""
    options, started = asked[0][1], time.monotonic()
    model = subject(options)
    pool = Pool(max(1, round(options.pool_tokens * options.scale)), model.token_bytes)
    common = {
        **{"model": model.name, "plan": model.plan.stem if model.plan else "uniform"},
        **{"pool_tokens": pool.tokens, "pool_gb": round(pool.bytes / 1e9, 3)},
        **{"scale": options.scale},
    }
    say(
        f"{model.name}: {pool.bytes / 1e9:.2f} GB of KV a server, {pool.tokens} tokens of "
        f"{pool.token_bytes} bytes uncompressed; lengths x {options.scale:g}"
    )
    known = facts(module)
    return [
        Bench(own, model, pool, Report(own.csv, common, known), scratch, started)
        for _, own in asked
    ]


def measure(experiments: Sequence[Experiment], benches: Sequence[Bench]) -> set[int]:
    """Places of those that failed; such a one is not gone on with, while others are."""
    failed: set[int] = set()
    for group in groups(experiments[0].entries(benches[0]), benches[0].options.at_once):
        if len(failed) == len(benches) or benches[0].time_is_up:
            say(f"not started: {', '.join(entry.name for entry in group)}")
            continue
        with ready(group, experiments, benches) as fleet:
            for i, (experiment, now) in enumerate(zip(experiments, benches, strict=True)):
                if i not in failed and not all(
                    succeeded(experiment, now, entry, server) for entry, server in fleet
                ):
                    failed.add(i)
    return failed


def succeeded(experiment: Experiment, now: Bench, entry: Entry, server: Server) -> bool:
    """Measure one server; what went wrong is said."""
    try:
        experiment.on_server(now, entry, server)
    except (Exception, SystemExit):  # SGLang's client exits when it finds no server
        say(f"{experiment.name} failed on {entry.name}:\n{traceback.format_exc()}")
        say(f"--- last lines of its log\n{server.log_tail(15)}\n---")
        return False
    return True


@contextlib.contextmanager
def ready(
    group: Sequence[Entry], experiments: Sequence[Experiment], benches: Sequence[Bench]
) -> Iterator[Fleet]:
    """Servers that run together, with an empty cache; they have been through the gate."""
    now = benches[0]
    norms, logs = now.subject.norms(now.scratch), now.options.logs or now.scratch
    with Fleet(group, now.shared_flags(), now.subject.environment, logs) as fleet:
        for experiment in experiments:
            # if it cannot be had, measuring fails on it again, and ends that experiment alone
            with contextlib.suppress(ImportError):
                experiment.load_client()
        fleet.wait_until_ready()
        if norms is not None:
            for _, server in fleet:
                lively.enliven(server.url, norms)
        pass_gate(benches, fleet)
        yield fleet


def pass_gate(benches: Sequence[Bench], fleet: Fleet) -> None:
    """Its verdict goes into every report."""
    now = benches[0]
    kinds = {
        "stock" if x.stock else "whole" if x.retention == 1 else "compressed": server.url
        for x, server in fleet
    }
    if len(kinds) < 3:
        # a later group of servers goes by the gate of the first
        if now.report.verdict == NO_VERDICT:
            say("no gate: it needs stock, retention 1.0 and a compressed server side by side")
        return
    window = int(now.settings.get("window", WINDOW))
    asked = gate.prompts(now.subject.vocabulary, gate.lengths(window))
    verdict = gate.check(**kinds, asked=asked, tolerance=now.options.tolerance)
    say(f"gate {verdict.text}")
    for each in benches:
        each.report.verdict = verdict


def tables(experiments: Sequence[Experiment], benches: Sequence[Bench]) -> str:
    found = [x.table(now.report) for x, now in zip(experiments, benches, strict=True)]
    if len(found) == 1:
        return found[0]
    named = zip(experiments, found, strict=True)
    return "\n\n".join(f"{experiment.name}\n{table}" for experiment, table in named)
