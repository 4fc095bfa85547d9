"""SGLang's own client, ``python -m sglang.benchmark.serving``, run in this process.

Its import takes ten seconds, which every run would pay otherwise. It imports `datasets` for data sets
that are downloaded; none is used here, so an empty module stands in where that is not installed.
"""

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import shlex
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from bench.record import say
from tangram_sglang.cli.server import LOOPBACK

MODULE = "sglang.benchmark.serving"


def load() -> types.ModuleType:
    """The client; the first call takes ten seconds."""
    os.environ.update(LOOPBACK)  # for its requests, which would go through a proxy
    with stand_in("datasets", load_dataset=None):
        return importlib.import_module(MODULE)


@contextlib.contextmanager
def stand_in(name: str, **attributes: object) -> Iterator[None]:
    """An empty module while others are imported that need it, where it is not installed."""
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        yield
        return
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(attributes)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]


@contextlib.contextmanager
def arguments(argv: Sequence[str]) -> Iterator[None]:
    """What the client's command line would be; its output goes to our stderr."""
    # the client reports on stdout, which is for our table
    with mock.patch.object(sys, "argv", list(argv)), contextlib.redirect_stdout(sys.stderr):
        yield


def common_flags(url: str, model: Path, out: Path, seed: int) -> list[str]:
    """Flags of every load: one warm-up request, then an empty prefix cache."""
    return [
        *("--base-url", url, "--model", str(model), "--tokenizer", str(model)),
        *("--warmup-requests", "1", "--flush-cache", "--cache-report"),
        *("--output-file", str(out), "--output-details", "--disable-tqdm", "--seed", str(seed)),
    ]


def run(url: str, model: Path, load_flags: Sequence[str], scratch: Path, seed: int = 1) -> dict:
    """Put one load on the server; returns what the client writes of it.

    Raises RuntimeError when a request failed: a load that was not carried says nothing of speed.
    """
    client, out = load(), scratch / "client.jsonl"
    out.unlink(missing_ok=True)
    argv = [MODULE, *load_flags, *common_flags(url, model, out, seed)]
    say(f"python -m {shlex.join(argv)}")
    with arguments(argv):
        client.cli_main()
    result: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    if failed := [x for x in result["errors"] if x] or [None] * result["ttfts"].count(0.0):
        raise RuntimeError(
            f"{len(failed)} of {len(result['errors'])} requests failed or had no text; the first: "
            f"{failed[0]}"
        )
    return result


def random_load(requests: int, input_len: int, output_len: int, least: float = 1.0) -> list[str]:
    """Unrelated prompts of exact lengths, or of ``least`` x that to that, evenly; all at once."""
    return [
        *("--backend", "sglang", "--dataset-name", "random-ids", "--tokenize-prompt"),
        *("--num-prompts", str(requests), "--random-range-ratio", f"{least:g}"),
        *("--random-input-len", str(input_len), "--random-output-len", str(output_len)),
    ]


def shared_load(users: int, document: int, question: int, answer: int) -> list[str]:
    """One document, a question of each user; all at once."""
    return [
        *("--backend", "sglang", "--dataset-name", "generated-shared-prefix", "--tokenize-prompt"),
        *("--gsp-num-groups", "1", "--gsp-prompts-per-group", str(users)),
        *("--gsp-system-prompt-len", str(document), "--gsp-question-len", str(question)),
        *("--gsp-output-len", str(answer)),
        # generated prompts are kept in the home folder under a name that lacks the vocabulary,
        # unless requests carry such a key; servers ignore it
        "--gsp-send-routing-key",
    ]


def conversation_load(
    conversations: int, first: int, more: int, turns: int, answer: int
) -> list[str]:
    """Conversations that run side by side; a turn follows the answer to the one before.

    The first prompt has ``first`` tokens, every later turn adds ``more``.
    """
    return [
        *("--backend", "sglang-oai-chat", "--dataset-name", "generated-shared-prefix"),
        *("--gsp-num-groups", str(conversations), "--gsp-prompts-per-group", "1"),
        *("--gsp-system-prompt-len", str(first - more), "--gsp-question-len", str(more)),
        *("--gsp-num-turns", str(turns), "--gsp-output-len", str(answer), "--gsp-ordered"),
    ]
