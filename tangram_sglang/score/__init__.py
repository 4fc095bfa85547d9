"""Scorers by name; third parties add one through the entry point group tangram_sglang.scorers."""

from importlib.metadata import entry_points

from tangram_sglang.errors import TangramError
from tangram_sglang.score.base import NEEDS, QueryStats, ReadsQueries, Scorer, Window
from tangram_sglang.score.expected_attention import ExpectedAttention
from tangram_sglang.score.expected_attention_local import ExpectedAttentionLocal
from tangram_sglang.score.fastkvzip import FastKVzip
from tangram_sglang.score.keydiff import KeyDiff
from tangram_sglang.score.knorm import KNorm
from tangram_sglang.score.random import Random
from tangram_sglang.score.snapkv import SnapKV
from tangram_sglang.score.streaming import Streaming
from tangram_sglang.score.tova import Tova

ENTRY_POINTS = "tangram_sglang.scorers"

SCORERS: dict[str, type[Scorer]] = {
    "expected_attention": ExpectedAttention,
    "expected_attention_local": ExpectedAttentionLocal,
    "fastkvzip": FastKVzip,
    "keydiff": KeyDiff,
    "knorm": KNorm,
    "random": Random,
    "snapkv": SnapKV,
    "streaming": Streaming,
    "tova": Tova,
}


def create_scorer(name: str) -> Scorer:
    """The scorer called ``name``; TangramError lists the known ones."""
    external = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if name in SCORERS:
        scorer = SCORERS[name]()
    elif name in external:
        scorer = external[name].load()()
    else:
        known = ", ".join(sorted([*SCORERS, *external]))
        raise TangramError(
            f"unknown scorer {name!r}; known: {known}; set TANGRAM_SCORER to one of them"
        )
    if unknown := scorer.needs - NEEDS:
        raise TangramError(
            f"scorer {name} needs {', '.join(sorted(unknown))}, expected some of "
            f"{', '.join(sorted(NEEDS))}: it was written for another version of tangram_sglang"
        )
    return scorer


__all__ = [
    "ENTRY_POINTS",
    "NEEDS",
    "SCORERS",
    "QueryStats",
    "ReadsQueries",
    "Scorer",
    "Window",
    "create_scorer",
]
