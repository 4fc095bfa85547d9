"""Prefill attention and sealing on a GPU, as rows of the table of ``bench/kernels.py``.

    python -m bench.kernels_prefill      # block sizes only, the fastest last

Times are medians of rounds over all layers of one chunk, per layer; every layer reads other pages,
so L2 is not warm. The floor of attention is its arithmetic at the rate of a large bf16 product
measured in the same run; that of sealing, the bytes it must read and write at copy bandwidth.
FlashInfer gets the whole KV as one dense tensor.
"""

import itertools
import statistics
import time

import numpy as np
import torch

from bench.chunks import Chunk, check
from bench.kernel_table import KernelTable
from bench.llama import DIM, DTYPE, HEADS, HIDDEN, INNER, LAYERS, RATIO, SINKS
from tangram_sglang.kernels.prefill import Config, prefill_attention
from tangram_sglang.kernels.prefill_hopper import HopperConfig, prefill_attention_hopper
from tangram_sglang.kernels.prefill_split import Split, split_counts
from tangram_sglang.kernels.raw_write import raw_write
from tangram_sglang.kernels.score_expected_attention import (
    expected_queries,
    score_expected_attention,
)
from tangram_sglang.kernels.score_keydiff import score_keydiff
from tangram_sglang.kernels.seal_write import seal_write
from tangram_sglang.kernels.select import select
from tangram_sglang.kernels.tails import copy_pages

TOKENS = 8192
RANK = 4


def timed(work, rounds: int = 5, warm: int = 1) -> float:
    """Median milliseconds of ``work``."""
    for _ in range(warm):
        work()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def captured(work, rounds: int = 9) -> float:
    """Median milliseconds of ``work`` as a CUDA graph, without the gaps between launches."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return timed(graph.replay, rounds)


def ceilings() -> tuple[float, float]:
    """(FLOP/s of a bf16 product, bytes/s of a copy), measured now."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=DTYPE) for _ in range(2))
    flops = 2 * 8192**3 / timed(lambda: a @ b, 9) * 1e3
    x = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return flops, 2 * x.numel() / timed(lambda: y.copy_(x), 9) * 1e3


def attention_once(chunk: Chunk, chosen=None, layers=None, split=None):
    """Launch some layers, or all."""
    run = prefill_attention_hopper if isinstance(chosen, HopperConfig) else prefill_attention
    for i in range(len(chunk.heads)) if layers is None else layers:
        run(
            chunk.q,
            chunk.k,
            chunk.v,
            chunk.out,
            chunk.pool,
            chunk.table,
            chunk.old,
            chunk.tiles,
            chunk.heads[i],
            chunk.order[i],
            DIM**-0.5,
            split=split,
            chosen=chosen,
        )


def attention(chunk: Chunk, chosen=None, layers=None, split=None) -> float:
    """Milliseconds per layer."""
    count = len(chunk.heads) if layers is None else len(layers)
    return timed(lambda: attention_once(chunk, chosen, layers, split), 5) / count


def host_time(chunk: Chunk, chosen=None) -> float:
    """Microseconds that one launch costs the host."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    attention_once(chunk, chosen)
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return took / len(chunk.heads) * 1e6


def splits(chunk: Chunk, programs: int) -> Split | None:
    """How the chunk's step would be split."""
    kept = np.concatenate([h.kept.cpu().numpy() for h in chunk.heads])
    count, target = split_counts(chunk.tiles.cpu().numpy(), kept, HEADS, 128, programs)
    if count == 1:
        return None
    lines = len(chunk.tiles) * HEADS
    part, lse = (torch.empty(lines * count * 128 * n, device="cuda") for n in (DIM, 1))
    return Split(count, target, part, lse, torch.empty(lines, dtype=torch.int32, device="cuda"))


def dense(before: int, backend: str, tokens: int = TOKENS) -> float:
    """Milliseconds of FlashInfer on the full KV, two sets of K and V in turn."""
    import flashinfer

    n1 = before + tokens
    sets = [torch.randn(2, n1, HEADS, DIM, device="cuda", dtype=DTYPE).unbind(0) for _ in range(2)]
    q = torch.randn(tokens, HEADS * RATIO, DIM, device="cuda", dtype=DTYPE)
    turn = itertools.cycle(sets)

    def work():
        k, v = next(turn)
        flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, backend=backend)

    return timed(work, 7, 2)


