"""`tangram demo`: a chat with a real server, on compressed KV and then uncompressed.

For the asked retention and once more for 1.0 it starts SGLang with the tangram backend on this CPU,
runs an SGLang frontend program and an OpenAI chat about a document, has a second user ask about the
same document, and reads from the server what each turn held and found in the cache. Everything for
the reader goes to stderr; stdout gets one line of JSON.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from tangram_sglang.cli import counters
from tangram_sglang.cli.conversations import TURN_TIMEOUT_S, frontend_program, openai_chat
from tangram_sglang.cli.report import Run, SecondUser, Turn, comparison, describe, summary
from tangram_sglang.cli.retention import retention
from tangram_sglang.cli.server import LOOPBACK, Server, cpu_arguments, cpu_environment
from tangram_sglang.errors import TangramError

BACKEND = "tangram"
MODEL = Path("build/models/SmolLM2-135M-Instruct")
PLANS = resources.files("tangram_sglang") / "plans"
PLAN_NAME = re.compile(r"smollm2-135m-instruct-rho(?P<rho>[0-9.]+)\.json")
TEXTS = "tangram_sglang.cli.texts"
DOCUMENT = "jargon_file.txt"
MAX_TOKENS = 48

PROGRAM_QUESTIONS = (
    "What is this document about?",
    "Name one thing that hackers enjoy, according to the document.",
)
CHAT_QUESTIONS = (
    "Who began the Jargon File, and in which year?",
    "At which university was it begun?",
    "Which book came out in 1983, and who edited it?",
    "What happened to the File after that book was published?",
    "What does the document say the word 'techspeak' means?",
)
SECOND_USERS_QUESTION = "What do hackers love, according to the document, and why?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--retention", type=retention, default=0.5, help="share of tokens kept, (0, 1] (0.5)"
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="model folder (%(default)s)")
    parser.add_argument(
        "--plan", type=Path, help="plan file (the shipped one nearest in retention)"
    )


def run(arguments: argparse.Namespace) -> int:
    if not (arguments.model / "config.json").is_file():
        raise TangramError(
            f"no model in {arguments.model}: expected a Hugging Face model folder; "
            "run `make model` or name another one with --model"
        )
    plan = arguments.plan or nearest_plan(PLANS, arguments.retention)
    # SIGINT too: Python leaves it ignored in a process that a shell script put in the background
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit_on_signal)
    os.environ.update(LOOPBACK)
    logs = Path(tempfile.mkdtemp(prefix="tangram-demo-"))
    runs = []
    for share in (arguments.retention, 1.0):
        settings = {"TANGRAM_PLAN": str(plan), "TANGRAM_RETENTION": str(share)}
        server = Server(
            cpu_arguments(arguments.model, BACKEND),
            # SGLang leaves sockets and empty folders behind in its temporary folder
            cpu_environment({**settings, "TMPDIR": str(logs)}),
            logs / f"server-{len(runs)}.log",
        )
        _say(f"\n=== retention {share:g}\n{shlex.join(f'{k}={v}' for k, v in settings.items())}")
        try:
            with server:
                try:
                    runs.append(serve(server))
                except Exception as error:
                    _report(server, error)
                    return 1
        except SystemExit:
            _say("\ninterrupted; the server is stopped")
            raise
    shutil.rmtree(logs)
    _say(f"\n{comparison(*runs)}")
    print(json.dumps(summary(arguments.retention, *runs)), flush=True)
    return 0


def nearest_plan(folder: Traversable, share: float) -> Path:
    """The plan file in `folder` that was made for the retention closest to `share`."""
    plans = {
        float(match["rho"]): entry
        for entry in (folder.iterdir() if folder.is_dir() else ())
        if (match := PLAN_NAME.fullmatch(entry.name))
    }
    if not plans:
        raise TangramError(
            f"no plan for SmolLM2 in {folder}: expected smollm2-135m-instruct-rho0.5.json or the "
            "like; install tangram_sglang again or name a plan with --plan"
        )
    return Path(str(plans[min(plans, key=lambda rho: abs(rho - share))]))


def serve(server: Server) -> Run:
    """All conversations with one server, printed as they go."""
    document = (resources.files(TEXTS) / DOCUMENT).read_text(encoding="ascii")
    _say(f"{server.command_line}\nstarting (30 s or more) ...")
    _say(f"ready after {server.wait_until_ready():.0f} s; log: {server.log}")

    _say("\n--- SGLang frontend program")
    before = counters.read(server.url)
    with server.deadline(TURN_TIMEOUT_S * len(PROGRAM_QUESTIONS)):
        for answer in frontend_program(server.url, document, PROGRAM_QUESTIONS, MAX_TOKENS):
            _say(describe(answer))
    before += counters.wait_for(server.url, before, len(PROGRAM_QUESTIONS))

    _say("\n--- OpenAI client")
    turns = []
    for answer in openai_chat(server.url, document, CHAT_QUESTIONS, MAX_TOKENS):
        held = counters.wait_for(server.url, before)
        before += held
        turns.append(Turn.of(answer, held))
        _say(f"turn {len(turns)} of {len(CHAT_QUESTIONS)}: {describe(answer, held)}")

    _say("\n--- a second user, about the same document")
    [answer] = openai_chat(server.url, document, [SECOND_USERS_QUESTION], MAX_TOKENS)
    _say(describe(answer, counters.wait_for(server.url, before)))
    return Run(turns, SecondUser.of(answer))


def _report(server: Server, error: Exception) -> None:
    end = server.end if server.end and server.end not in str(error) else ""
    _say(f"\nerror: {type(error).__name__}: {error}\n{end}".rstrip())
    _say(f"--- last lines of {server.log}\n{server.log_tail()}\n---")


def _exit_on_signal(number: int, frame) -> None:
    raise SystemExit(128 + number)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
