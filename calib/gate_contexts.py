"""Which tokens gates are trained on: pieces of texts, some texts held out."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from tangram_sglang.calib.texts import Text
from tangram_sglang.errors import TangramError

# tokens of a piece, at most and at least
LONGEST = 1024
SHORTEST = 128
# one text of so many is only measured on
HELD_OUT = 4


@dataclass(frozen=True, slots=True)
class Context:
    """A piece of a text.

    Attributes:
        name: of the text.
        ids: token ids.
        held_out: whether gates are measured on it, and not trained.
    """

    name: str
    ids: tuple[int, ...]
    held_out: bool


def contexts(texts: Sequence[Text], tokenizer: Any, samples: int) -> list[Context]:
    """At most ``samples`` pieces: the first of every text, then the second of every text, ..."""
    if len(texts) < HELD_OUT or samples < HELD_OUT:
        raise TangramError(
            f"{len(texts)} texts and --samples {samples}: expected at least {HELD_OUT} of both, of "
            "which one is held out to measure on"
        )
    pieces = []
    for i, text in enumerate(texts):
        ids = text.tokens(tokenizer)
        cut = [ids[start : start + LONGEST] for start in range(0, len(ids), LONGEST)]
        held_out = i % HELD_OUT == HELD_OUT - 1
        pieces.append([Context(text.name, tuple(x), held_out) for x in cut if len(x) >= SHORTEST])
    found = [x for x in chain.from_iterable(zip_longest(*pieces)) if x is not None][:samples]
    if len({x.held_out for x in found}) < 2:
        raise TangramError(
            f"the texts give {len(found)} pieces of at least {SHORTEST} tokens, and some are needed to "
            f"train on and some in every {HELD_OUT}th text to measure on: give longer texts"
        )
    return found
