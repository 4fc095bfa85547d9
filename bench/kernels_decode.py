"""Decode attention on one GPU against the fewest bytes it must read and FlashInfer.

One layer of a Llama-3.1-8B shape, its KV as the server lays it out. All 32 layers run one after the
other in a CUDA graph over a pool far larger than the L2 cache; a layer's time is a 32nd of the median
replay, the dispatch of the step, the KV write and the merge included. The floor is the bytes that must
be read over the copy bandwidth measured in the same run.
"""

from bench.kernel_table import KernelTable
from bench.llama import HEADS, LAYERS
from bench.scenes import Scene, graph_ms, programs_for
from tangram_sglang.plan.split_map import equal_splits, plan_splits

K = 1024
# 1K to 128K, each request 1.37 times as long as the one before
UNEQUAL = [int(K * 2 ** (7 * i / 15)) for i in range(16)]
DECODE = {
    "8x128K": ([128 * K] * 8, 0.25, 512),
    "32x32K": ([32 * K] * 32, 0.25, 512),
    "8x32K": ([32 * K] * 8, 0.25, 512),
    "unequal16": (UNEQUAL, 0.25, 512),
    "8x128K-W1024": ([128 * K] * 8, 0.25, 1024),
    "8x32K-W1024": ([32 * K] * 8, 0.25, 1024),
    "1x128K": ([128 * K], 0.25, 512),
    "64x4K": ([4 * K] * 64, 0.25, 512),
    "8x32K-rho1": ([32 * K] * 8, 1.0, 512),
}
# requests behind one document: lengths, retention, window, tokens of the document
SHARED = {
    "32x64K-shared": ([65 * K] * 32, 0.25, 512, 64 * K),
    "61x65K-shared-rho1": ([66 * K] * 61, 1.0, 512, 64 * K),
}


def shared_case(name: str, table: KernelTable, bandwidth: float) -> None:
    """One document read by four requests at a time, by two, and by each alone."""
    lengths, retention, window, document = SHARED[name]
    scene = Scene(lengths, retention, window, document // window)
    floor = scene.bytes_read() / bandwidth / LAYERS
    split_map = plan_splits(scene.shares, programs_for(scene), len(lengths))
    run = scene.step(split_map, together=4)
    error = scene.check(run)
    if not error < 1e-2:
        raise RuntimeError(f"{name}: decode is off by {error:.2e}; nothing to time")
    ms = graph_ms(run) / LAYERS
    row = f"decode {name}", len(lengths), max(lengths), retention, ms, floor
    table.add(*row, "", None)
    for baseline, together in (("two at a time", 2), ("each alone", 1)):
        table.add(*row, baseline, graph_ms(scene.step(split_map, together=together)) / LAYERS)


def decode_case(name: str, table: KernelTable, bandwidth: float, with_flashinfer: bool) -> None:
    """Ours, its other split maps, and FlashInfer on the full KV."""
    lengths, retention, window = DECODE[name]
    scene = Scene(lengths, retention, window)
    floor = scene.bytes_read() / bandwidth / LAYERS
    programs = programs_for(scene)
    batch = len(lengths)
    split_map = plan_splits(scene.shares, programs, batch)
    run = scene.step(split_map)
    error = scene.check(run)
    if not error < 1e-2:
        raise RuntimeError(f"{name}: decode is off by {error:.2e}; nothing to time")
    ms = graph_ms(run) / LAYERS

    def add(baseline="", baseline_ms=None):
        _add(table, name, ms, floor, baseline, baseline_ms)

    add()
    add("rigid split map", graph_ms(scene.step(split_map, stretched=False)) / LAYERS)
    equal = equal_splits((LAYERS, HEADS), programs, batch)
    add("equal splits", graph_ms(scene.step(equal, stretched=False)) / LAYERS)
    if with_flashinfer:
        from bench.flashinfer_decode import full_ms

        del scene, run
        add("flashinfer, full KV", full_ms(lengths))


def ragged_case(name: str, table: KernelTable) -> None:
    """FlashInfer on the same ragged KV, beside what ``decode_case`` found."""
    from bench.flashinfer_decode import Ragged

    lengths, retention, window = DECODE[name]
    scene = Scene(lengths, retention, window)
    scene.step(plan_splits(scene.shares, programs_for(scene), len(lengths)))()
    ragged = Ragged(scene)
    total, alone, difference = ragged.ms()
    if not difference < 2e-2:
        raise RuntimeError(f"{name}: FlashInfer's result differs by {difference:.2e}")
    mine = next(row for row in table.rows if row["case"] == f"decode {name}")
    ms, floor = float(mine["ms"]), float(mine["floor_ms"])
    _add(table, name, ms, floor, "flashinfer, same ragged KV, with its plan", total)
    _add(table, name, ms, floor, "flashinfer, same ragged KV, without its plan", alone)


def _add(table: KernelTable, name: str, ms, floor, baseline, baseline_ms) -> None:
    lengths, retention, _ = DECODE[name]
    case = f"decode {name}"
    table.add(case, len(lengths), max(lengths), retention, ms, floor, baseline, baseline_ms)
