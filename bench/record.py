"""What a figure depends on beside the code, and the CSV files that keep figures."""

import csv
import datetime
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.smollm2 import ROOT

RESULTS = ROOT / "bench" / "results"


def machine(module: str) -> dict[str, str]:
    """Versions, machine, date and the command of the running ``python -m <module>``."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(": ", 1)[1] for line in cpuinfo if line.startswith("model name")]
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    described = subprocess.run(git, capture_output=True, text=True) if shutil.which("git") else None
    return {
        **{name: metadata.version(name) for name in ("tangram-sglang", "sglang", "torch")},
        "python": platform.python_version(),
        "git": (described.stdout.strip() if described else "") or "none",
        "cpu": models[0] if models else platform.processor(),
        "cores": str(len(models)),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"python -m {module} {shlex.join(sys.argv[1:])}".rstrip(),
    }


def append_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows of equal keys; the first ones bring the header. Other columns are an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(rows[0])
    if path.exists():
        with path.open(newline="") as file:
            found = next(csv.reader(file), [])
        if found != columns:
            raise ValueError(
                f"{path} has the columns {found}, expected {columns}: move it away or name another "
                "file with --out"
            )
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows(rows)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
