"""What the experiments share: options, servers, the gate, and the order in which all is done."""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import client, gate, lively
from bench.facts import facts
from bench.fleet import Entry, Fleet, Pool, groups, ours, stock
from bench.record import RESULTS, say
from bench.report import NO_VERDICT, Report
from bench.subject import Subject, subject
from tangram_sglang.cli.server import Server

WINDOW = 512


def parser(module: str, doc: str, pool_tokens: int, running: int) -> argparse.ArgumentParser:
    """Options of every experiment; ``pool_tokens`` and ``running`` are this one's defaults."""
    name = module.rpartition(".")[2]
    found = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--model", default="llama-3.1-8b", help="a shape, or with --cpu a folder (%(default)s)")
    add("--profile", choices=("fastkvzip", "keydiff"), default="fastkvzip", help="budgets")
    add("--plan", help="plan file instead of a profile's")
    add("--cpu", action="store_true", help="serve a small model on this CPU")
    add("--baselines", nargs="*", default=["flashinfer"], help="stock backends (%(default)s)")
    add("--retentions", type=float, nargs="*", default=[1.0, 0.25])
    add("--settings", nargs="*", default=[], metavar="NAME=VALUE", help="TANGRAM_ ones, of ours")
    add("--pool-tokens", type=int, default=pool_tokens, help="stock's; same bytes (%(default)s)")
    add("--scale", type=float, default=1.0, help="of every length and of the pool (%(default)s)")
    add("--max-running", type=int, default=running, help="requests at once (%(default)s)")
    add("--context-length", type=int, default=131072)
    add("--at-once", type=int, default=3, help="servers in memory together (%(default)s)")
    add("--repeats", type=int, default=1, help="runs, of which the median counts (%(default)s)")
    add("--limit-s", type=float, default=0, help="start no run after so long; 0: no limit")
    add("--tolerance", type=float, default=gate.TOLERANCE, help="of the gate (%(default)s)")
    add("--csv", type=Path, default=RESULTS / f"{name}.csv", help="(%(default)s)")
    add("--logs", type=Path, help="folder of the servers' logs; default: thrown away")
    return found


@dataclass(frozen=True)
class Bench:
    """One run of an experiment."""

    options: argparse.Namespace
    subject: Subject
    pool: Pool
    report: Report
    scratch: Path
    started: float

    def length(self, tokens: float) -> int:
        """A length of the experiment, scaled."""
        return max(1, round(tokens * self.options.scale))

    def entries(self) -> list[Entry]:
        """Stock SGLang's backends, then ours at every retention."""
        return [
            *(stock(x, self.pool) for x in self.options.baselines),
            *(self.ours(x) for x in self.options.retentions),
        ]

    def ours(self, retention: float, plan: bool = True, name: str = "", **settings) -> Entry:
        """Our backend with ``--settings`` and these; without a plan all heads keep as much."""
        chosen = self.subject.plan if plan else None
        return ours(retention, chosen, self.pool, name, **{**self.settings, **settings})

    @property
    def settings(self) -> dict[str, str]:
        """``--settings``, in lower case and without the prefix."""
        given = (setting.split("=", 1) for setting in self.options.settings)
        return {key.removeprefix("TANGRAM_").lower(): value for key, value in given}

    def shared_flags(self) -> list[str]:
        """Flags of all servers; graphs reach as far as requests do."""
        rows = str(self.options.max_running)
        flags = [
            *self.subject.flags,
            *("--context-length", str(self.options.context_length)),
            # the gauge of running requests is set when a step is logged
            *("--max-running-requests", rows, "--decode-log-interval", "10"),
        ]
        return flags if self.options.cpu else [*flags, "--cuda-graph-max-bs-decode", rows]

    def servers(self, entries: Sequence[Entry]) -> Iterator[tuple[Entry, Server]]:
        """Every entry's server in turn, ready and with an empty cache; the gate comes first."""
        norms = self.subject.norms(self.scratch)
        logs = self.options.logs or self.scratch
        for group in groups(entries, self.options.at_once):
            with Fleet(group, self.shared_flags(), self.subject.environment, logs) as fleet:
                client.load()
                fleet.wait_until_ready()
                for _, server in fleet:
                    if norms is not None:
                        lively.enliven(server.url, norms)
                self._gate(fleet)
                yield from fleet

    def runs(self, measure: Callable[[int], dict[str, float]]) -> list[dict[str, float]]:
        """Figures of ``measure(seed)``, as often as asked; none when time is up."""
        found = []
        for seed in range(1, self.options.repeats + 1):
            spent = time.monotonic() - self.started
            if self.options.limit_s and spent > self.options.limit_s:
                say(f"left out, as {spent:.0f} s are spent")
                break
            found.append(measure(seed))
        return found

    def load(self, server: Server, flags: Sequence[str], seed: int) -> dict:
        """Put a load of `bench/client.py` on a server."""
        return client.run(server.url, self.subject.folder, flags, self.scratch, seed)

    def _gate(self, fleet: Fleet) -> None:
        kinds = {
            "stock" if x.stock else "whole" if x.retention == 1 else "compressed": server.url
            for x, server in fleet
        }
        if len(kinds) < 3:
            # a later group of servers goes by the gate of the first
            if self.report.verdict == NO_VERDICT:
                say("no gate: it needs stock, retention 1.0 and a compressed server side by side")
            return
        window = int(self.settings.get("window", WINDOW))
        asked = gate.prompts(self.subject.vocabulary, gate.lengths(window))
        self.report.verdict = gate.check(**kinds, asked=asked, tolerance=self.options.tolerance)
        say(f"gate {self.report.verdict.text}")


@contextlib.contextmanager
def bench(module: str, options: argparse.Namespace) -> Iterator[Bench]:
    """Opens an experiment; prints its table at the end, also when it was cut short."""
    model = subject(options)
    pool = Pool(max(1, round(options.pool_tokens * options.scale)), model.token_bytes)
    common = {
        **{"model": model.name, "plan": model.plan.stem if model.plan else "uniform"},
        **{"pool_tokens": pool.tokens, "pool_gb": round(pool.bytes / 1e9, 3)},
        **{"scale": options.scale},
    }
    report = Report(options.csv, common, facts(module))
    say(
        f"{model.name}: {pool.bytes / 1e9:.2f} GB of KV a server, {pool.tokens} tokens of "
        f"{pool.token_bytes} bytes uncompressed; lengths x {options.scale:g}"
    )
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as scratch:
        try:
            yield Bench(options, model, pool, report, Path(scratch), time.monotonic())
        finally:
            print(report.table(), flush=True)