def products() -> float:
    """Milliseconds of the four matrix products of one layer for the chunk."""
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=DTYPE)
    y = torch.randn(TOKENS, INNER, device="cuda", dtype=DTYPE)
    shapes = [(HIDDEN, (RATIO + 2) * HEADS * DIM), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER)]
    weights = [torch.randn(*s, device="cuda", dtype=DTYPE) for s in shapes]
    down = torch.randn(INNER, HIDDEN, device="cuda", dtype=DTYPE)

    def work():
        for w in weights:
            x @ w
        y @ down

    return timed(work, 9, 2)


class Sealing:
    """Score, selection and write of every layer, with their buffers."""

    def __init__(self, chunk: Chunk):
        self.chunk = chunk
        units, window = len(chunk.units), chunk.rule.window
        heads = len(chunk.heads) * HEADS
        self.scores = torch.empty(units, HEADS, window, device="cuda")
        self.logits = torch.empty(units, HEADS, RATIO, window, device="cuda")
        self.sums = torch.empty(units, HEADS, window // 64, DIM, device="cuda")
        self.positions = torch.empty(units, HEADS, window, device="cuda", dtype=torch.int32)
        inv_freq = 500000.0 ** (-torch.arange(64, device="cuda", dtype=torch.float64) / 64)
        self.stats = expected_queries(
            torch.randn(heads, RATIO, DIM, device="cuda"),
            torch.randn(heads, RATIO, DIM, RANK, device="cuda"),
            torch.rand(heads, RATIO, DIM, device="cuda"),
            inv_freq.expand(heads, -1),
            torch.full((heads,), DIM**-0.5, device="cuda"),
            window,
            chunk.rule.sealed(chunk.before + chunk.tokens) + 1,
        )
        self.most = [int(h.kept.max()) for h in chunk.heads]

    def expected_attention(self, i: int):
        c = self.chunk
        score_expected_attention(
            self.scores, self.logits, c.k, c.v, c.pool, c.old, c.units, c.heads[i],
            self.stats.heads(slice(i * HEADS, (i + 1) * HEADS)), SINKS,
        )  # fmt: skip

    def keydiff(self, i: int):
        c = self.chunk
        score_keydiff(self.scores, self.sums, c.k, c.pool, c.old, c.units, c.heads[i])

    def select(self, i: int):
        c = self.chunk
        select(self.positions, self.scores, c.units, c.heads[i].kept, SINKS)

    def write(self, i: int):
        c = self.chunk
        seal_write(
            c.pool, c.table, c.k, c.v, c.old, c.units, self.positions, c.heads[i],
            c.rule.window, self.most[i],
        )  # fmt: skip

    def bytes(self) -> float:
        """Bytes a mean layer must move: whole windows once, kept entries there and back."""
        c = self.chunk
        row = 2 * DIM * DTYPE.itemsize
        kept = sum(float(h.kept.sum()) for h in c.heads) / len(c.heads)
        return len(c.units) * (HEADS * c.rule.window * row + 2 * kept * row)

    def per_layer(self, *steps) -> float:
        layers = range(len(self.chunk.heads))
        return captured(lambda: [step(i) for i in layers for step in steps]) / len(layers)


def sweep():
    """Block sizes, at 120K tokens on four layers; prints the fastest last."""
    layers = [4, 8, 13, 22]
    for page in (16, 64):
        chunk = Chunk(122880, TOKENS, window=1024, page=page)
        flops = sum(
            4.0 * RATIO * DIM * TOKENS * (float(chunk.heads[i].kept.sum()) * 124 + 768 * HEADS)
            for i in layers
        ) / len(layers)
        configs = [HopperConfig(b, s) for b, s in ((128, 2), (128, 3), (64, 3), (64, 4))]
        configs += [
            Config(128, b, w, s)
            for b, w, s in ((64, 8, 2), (64, 8, 3), (128, 8, 2), (32, 4, 2), (32, 8, 3))
        ]
        found = []
        for chosen in configs:
            name = [type(chosen).__name__, *(getattr(chosen, x) for x in chosen.__slots__)]
            try:
                chunk.out.fill_(torch.nan)
                ms = attention(chunk, chosen, layers)
                error = check(chunk, layers[-1])
            except Exception as error:
                print(page, name, "failed:", str(error)[:300], flush=True)
                continue
            found.append((ms, name))
            rate = flops / ms / 1e9
            print(
                f"page {page} {name} {ms:.3f} ms {rate:.0f} TFLOP/s error {error:.1e}", flush=True
            )
        print("best", page, min(found))


def table(report: KernelTable, flops: float, bandwidth: float, flashinfer: bool):
    """Chunks after short and long prefixes."""
    layer = products()
    print(f"matrix products of one layer, {TOKENS} tokens: {layer:.3f} ms")
    for before in (0, 32768, 122880):
        baselines = {}
        if flashinfer and before:
            baselines = {b: dense(before, b) for b in ("fa2", "fa3")}
        for window, page in ((1024, 16), (512, 16), (1024, 64)):
            chunk = Chunk(before, TOKENS, window=window, page=page)
            held = chunk.layout.retention_held
            ms = attention(chunk)
            error = max(check(chunk, LAYERS - 1), 0.0)
            if not error < 1e-2:
                raise RuntimeError(f"prefill attention is off by {error}")
            floor = chunk.flops() / flops * 1e3
            name = f"prefill {TOKENS} after {before} W{window} P{page}"
            for baseline, base in (baselines or {"": None}).items():
                report.add(name, 1, before + TOKENS, f"{held:.3f}", ms, floor, baseline, base)
            seal = Sealing(chunk)
            floor = seal.bytes() / bandwidth * 1e3
            for scorer in (seal.expected_attention, seal.keydiff):
                steps = {
                    "score": (scorer,),
                    "select": (seal.select,),
                    "write": (seal.write,),
                    "seal": (scorer, seal.select, seal.write),
                }
                took = {step: seal.per_layer(*work) for step, work in steps.items()}
                parts = " ".join(f"{k} {v * 1e3:.0f} us" for k, v in took.items())
                whole = took["seal"] + ms + layer
                print(f"{name} {scorer.__name__}: {parts}; {took['seal'] / whole:.2%} of a layer")
                report.add(
                    f"{name} seal {scorer.__name__}", 1, before + TOKENS, f"{held:.3f}",
                    took["seal"], floor, "layer", whole,
                )  # fmt: skip
            raw = captured(
                lambda c=chunk: [
                    raw_write(c.pool, c.table, c.k, c.v, c.spans, h, c.ring) for h in c.heads
                ]
            )
            print(f"{name} raw write: {raw / LAYERS * 1e3:.1f} us a layer")
            count = len(chunk.old)
            if count:
                pairs = torch.stack([chunk.old, chunk.table[1][chunk.table[1] > 0][:count]], 1)
                took = captured(lambda c=chunk, p=pairs: copy_pages(c.pool, p))
                size = 2 * count * chunk.pool[0].numel() * DTYPE.itemsize
                print(
                    f"copy of the old tail, all layers: {took * 1e3:.0f} us, {size / took / 1e9:.2f} TB/s"
                )
            del chunk, seal


def short_turns(report: KernelTable, flops: float, flashinfer: bool):
    """A short message in a long conversation, keys split among programs and not."""
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    for tokens in (128, 1024):
        chunk = Chunk(122880, tokens, window=1024, page=16)
        held, floor = f"{chunk.layout.retention_held:.3f}", chunk.flops() / flops * 1e3
        split = splits(chunk, programs)
        took = {
            name: captured(lambda c=chunk, s=s: attention_once(c, split=s)) / LAYERS
            for name, s in (("whole", None), ("split", split))
            if name == "whole" or s
        }
        if not check(chunk, LAYERS - 1) < 1e-2:
            raise RuntimeError("split prefill attention is off")
        name = f"prefill {tokens} after 122880 W1024 P16"
        if split:
            print(f"{name}: up to {split.count} splits of {split.target} blocks")
        best = min(took.values())
        for key, ms in took.items():
            report.add(f"{name} {key}", 1, 122880 + tokens, held, ms, floor, "whole", took["whole"])
        if flashinfer:
            for backend in ("fa2", "fa3"):
                base = dense(122880, backend, tokens)
                report.add(name, 1, 122880 + tokens, held, best, floor, backend, base)
        plain = Config(128, 128, 8, 2)
        attention_once(chunk, plain)
        print(
            f"host time of a launch: {host_time(chunk):.0f} us, plain {host_time(chunk, plain):.0f} us"
        )


def run(report: KernelTable, flashinfer: bool) -> None:
    """Every row of the prefill part."""
    flops, bandwidth = ceilings()
    print(f"bf16 product {flops / 1e12:.0f} TFLOP/s, copy {bandwidth / 1e12:.2f} TB/s")
    short_turns(report, flops, flashinfer)
    table(report, flops, bandwidth, flashinfer)


if __name__ == "__main__":
    sweep()
