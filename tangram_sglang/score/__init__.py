"""Scorers by name; third parties add one through the entry point group tangram_sglang.scorers."""

from importlib.metadata import entry_points

from tangram_sglang.errors import TangramError
from tangram_sglang.score.base import QueryStats, Scorer, Window
from tangram_sglang.score.expected_attention import ExpectedAttention
from tangram_sglang.score.keydiff import KeyDiff
from tangram_sglang.score.random import Random
from tangram_sglang.score.streaming import Streaming

ENTRY_POINTS = "tangram_sglang.scorers"

SCORERS: dict[str, type[Scorer]] = {
    "expected_attention": ExpectedAttention,
    "keydiff": KeyDiff,
    "random": Random,
    "streaming": Streaming,
}


def create_scorer(name: str) -> Scorer:
    """The scorer called ``name``; TangramError lists the known ones."""
    if name in SCORERS:
        return SCORERS[name]()
    external = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if name in external:
        return external[name].load()()
    known = ", ".join(sorted([*SCORERS, *external]))
    raise TangramError(
        f"unknown scorer {name!r}; known: {known}; set TANGRAM_SCORER to one of them"
    )


__all__ = ["ENTRY_POINTS", "SCORERS", "QueryStats", "Scorer", "Window", "create_scorer"]
