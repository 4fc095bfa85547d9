"""What the demo tells its reader: each turn as text, two runs side by side, and the line of JSON."""

import textwrap
from dataclasses import asdict, dataclass

from tangram_sglang.cli.conversations import Answer
from tangram_sglang.cli.counters import Counters


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the chat, as the JSON line has it."""

    prompt_tokens: int
    cached_tokens: int
    entries_held: int
    bytes_held: int
    bytes_full: int
    latency_s: float
    answer: str

    @classmethod
    def of(cls, answer: Answer, held: Counters) -> "Turn":
        return cls(
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            entries_held=held.kv_entries,
            bytes_held=held.kv_bytes,
            bytes_full=held.kv_bytes_full,
            latency_s=round(answer.latency_s, 3),
            answer=answer.text,
        )


@dataclass(frozen=True, slots=True)
class SecondUser:
    """Another user's question about the same document, as the JSON line has it."""

    prompt_tokens: int
    cached_tokens: int
    latency_s: float

    @classmethod
    def of(cls, answer: Answer) -> "SecondUser":
        return cls(answer.prompt_tokens, answer.cached_tokens, round(answer.latency_s, 3))


@dataclass(frozen=True, slots=True)
class Run:
    """What one server did."""

    turns: list[Turn]
    second_user: SecondUser


def describe(answer: Answer, held: Counters | None = None) -> str:
    """One turn as a block of lines, with what it held where that is known."""
    lines = [_tokens(answer)]
    if held is not None:
        lines.append(
            f"  holds {held.kv_entries:,} entries in {_mib(held.kv_bytes)}; a full cache would hold "
            f"{_mib(held.kv_bytes_full)} ({held.kv_bytes / held.kv_bytes_full:.0%})"
        )
    lines.append(_wrap("Q", answer.question))
    lines.append(_wrap("A", answer.text))
    return "\n".join(lines)


def comparison(run: Run, uncompressed: Run) -> str:
    """A table of both runs, one line a turn, and the second user below it."""
    rows = ["turn   prompt   cached |  held MiB    full   share  latency |  uncompressed  latency"]
    for number, (turn, full) in enumerate(zip(run.turns, uncompressed.turns, strict=True), 1):
        rows.append(
            f"{number:4d} {turn.prompt_tokens:8,} {turn.cached_tokens:8,} | "
            f"{turn.bytes_held / 2**20:9.1f} {turn.bytes_full / 2**20:7.1f} "
            f"{turn.bytes_held / turn.bytes_full:7.1%} {turn.latency_s:6.1f} s | "
            f"{full.bytes_held / 2**20:9.1f} MiB {full.latency_s:6.1f} s"
        )
    rows.append(f"second user of the document: {_tokens(run.second_user)}")
    rows.append(f"  uncompressed: {_tokens(uncompressed.second_user)}")
    return "\n".join(rows)


def summary(asked: float, run: Run, uncompressed: Run) -> dict:
    """The JSON line: the figures of the asked retention, and beside them the uncompressed ones."""
    return {
        **_figures(asked, run),
        "uncompressed": _figures(1.0, uncompressed),
    }


def _figures(asked: float, run: Run) -> dict:
    last = run.turns[-1]
    return {
        "retention_asked": asked,
        "retention_held": round(last.bytes_held / last.bytes_full, 4),
        "turns": [asdict(turn) for turn in run.turns],
        "second_user": asdict(run.second_user),
    }


def _tokens(answer: Answer | SecondUser) -> str:
    return (
        f"{answer.prompt_tokens:,} prompt tokens, {answer.cached_tokens:,} of them cached, "
        f"{answer.latency_s:.1f} s"
    )


def _wrap(label: str, text: str) -> str:
    return textwrap.fill(
        text.strip(), width=96, initial_indent=f"  {label}: ", subsequent_indent="     "
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
