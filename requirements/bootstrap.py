"""Creates .venv with everything that the demo, the tests and the CPU benchmark need.

    python3 requirements/bootstrap.py

Needs Python and its standard library only. Does nothing when .venv already matches the requirement
files: a stamp in it holds their hash.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "requirements.sha256"
VERSIONS = ((3, 11), (3, 12))

REQUIREMENTS = ROOT / "requirements"
STUB = REQUIREMENTS / "torchvision_stub"
INPUTS = (
    REQUIREMENTS / "cpu.txt",
    REQUIREMENTS / "torch.txt",
    REQUIREMENTS / "no-deps.txt",
    STUB / "pyproject.toml",
    STUB / "torchvision" / "__init__.py",
    ROOT / "pyproject.toml",
    Path(__file__).resolve(),
)


class SetupError(Exception):
    """The environment cannot be made; the message says what to do."""


def main() -> int:
    try:
        wanted = fingerprint()
        if STAMP.exists() and STAMP.read_text() == wanted and VENV_PYTHON.exists():
            return 0
        make_venv()
        install()
        STAMP.write_text(wanted)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def fingerprint() -> str:
    """The hash of all that decides what is in .venv. An editable install remembers its folder, so
    that counts too: a copied or moved repository is set up again."""
    digest = hashlib.sha256(str(ROOT).encode())
    for path in INPUTS:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def make_venv() -> None:
    if version_of(str(VENV_PYTHON)) in VERSIONS:
        return
    python = find_python()
    say(f"creating {VENV} with {python}")
    ensure_venv_module(python)
    run([python, "-m", "venv", "--clear", str(VENV)])


def find_python() -> str:
    """The running interpreter if SGLang supports it, else another one on PATH."""
    names = ["python{}.{}".format(*version) for version in reversed(VERSIONS)]
    for candidate in [sys.executable, *filter(None, map(shutil.which, names))]:
        if version_of(candidate) in VERSIONS:
            return candidate
    raise SetupError(
        "{} is Python {}.{}, expected 3.11 or 3.12, and neither {} is on PATH: install one and "
        "name it, as in `make test PYTHON=/path/to/python3.12`".format(
            sys.executable, *sys.version_info[:2], " nor ".join(names)
        )
    )


def version_of(python: str) -> tuple[int, int] | None:
    """(major, minor), or None where `python` is missing or does not run (a pyenv shim may not)."""
    if python == sys.executable:
        return sys.version_info[:2]
    command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        major, minor = out.split()
        return int(major), int(minor)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def ensure_venv_module(python: str) -> None:
    """Debian and Ubuntu keep ensurepip, which venv needs, in a package of its own."""
    if has_ensurepip(python):
        return
    package = "python{}.{}-venv".format(*version_of(python))
    commands = [["apt-get", "update"], ["apt-get", "install", "-y", package]]
    if os.geteuid() == 0 and shutil.which("apt-get"):
        say(f"installing {package}, which {python} lacks")
        for command in commands:
            run(command, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
        if has_ensurepip(python):
            return
    raise SetupError(
        f"{python} has no ensurepip, so it cannot create {VENV}: run "
        f"`sudo apt-get update && sudo apt-get install -y {package}` and try again"
    )


def has_ensurepip(python: str) -> bool:
    if python == sys.executable:
        importlib.invalidate_caches()
        return importlib.util.find_spec("ensurepip") is not None
    return subprocess.run([python, "-c", "import ensurepip"], capture_output=True).returncode == 0


def install() -> None:
    pip = [str(VENV_PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]
    # cpu.txt has setuptools, so the two packages of this repository need no build environment
    local = [*pip, "--no-deps", "--no-build-isolation"]
    steps = [
        ("libraries", [*pip, "--no-deps", "-r", str(REQUIREMENTS / "cpu.txt")]),
        ("torch", [*pip, "-r", str(REQUIREMENTS / "torch.txt")]),
        ("triton, sglang", [*pip, "--no-deps", "-r", str(REQUIREMENTS / "no-deps.txt")]),
        ("tangram_sglang", [*local, "-e", str(ROOT)]),
    ]
    if not has_torchvision():
        steps.append(("stand-in for torchvision", [*local, str(STUB)]))
    for number, (name, command) in enumerate(steps, 1):
        say(f"[{number}/{len(steps)}] installing {name}")
        run(command)


def has_torchvision() -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torchvision') is None)"
    return subprocess.run([str(VENV_PYTHON), "-c", code]).returncode == 0


def run(command: list[str], env: dict[str, str] | None = None) -> None:
    if subprocess.run(command, env=env).returncode:
        raise SetupError(f"this command failed (its output is above): {' '.join(command)}")


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
