"""Servers that are started together and measured in turn; they differ in the backend's flags only.

A server that waits for its turn is idle. Stock SGLang and ours get KV pools of the same bytes, at every
retention: ``--max-total-tokens`` for the one, ``TANGRAM_POOL_BYTES`` for the other. (Beside its pool
stock SGLang has a table of token indices, which its limit does not count; our page table is not counted
either. Both are a few bytes a token of ``--context-length`` and row.)
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.record import say
from tangram_sglang.cli.server import READY_TIMEOUT_S, Server

OURS = "tangram"


@dataclass(frozen=True)
class Entry:
    """One server: its name in the tables, and the flags and variables that make it different."""

    name: str
    flags: tuple[str, ...]
    settings: Mapping[str, str]

    @property
    def stock(self) -> bool:
        return OURS not in self.flags

    @property
    def retention(self) -> float:
        """Share of tokens kept; of stock SGLang 1."""
        return float(self.settings.get("TANGRAM_RETENTION", 1))


@dataclass(frozen=True)
class Pool:
    """Bytes of KV that every server gets.

    Attributes:
        tokens: that stock SGLang holds in them.
        token_bytes: K and V of one token, over all layers.
    """

    tokens: int
    token_bytes: int

    @property
    def bytes(self) -> int:
        return self.tokens * self.token_bytes


def stock(backend: str, pool: Pool) -> Entry:
    """SGLang with an attention backend of its own."""
    return Entry(
        backend, ("--attention-backend", backend, "--max-total-tokens", str(pool.tokens)), {}
    )


def ours(
    retention: float, plan: Path | None, pool: Pool, name: str = "", **settings: object
) -> Entry:
    """Our backend; ``settings`` are further TANGRAM_ variables, without the prefix."""
    found = {
        "TANGRAM_RETENTION": f"{retention:g}",
        "TANGRAM_POOL_BYTES": str(pool.bytes),
        **({} if plan is None else {"TANGRAM_PLAN": str(plan)}),
        **{f"TANGRAM_{key.upper()}": str(value) for key, value in settings.items()},
    }
    return Entry(name or f"{OURS} {retention:g}", ("--attention-backend", OURS), found)


class Fleet:
    """Context manager: starts all servers on entry, and on exit asks all to stop at once."""

    def __init__(
        self,
        entries: Sequence[Entry],
        shared: Sequence[str],
        environment: Mapping[str, str],
        logs: Path,
    ):
        """``shared``: flags of every server. ``environment``: of every server, without settings."""
        logs.mkdir(parents=True, exist_ok=True)
        self.entries = tuple(entries)
        self.servers = [
            Server(
                [*shared, *entry.flags],
                {**environment, **entry.settings},
                logs / f"server-{entry.name.replace(' ', '-')}.log",
            )
            for entry in entries
        ]

    def __iter__(self) -> Iterator[tuple[Entry, Server]]:
        return zip(self.entries, self.servers, strict=True)

    def __enter__(self) -> "Fleet":
        with contextlib.ExitStack() as stack:
            for entry, server in self:
                shown = "".join(f"{name}={value} " for name, value in entry.settings.items())
                say(f"{entry.name}: {shown}{server.command_line}")
                stack.enter_context(server)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, Exception):
            for entry, server in self:
                say(f"--- {entry.name}: last lines of its log\n{server.log_tail(15)}\n---")
        for server in self.servers:
            server.ask_to_stop()
        self._stack.close()

    def wait_until_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        for entry, server in self:
            say(f"{entry.name}: ready after {server.wait_until_ready(timeout_s):.0f} s more")


def groups(entries: Sequence[Entry], at_once: int) -> Iterator[Sequence[Entry]]:
    """Entries in their order, as many together as fit into memory."""
    for at in range(0, len(entries), at_once):
        yield entries[at : at + at_once]
