"""The calibration texts: mixed kinds, shipped or generated, the same everywhere, and their hash.

Knows tokenizers by two methods, ``__call__`` and ``apply_chat_template``, and imports none.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import chain, zip_longest
from typing import Any

from tangram_sglang.calib.generated import (
    Messages,
    json_log,
    markdown_table,
    measurements_csv,
    retrieval,
    support_chat,
)
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
    kinds = (
        [_plain("prose", name) for name in ("essay", "persuasion", "folklore", "northanger")],
        [_plain("code", name) for name in ("code_layout", "code_mixed", "code_server")],
        [
            Text("dialogue", "dialogue", _dialogue(_read("dialogue"))),
            Text("dialogue", "support_chat", support_chat(24)),
        ],
        [
            Text("table", "markdown_table", (("text", markdown_table(60)),)),
            Text("table", "json_log", (("text", json_log(60)),)),
            Text("table", "measurements_csv", (("text", measurements_csv(120)),)),
        ],
        [
            Text("retrieval", f"retrieval_{seed}", retrieval(seed, _paragraphs(name), 12))
            for seed, name in ((5, "essay"), (6, "folklore"), (7, "northanger"))
        ],
    )
    return [text for text in chain.from_iterable(zip_longest(*kinds)) if text is not None]


def corpus_hash(texts: Sequence[Text]) -> str:
    """sha256 of the texts in their order."""
    content = [[text.kind, text.name, text.messages] for text in texts]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def calibration_prompts(
    tokenizer: Any, rule: WindowRule, samples: int
) -> tuple[list[Text], list[list[int]]]:
    """As many texts as give ``samples`` windows, and their token ids.

    A text is cut where its last window is sealed.

    Args:
        tokenizer: of the model to calibrate.
        rule: W and R.
        samples: windows wanted; the last text may give a few more.
    """
    texts, prompts, windows = [], [], 0
    for text in corpus():
        if windows >= samples:
            break
        tokens = text.tokens(tokenizer)
        sealed = min(MAX_WINDOWS, rule.sealed(len(tokens)))
        if sealed:
            texts.append(text)
            prompts.append(tokens[: rule.epoch_end(sealed - 1) + 1])
            windows += sealed
    if windows < samples:
        raise TangramError(
            f"the calibration texts give {windows} windows of {rule.window} tokens, {samples} were "
            "asked for; lower --samples or --window"
        )
    return texts, prompts


def _read(name: str) -> str:
    return (CORPUS / f"{name}.txt").read_text(encoding="ascii")


def _plain(kind: str, name: str) -> Text:
    return Text(kind, name, (("text", _read(name)),))


def _paragraphs(name: str) -> list[str]:
    return _read(name).strip().split("\n\n")


def _dialogue(script: str) -> Messages:
    lines = [line for line in script.splitlines() if line]
    return tuple(tuple(line.split(": ", 1)) for line in lines)
