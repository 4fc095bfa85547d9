"""The `tangram` command: one module per subcommand, imported only when it is asked for.

A subcommand module has `add_arguments(parser)` and `run(arguments) -> exit status`, and raises
TangramError for a mistake of the user.
"""

import argparse
import importlib
import os
import select
import sys
from collections.abc import Sequence
from typing import NoReturn

from tangram_sglang import __version__
from tangram_sglang.errors import TangramError

COMMANDS = {
    "calibrate": "measure a model's heads and write plan files",
    "demo": "chat with a real server about a document, on compressed KV and uncompressed",
    "inspect": "show a plan's budgets, groups and memory",
    "plan": "show how the decode kernel shares out a plan's work on a GPU",
    "train-gate": "train the gates that scorer fastkvzip reads, for one model",
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is one `--help` away."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(prog="tangram", description="Tools of tangram_sglang.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == chosen:
            module = importlib.import_module(f"tangram_sglang.cli.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        # Python would flush once more in the end, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except TangramError as error:
        print(f"tangram {chosen}: error: {error}", file=sys.stderr)
        return 2


def _reader_has_gone() -> bool:
    """Whether it is our output that nobody reads any more, as behind `head`, and no other pipe."""
    output = select.poll()
    output.register(sys.stdout, 0)  # an error is reported unasked
    return any(event & select.POLLERR for _, event in output.poll(0))
