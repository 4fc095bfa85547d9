"""Where a command is to write, checked before it measures for minutes."""

import os
from pathlib import Path

from tangram_sglang.errors import TangramError


def check_folder(option: str, asked: Path, folder: Path) -> None:
    """Refuse ``option`` with the value ``asked`` unless files can be written to ``folder``, once made."""
    there = next(x for x in (folder.absolute(), *folder.absolute().parents) if x.exists())
    if not there.is_dir():
        raise TangramError(f"{option} {asked}: {there} is a file, expected a folder; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise TangramError(f"{option} {asked}: {there} cannot be written to; name another folder")
