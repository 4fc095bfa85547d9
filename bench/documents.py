"""Eight documents of mixed kinds for measurements, none of them a calibration text.

They come from this project, from Python and from packages that SGLang needs, so nothing is
downloaded. Python's differ a little from version to version: results carry a hash of the tokens.
"""

import fractions
import hashlib
import heapq
import html.entities
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from pydoc_data.topics import topics

from bench.smollm2 import ROOT


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids of one text.

    Attributes:
        name: where it comes from.
        kind: prose, dialogue, manual, code or table.
    """

    name: str
    kind: str
    ids: tuple[int, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(",".join(map(str, self.ids)).encode()).hexdigest()[:12]


def _entities() -> str:
    # the table itself, without the code above it
    source = inspect.getsource(html.entities)
    return source[source.index("name2codepoint") :]


def _sglang_report() -> str:
    # SGLang's own sample of a long prompt: a government report, with \n written out
    text = (resources.files("sglang") / "test" / "long_prompt.txt").read_text(encoding="utf-8")
    return text.replace("\\n", "\n")


SOURCES: dict[tuple[str, str], Callable[[], str]] = {
    ("jargon file", "prose"): lambda: (
        resources.files("tangram_sglang.cli.texts") / "jargon_file.txt"
    ).read_text(encoding="ascii"),
    ("bench/texts/dialogue.txt", "dialogue"): (
        lambda: Path(ROOT / "bench" / "texts" / "dialogue.txt").read_text(encoding="utf-8")
    ),
    ("sglang long_prompt.txt", "prose"): _sglang_report,
    ("python topic formatstrings", "manual"): lambda: topics["formatstrings"],
    ("python topic typesseq", "manual"): lambda: topics["typesseq"],
    ("python heapq.py", "code"): lambda: inspect.getsource(heapq),
    ("python fractions.py", "code"): lambda: inspect.getsource(fractions),
    ("python html/entities.py", "table"): _entities,
}


def load(tokenizer, tokens: int, count: int = len(SOURCES)) -> list[Document]:
    """The first ``tokens`` tokens of the first ``count`` documents."""
    documents = []
    for (name, kind), read in list(SOURCES.items())[:count]:
        # the longest text has 5 characters a token; encoding all of it would only take longer
        ids = tokenizer(read()[: 8 * tokens]).input_ids[:tokens]
        if len(ids) < tokens:
            raise ValueError(f"{name} has {len(ids)} tokens, expected {tokens}: ask for fewer")
        documents.append(Document(name, kind, tuple(ids)))
    return documents
