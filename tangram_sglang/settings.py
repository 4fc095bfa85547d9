"""Every ``TANGRAM_*`` environment variable is read here and nowhere else.

Environment variables and not command line flags: SGLang's argument parser takes no flags from
plugins, and the same settings must reach the scheduler processes that SGLang spawns.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tangram_sglang.errors import TangramError

GROUPINGS = ("global", "layer")
SPLITS = ("map", "equal")
RESERVES = ("budget", "uncompressed")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for; ``None`` leaves the choice to the plan or to SGLang.

    Attributes:
        plan: path of a plan file, or None for a uniform plan.
        retention: share of tokens kept, (0, 1].
        scorer: name of the scorer that picks tokens.
        gates: path of a gate file, for scorers that read gate scores; None takes the plan's.
        window: W, tokens per sealed window; a multiple of ``page``.
        recent: R, newest tokens that are never compressed.
        page: P, tokens per page.
        group_heads: H_p, KV heads that share a page table.
        sinks: first tokens of a request that every head keeps.
        grouping: ``global`` groups heads across layers, ``layer`` within one.
        splits: decode work by the split map (``map``), or as much for every head (``equal``), which
            is there to be compared with.
        reserve: what a prompt is admitted for: what it keeps (``budget``), or all of it until its end
            (``uncompressed``), which is there to be compared with (``plan.reclaim``).
        pool_bytes: bytes of KV pages; None takes SGLang's memory fraction.
        drift: share of windows that are compared with the calibration, [0, 1]; 0 compares none.
    """

    plan: str | None = None
    retention: float | None = None
    scorer: str | None = None
    gates: str | None = None
    window: int | None = None
    recent: int = 256
    page: int = 16
    group_heads: int = 4
    sinks: int = 4
    grouping: str = "global"
    splits: str = "map"
    reserve: str = "budget"
    pool_bytes: int | None = None
    drift: float = 0.0

    def __post_init__(self):
        if self.retention is not None and not 0.0 < self.retention <= 1.0:
            raise _bad(
                "RETENTION", self.retention, "a share of tokens to keep, above 0 and up to 1"
            )
        for name, low in (("window", 1), ("recent", 0), ("page", 1), ("group_heads", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise _bad(name.upper(), value, f"a whole number of at least {low}")
        if self.sinks < 0:
            raise _bad("SINKS", self.sinks, "a whole number of at least 0")
        if self.pool_bytes is not None and self.pool_bytes <= 0:
            raise _bad("POOL_BYTES", self.pool_bytes, "a positive number of bytes")
        if not 0.0 <= self.drift <= 1.0:
            raise _bad("DRIFT", self.drift, "a share of windows to look at, from 0 to 1")
        if self.grouping not in GROUPINGS:
            raise _bad("GROUPING", self.grouping, " or ".join(GROUPINGS))
        if self.splits not in SPLITS:
            raise _bad("SPLITS", self.splits, " or ".join(SPLITS))
        if self.reserve not in RESERVES:
            raise _bad("RESERVE", self.reserve, " or ".join(RESERVES))

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "Settings":
        """Read ``TANGRAM_*``; an unknown name or an unreadable value raises TangramError."""
        known = {f"TANGRAM_{name.upper()}": name for name in cls.__dataclass_fields__}
        values = {}
        for key, text in env.items():
            if not key.startswith("TANGRAM_") or key in _READ_ELSEWHERE or not text.strip():
                continue
            if key not in known:
                names = ", ".join(sorted([*known, *_READ_ELSEWHERE]))
                raise TangramError(f"{key} is not a setting of tangram_sglang; known: {names}")
            values[known[key]] = _parse(known[key], text.strip())
        return cls(**values)


def cpu_platform_requested(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the user opted into our CPU platform (``TANGRAM_CPU_PLATFORM=1``)."""
    return _switch("CPU_PLATFORM", env)


def observe_path(env: Mapping[str, str] = os.environ) -> str | None:
    """Where calibration wants the observations written (``TANGRAM_OBSERVE``), or None."""
    return env.get("TANGRAM_OBSERVE", "").strip() or None


_READ_ELSEWHERE = ("TANGRAM_CPU_PLATFORM", "TANGRAM_OBSERVE")
_INTEGERS = ("window", "recent", "page", "group_heads", "sinks", "pool_bytes")


def _switch(name: str, env: Mapping[str, str]) -> bool:
    text = env.get(f"TANGRAM_{name}", "0").strip()
    if text not in ("", "0", "1"):
        raise _bad(name, text, "0 or 1")
    return text == "1"


def _parse(name: str, text: str):
    try:
        if name in _INTEGERS:
            return int(text)
        return float(text) if name in ("retention", "drift") else text
    except ValueError:
        kind = "a whole number" if name in _INTEGERS else "a number"
        raise _bad(name.upper(), text, kind) from None


def _bad(name: str, value, expected: str) -> TangramError:
    return TangramError(f"TANGRAM_{name}={value}: expected {expected}; correct or unset it")
