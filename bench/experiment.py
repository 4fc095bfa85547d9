"""What an experiment is: its options, its servers, and what is measured on each of them.

`bench/session.py` starts servers and measures experiments on them, one or several.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import client, gate
from bench.fleet import Entry, Pool, ours, stock
from bench.record import RESULTS, say
from bench.report import Report
from bench.subject import Subject
from tangram_sglang.cli.retention import retention
from tangram_sglang.cli.server import Server


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

    def stocks(self) -> list[Entry]:
        """Stock SGLang's backends."""
        return [stock(x, self.pool) for x in self.options.baselines]

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

    def runs(self, measure: Callable[[int], dict[str, float]]) -> list[dict[str, float]]:
        """Figures of ``measure(seed)``, as often as asked; none when time is up."""
        found = []
        for seed in range(1, self.options.repeats + 1):
            if self.time_is_up:
                say(f"left out, as {self.options.limit_s:.0f} s are spent")
                break
            found.append(measure(seed))
        return found

    @property
    def time_is_up(self) -> bool:
        limit_s = self.options.limit_s
        return bool(limit_s) and time.monotonic() - self.started > limit_s

    def load(self, server: Server, flags: Sequence[str], seed: int) -> dict:
        """Put a load of `bench/client.py` on a server."""
        return client.run(server.url, self.subject.folder, flags, self.scratch, seed)


def stock_and_ours(now: Bench) -> list[Entry]:
    """Stock SGLang's backends, then ours at every retention."""
    return [*now.stocks(), *(now.ours(x) for x in now.options.retentions)]


@dataclass(frozen=True)
class Experiment:
    """What a module of `bench/` says of its experiment.

    Attributes:
        module: the command is ``python -m <module>``.
        doc: its help.
        pool_tokens: of the default pool, in tokens of stock SGLang.
        running: requests at once, unless asked for otherwise.
        on_server: measures one server and reports.
        add_options: adds options of its own; its defaults for common ones count without a suite.
        entries: servers; an experiment with servers of its own is in no suite.
        load_client: imports what puts the load on, while servers start.
        check: refuses what cannot be measured, before a server is started.
        table: what is printed in the end.
    """

    module: str
    doc: str
    pool_tokens: int
    running: int
    on_server: Callable[[Bench, Entry, Server], None]
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    entries: Callable[[Bench], list[Entry]] = stock_and_ours
    load_client: Callable[[], object] = client.load
    check: Callable[[Bench], None] = lambda now: None
    table: Callable[[Report], str] = Report.table

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]

    @property
    def has_own_servers(self) -> bool:
        return self.entries is not stock_and_ours

    def parser(self) -> argparse.ArgumentParser:
        """Of the experiment alone."""
        found = argparse.ArgumentParser(
            prog=f"python -m {self.module}",
            description=self.doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_common(found, self.pool_tokens, self.running)
        self.add_own(found, RESULTS)
        return found

    def add_own(self, parser: argparse.ArgumentParser, results: Path) -> None:
        """Options that another experiment on the same servers may have otherwise."""
        add = parser.add_argument
        add("--repeats", type=int, default=1, help="runs, of which the median counts (%(default)s)")
        add("--csv", type=Path, default=results / f"{self.name}.csv", help="(%(default)s)")
        self.add_options(parser)


def add_common(
    parser: argparse.ArgumentParser, pool_tokens: int | None, running: int | None
) -> None:
    """Options of the servers, and of all that is measured on them; these are two defaults."""
    add = parser.add_argument
    add("--model", default="llama-3.1-8b", help="a shape, or with --cpu a folder (%(default)s)")
    add("--profile", choices=("fastkvzip", "keydiff"), default="fastkvzip", help="budgets")
    add("--plan", help="plan file instead of a profile's")
    add("--cpu", action="store_true", help="serve a small model on this CPU")
    add("--baselines", nargs="*", default=["flashinfer"], help="stock backends (%(default)s)")
    add("--retentions", type=retention, nargs="*", default=[1.0, 0.25])
    add("--settings", nargs="*", default=[], metavar="NAME=VALUE", help="TANGRAM_ ones, of ours")
    add("--pool-tokens", type=int, default=pool_tokens, help="stock's; same bytes (%(default)s)")
    add("--scale", type=float, default=1.0, help="of every length and of the pool (%(default)s)")
    add("--max-running", type=int, default=running, help="requests at once (%(default)s)")
    add("--context-length", type=int, default=131072)
    add("--at-once", type=int, default=3, help="servers in memory together (%(default)s)")
    add("--limit-s", type=float, default=0, help="start no run after so long; 0: no limit")
    add("--tolerance", type=float, default=gate.TOLERANCE, help="of the gate (%(default)s)")
    add("--logs", type=Path, help="folder of the servers' logs; default: thrown away")
