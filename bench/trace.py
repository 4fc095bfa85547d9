"""GPU time by class of work, from a trace of torch's profiler.

Time in which any kernel or copy runs is busy and counts once: what overlaps goes to the one that began
first. A gap between two kernels of one launch of a CUDA graph is the GPU's own; in all others it waits
for the host, if only for the next launch. The span is that from the first kernel to the end of the last.
"""

import gzip
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bench.kernel_classes import (
    CLASSES,
    DECODE_ATTENTION,
    OTHER,
    PREFILL_ATTENTION,
    work_of,
)

GRAPH_GAPS = "gaps in graphs"
IDLE = "waiting for the host"
ROWS = (*CLASSES, GRAPH_GAPS, IDLE)
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")


class NoKernels(RuntimeError):
    """A trace without GPU kernels."""


class Args(msgspec.Struct, gc=False):
    """Of an event: what links a kernel to its launch."""

    correlation: int = 0
    graph: int = msgspec.field(name="graph id", default=0)


class Event(msgspec.Struct, gc=False):
    """Of a trace; times in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0
    dur: float = 0
    args: Args | None = None

    @property
    def correlation(self) -> int:
        return self.args.correlation if self.args else 0


class Trace(msgspec.Struct):
    """A file of torch's profiler."""

    events: list[Event] = msgspec.field(name="traceEvents")


@dataclass
class Breakdown:
    """Where the time of a span went, in milliseconds.

    Attributes:
        ms: by ``ROWS``; adds up to ``span_ms``.
        launches: kernels and copies by class.
        names: time by class and kernel.
        graphs: launches of CUDA graphs.
        misplaced: kernels of decode outside of graphs, and of prefill inside.
    """

    span_ms: float = 0
    ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ROWS, 0.0))
    launches: Counter[str] = field(default_factory=Counter)
    names: dict[str, Counter[str]] = field(default_factory=lambda: {x: Counter() for x in CLASSES})
    graphs: int = 0
    misplaced: Counter[str] = field(default_factory=Counter)

    def share(self, row: str) -> float:
        return self.ms[row] / self.span_ms

    def largest(self, work: str, count: int = 5) -> Mapping[str, float]:
        """The kernels that took most of a class, and their milliseconds."""
        return dict(self.names[work].most_common(count))


def read(path: Path) -> list[Event]:
    """The events of a ``.json`` or ``.json.gz``."""
    data = path.read_bytes()
    data = gzip.decompress(data) if path.suffix == ".gz" else data
    return msgspec.json.decode(data, type=Trace, strict=False).events


def breakdown(events: Iterable[Event], source: object = "the trace") -> Breakdown:
    """Raises NoKernels where nothing ran on a GPU; ``source`` is for that message."""
    found, gpu, graphs, kinds = Breakdown(), [], set(), Counter()
    for event in events:
        if event.ph != "X":
            continue
        kinds[event.cat] += 1
        if event.cat in ON_GPU:
            gpu.append(event)
        elif event.name.startswith(GRAPH_LAUNCHES):
            graphs.add(event.correlation)
    if not kinds["kernel"]:
        had = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()) or "none"
        raise NoKernels(
            f"no GPU kernel in {source} (events: {had}); expected those of a server on a CUDA device, "
            'profiled with the activity "GPU"'
        )
    gpu.sort(key=lambda event: event.ts)
    end, last = gpu[0].ts, None
    for event in gpu:
        graph = event.correlation if _in_graph(event, graphs) else None
        if (gap := event.ts - end) > 0:
            found.ms[GRAPH_GAPS if graph is not None and graph == last else IDLE] += gap / 1e3
        over = max(0.0, event.ts + event.dur - max(end, event.ts)) / 1e3
        work = _place(event, graph is not None, found)
        found.ms[work] += over
        found.names[work][event.name] += over
        found.launches[work] += 1
        end, last = max(end, event.ts + event.dur), graph
    found.span_ms = (end - gpu[0].ts) / 1e3
    found.graphs = len({e.correlation for e in gpu if _in_graph(e, graphs)})
    return found


def _in_graph(event: Event, graphs: set[int]) -> bool:
    return event.args is not None and (event.args.graph > 0 or event.args.correlation in graphs)


def _place(event: Event, in_graph: bool, found: Breakdown) -> str:
    work = work_of(event.name) if event.cat == "kernel" else None
    if isinstance(work, tuple):
        return work[in_graph]
    if work == (PREFILL_ATTENTION if in_graph else DECODE_ATTENTION):
        found.misplaced[event.name] += 1
    return work or OTHER
