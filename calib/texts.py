"""The calibration texts: mixed kinds, shipped or generated, the same everywhere, and their hash.

Knows tokenizers by two methods, ``__call__`` and ``apply_chat_template``, and imports none.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from tangram_sglang.calib.generated import (
    Messages,
    json_log,
    markdown_table,
    measurements_csv,
    retrieval,
    support_chat,
)
from tangram_sglang.calib.generated_more import letters, minutes, record_classes, sql_script
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.window import WindowRule

CORPUS = resources.files("tangram_sglang.calib") / "corpus"
# of one text, so that none outweighs the others
MAX_WINDOWS = 5


@dataclass(frozen=True, slots=True)
class Text:
    """One calibration text.

    Attributes:
        kind: prose, code, table, dialogue or retrieval.
        name: what it is called in messages.
        messages: (role, content); a single one of role ``text`` is plain text.
    """

    kind: str
    name: str
    messages: Messages

    def tokens(self, tokenizer: Any) -> list[int]:
        """Token ids; chats in the model's chat format, where it has one."""
        if self.messages[0][0] == "text":
            return tokenizer(self.messages[0][1]).input_ids
        if tokenizer.chat_template is None:
            return tokenizer("\n\n".join(f"{r}: {c}" for r, c in self.messages)).input_ids
        chat = [{"role": role, "content": content} for role, content in self.messages]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False)
        return tokenizer(rendered, add_special_tokens=False).input_ids


def corpus() -> list[Text]:
    """All texts; their kinds alternate, so that any beginning of the list is mixed."""
    first = (
        [_plain("prose", name) for name in ("essay", "persuasion", "folklore", "northanger")],
        [_plain("code", name) for name in ("code_layout", "code_mixed", "code_server")],
        [
            Text("dialogue", "dialogue", _dialogue(_read("dialogue"))),
            Text("dialogue", "support_chat", support_chat(24)),
        ],
        [
            _text("table", "markdown_table", markdown_table(60)),
            _text("table", "json_log", json_log(60)),
            _text("table", "measurements_csv", measurements_csv(120)),
        ],
        [_retrieval(5, "essay"), _retrieval(6, "folklore"), _retrieval(7, "northanger")],
    )
    more = (
        [_text("prose", "letters", letters(11, 14)), _text("prose", "minutes", minutes(12, 13))],
        [
            _text("code", "sql_script", sql_script(13, 10)),
            _text("code", "record_classes", record_classes(14, 18)),
        ],
        [Text("dialogue", "support_chat_2", support_chat(24, seed=15))],
        [
            _text("table", "measurements_csv_2", measurements_csv(120, seed=16)),
            _text("table", "markdown_table_2", markdown_table(80, seed=17)),
        ],
        [_retrieval(8, "persuasion"), _retrieval(9, "essay")],
    )
    both = [chain.from_iterable(zip_longest(*kinds)) for kinds in (first, more)]
    return [text for text in chain(*both) if text is not None]


def corpus_hash(texts: Sequence[Text]) -> str:
    """sha256 of the texts in their order."""
    content = [[text.kind, text.name, text.messages] for text in texts]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def calibration_prompts(
    tokenizer: Any,
    rule: WindowRule,
    samples: int,
    texts: Sequence[Text] | None = None,
    followed: bool = False,
    behind: bool = False,
) -> tuple[list[Text], list[list[int]]]:
    """As many texts as give every profile ``samples`` windows, and their token ids.

    A text is cut where its last window is sealed, or where it has been ``followed`` by W tokens that
    see it sealed, if the text is that long.

    Args:
        tokenizer: of the model to calibrate.
        rule: W and R.
        samples: windows wanted; the last text may give a few more.
        texts: to choose from, in this order; the corpus by default.
        followed: whether a profile needs the W tokens behind a sealed window too; a last window
            without them does not count.
        behind: whether a profile leaves out the window that begins a text.
    """
    chosen, prompts = [], []
    # windows of a profile that counts all, and of the two kinds that do not
    counts = [0, 0, 0]
    for text in corpus() if texts is None else texts:
        if min(counts) >= samples:
            break
        tokens = text.tokens(tokenizer)
        sealed = min(MAX_WINDOWS, rule.sealed(len(tokens)))
        if sealed:
            chosen.append(text)
            end = rule.epoch_end(sealed) if followed else rule.epoch_end(sealed - 1) + 1
            prompts.append(tokens[:end])
            left_out = 0, behind, followed and len(tokens) < end
            counts = [n + sealed - x for n, x in zip(counts, left_out, strict=True)]
    if min(counts) < samples:
        raise TangramError(
            f"the calibration texts give {min(counts)} windows of {rule.window} tokens (at most "
            f"{MAX_WINDOWS} a text, and {rule.recent + followed * rule.window} tokens must follow "
            f"each), {samples} were asked for; lower --samples or --window, or give more and longer "
            "texts"
        )
    return chosen, prompts


def texts_in(folder: Path) -> list[Text]:
    """The files *.txt in ``folder`` and below, in the order of their names.

    A file's kind is the name of the folder it lies in below ``folder``, or ``text``.
    """
    if not folder.is_dir():
        raise TangramError(f"--texts {folder}: no such folder; expected one with *.txt files")
    texts = []
    for path in sorted(folder.rglob("*.txt")):
        name = path.relative_to(folder)
        try:
            content = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise TangramError(
                f"--texts {folder}: {name} is not UTF-8 (byte {error.start}); convert or remove it"
            ) from None
        except OSError as error:
            raise TangramError(f"--texts {folder}: {name}: {error.strerror}") from None
        kind = name.parts[0] if len(name.parts) > 1 else "text"
        if content.strip():
            texts.append(_text(kind, name.as_posix(), content))
    if not texts:
        raise TangramError(
            f"--texts {folder}: no file *.txt with anything in it; expected plain texts in UTF-8"
        )
    return texts


def _read(name: str) -> str:
    return (CORPUS / f"{name}.txt").read_text(encoding="ascii")


def _plain(kind: str, name: str) -> Text:
    return _text(kind, name, _read(name))


def _text(kind: str, name: str, content: str) -> Text:
    return Text(kind, name, (("text", content),))


def _retrieval(seed: int, filler: str) -> Text:
    return Text("retrieval", f"retrieval_{seed}", retrieval(seed, _paragraphs(filler), 12))


def _paragraphs(name: str) -> list[str]:
    return _read(name).strip().split("\n\n")


def _dialogue(script: str) -> Messages:
    lines = [line for line in script.splitlines() if line]
    return tuple(tuple(line.split(": ", 1)) for line in lines)
