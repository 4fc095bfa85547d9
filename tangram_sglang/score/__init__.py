"""Scorers by name; third parties add one through the entry point group tangram_sglang.scorers."""

from importlib.metadata import EntryPoint, entry_points

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


def known_scorers() -> list[str]:
    """Names of ours and of installed packages'."""
    return sorted({*SCORERS, *_external()})


def _external() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def create_scorer(name: str, asked_by: str = "TANGRAM_SCORER") -> Scorer:
    """The scorer called ``name``; TangramError lists the known ones, for the setting ``asked_by``."""
    if name in SCORERS:
        scorer = SCORERS[name]()
    elif name in (external := _external()):
        scorer = external[name].load()()
    else:
        raise TangramError(
            f"unknown scorer {name!r}; known: {', '.join(known_scorers())}; set {asked_by} to one of "
            "them"
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
    "known_scorers",
]
