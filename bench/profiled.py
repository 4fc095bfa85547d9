"""A load under the profiler of the server that carries it.

SGLang's client asks a server for ``/start_profile`` when the warm-up is over and its cache is empty, and
for ``/stop_profile`` after the last answer, so a trace is of the load alone. GPU activities are enough:
they have the launches too, which link a kernel to its graph, and no operator is slowed down.
"""

from collections.abc import Sequence
from pathlib import Path

from bench import trace
from bench.experiment import Bench
from tangram_sglang.cli.server import Server


def flags(folder: Path, activity: str = "GPU") -> list[str]:
    """Flags of `sglang.benchmark.serving` that have a load's trace written into ``folder``."""
    return [
        *("--profile", "--profile-activities", activity),
        *("--profile-output-dir", str(folder)),
    ]


def trace_file(folder: Path) -> Path:
    """The one trace below ``folder``; the client says nothing when a profiler did not start."""
    found = sorted(folder.rglob("*.trace.json.gz"))
    if len(found) != 1:
        raise RuntimeError(
            f"{len(found)} traces in {folder}, expected that of one GPU; the server's log says why "
            "(--logs)"
        )
    return found[0]


def load(
    now: Bench, server: Server, load_flags: Sequence[str], seed: int, folder: Path
) -> tuple[dict, trace.Breakdown]:
    """Put a load on a server: what the client writes of it, and where the GPU's time went.

    ``folder`` is new; the trace stays there. Times of the client have the writing of the trace in them.
    """
    # a profiler without any activity that the machine has brings SGLang's scheduler down
    activity = "CPU" if now.options.cpu else "GPU"
    result = now.load(server, [*load_flags, *flags(folder, activity)], seed)
    path = trace_file(folder)
    return result, trace.breakdown(trace.read(path), path)
