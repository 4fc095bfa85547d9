"""Decode batches of a Llama-3.1-8B shape on real pages: all layers, groups and a shuffled pool.

Everything lies as the server lays it: groups over layers, one page table row per request, pages of
the pool in random order. K and V are random numbers; zeros would run faster than real ones.
"""

import time

import numpy as np
import torch

from bench.llama import DIM, DTYPE, HEADS, LAYERS, PER_GROUP, RATIO, RECENT, SINKS, layout_of
from tangram_sglang.kernels.decode import decode_attention
from tangram_sglang.kernels.decode_config import Config
from tangram_sglang.kernels.dispatch import Dispatch, dispatch_step
from tangram_sglang.kernels.layer_tables import LayerTables
from tangram_sglang.kernels.occupancy import resident_programs
from tangram_sglang.kernels.shared_prefix import alone, most_readers, read_together
from tangram_sglang.kernels.workspace import Workspace
from tangram_sglang.plan.split_map import SplitMap
from tangram_sglang.plan.window import WindowRule

PAGE = 16
DEVICE = "cuda"
BUSY_S = 0.3


class Scene:
    """A batch in its pool.

    Args:
        lengths: tokens per request, the newest included.
        retention: rho.
        window: W.
        shared: sealed windows of the first request that all others have too.
    """

    def __init__(
        self, lengths: list[int], retention: float, window: int, shared: int = 0, seed: int = 0
    ):
        torch.manual_seed(seed)
        self.lengths, self.retention, self.window = lengths, retention, window
        self.shared = shared
        rule = WindowRule(window, RECENT, PAGE, SINKS)
        self.layout = layout = layout_of(rule, retention, max(lengths) + 1)
        self.tables = LayerTables.build(layout, DEVICE)
        self.n_win = [rule.sealed(n) for n in lengths]
        own = [
            layout.pages(n) - (b > 0) * shared * layout.window_pages for b, n in enumerate(lengths)
        ]
        total = sum(own)
        self.pool = torch.empty(
            total + 1, layout.per_group, 2, PAGE, DIM, dtype=DTYPE, device=DEVICE
        )
        self.pool.normal_()
        shuffled = torch.randperm(total, device=DEVICE).add_(1).int().cpu().numpy()
        pages = iter(np.split(shuffled, np.cumsum(own)[:-1]))
        self.table_host = np.zeros((len(lengths) + 1, int(layout.table_offset[-1])), np.int32)
        for b, n in enumerate(lengths):
            self.table_host[b + 1] = self.table_host[1] if b else 0
            self.table_host[b + 1, self._entries(n, shared if b else 0)] = next(pages)
        self.table = torch.from_numpy(self.table_host).to(DEVICE)
        self.rows = torch.arange(1, len(lengths) + 1, device=DEVICE)
        self.seq_lens = torch.tensor(lengths, device=DEVICE)
        self.n_win_device = torch.tensor(self.n_win, dtype=torch.int32, device=DEVICE)
        batch = len(lengths)
        self.q = torch.randn(LAYERS, batch, HEADS * RATIO, DIM, device=DEVICE).to(DTYPE)
        self.k_new = torch.randn(LAYERS, batch, HEADS, DIM, device=DEVICE).to(DTYPE)
        self.v_new = torch.randn(LAYERS, batch, HEADS, DIM, device=DEVICE).to(DTYPE)
        self.out = torch.empty_like(self.q)

    def _entries(self, n: int, first: int) -> np.ndarray:
        """Entries that a request of ``n`` tokens fills from window ``first`` on, group by group."""
        layout, found = self.layout, []
        s = layout.rule.sealed(n)
        tail = np.arange(s * self.window // PAGE, layout.rule.pages(n))
        for g in range(len(layout.groups)):
            kept = int(layout.kept[g]) // PAGE
            found.append(layout.table_offset[g] + np.arange(first * kept, s * kept))
            found.append(layout.ring_offset[g] + tail % int(layout.ring_slots[g]))
        return np.concatenate(found)

    @property
    def shares(self) -> np.ndarray:
        """[L, H], what heads keep."""
        return self.tables.kept_pages.cpu().numpy()

    def bytes_read(self) -> int:
        """K and V of every entry and page ids, once, q and the result, over all layers."""
        entry = 2 * DIM * DTYPE.itemsize
        twice = self.shared * (len(self.lengths) - 1)
        held = sum(self.layout.total_entries(n) for n in self.lengths)
        held -= twice * self.layout.window_pages * PAGE * PER_GROUP
        pages = sum(self.layout.pages(n) * PER_GROUP for n in self.lengths)
        pages -= twice * self.layout.window_pages * PER_GROUP
        return held * entry + pages * 4 + 2 * self.q.nbytes

    def step(
        self,
        split_map: SplitMap,
        stretched: bool = True,
        config: Config | None = None,
        together: int = 1,
        **cut: int,
    ):
        """A function that runs one decode step through all layers, the dispatch included.

        ``together``: requests, in their order, that read the shared windows at a time.
        """
        dispatch = Dispatch.build(split_map, DEVICE, stretched, most_readers(RATIO))
        sizes = len(self.lengths), HEADS, RATIO, DIM, dispatch.readers
        workspace = Workspace.build(max(dispatch.grid), *sizes, DEVICE)
        if together > 1:
            dispatch.shared.copy_(torch.from_numpy(self._records(together, dispatch.readers)))
        step = self.rows, self.seq_lens, self.n_win_device

        def run():
            dispatch_step(dispatch, self.tables, *step, **cut)
            for i in range(LAYERS):
                decode_attention(
                    self.q[i],
                    self.k_new[i],
                    self.v_new[i],
                    self.pool,
                    self.table,
                    tables=self.tables,
                    dispatch=dispatch,
                    workspace=workspace,
                    layer=i,
                    out=self.out[i],
                    scaling=DIM**-0.5,
                    config=config,
                )

        return run

    def _records(self, together: int, readers: int) -> np.ndarray:
        records = alone(len(self.lengths), readers)
        for first in range(0, len(self.lengths), together):
            requests = range(first, min(first + together, len(self.lengths)))
            # a line has no place for leaders without others
            if len(requests) > 1:
                read_together(records, requests, self.shared)
        return records

    def head_entries(self, layer: int, b: int, h: int) -> tuple[np.ndarray, int]:
        """Pages of one head of one request, in order, and the entries they hold."""
        layout, n, s = self.layout, self.lengths[b], self.n_win[b]
        g, _ = layout.place[layer, h]
        sealed = s * int(layout.kept[g])
        tail = np.arange(s * self.window // PAGE, layout.rule.pages(n))
        row = self.table_host[b + 1]
        pages = np.concatenate(
            [
                row[layout.table_offset[g] : layout.table_offset[g] + sealed // PAGE],
                row[layout.ring_offset[g] + tail % int(layout.ring_slots[g])],
            ]
        )
        return pages, sealed + n - s * self.window

    def check(self, run, samples: int = 6) -> float:
        """Run a step and return the worst relative error of some heads against fp32."""
        self.out.fill_(torch.nan)
        run()
        generator, worst = np.random.default_rng(0), 0.0
        if self.out.isnan().any():
            raise RuntimeError("decode left NaN in its output")
        for _ in range(samples):
            layer, b, h = (int(generator.integers(x)) for x in (LAYERS, len(self.lengths), HEADS))
            pages, entries = self.head_entries(layer, b, h)
            column = self.layout.place[layer, h][1]
            held = self.pool[torch.from_numpy(pages).to(DEVICE).long(), column].float()
            k, v = (held[:, i].flatten(0, 1)[:entries] for i in (0, 1))
            q = self.q[layer, b, h * RATIO : (h + 1) * RATIO].float()
            expected = (q @ k.T * DIM**-0.5).softmax(-1) @ v
            found = self.out[layer, b, h * RATIO : (h + 1) * RATIO].float()
            worst = max(worst, ((found - expected).norm() / expected.norm()).item())
        return worst


def copy_bandwidth() -> float:
    """Bytes per ms of a device-to-device copy, read and written counted."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source))


def median_ms(run, repeats: int = 20, warmup: int = 3) -> float:
    """Median time of one call, by events."""
    times = []
    for i in range(warmup + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        if i >= warmup:
            times.append((start, end))
    torch.cuda.synchronize()
    return float(np.median([a.elapsed_time(b) for a, b in times]))


def graph_ms(run, repeats: int = 20) -> float:
    """Median time of one replay of ``run`` as a CUDA graph.

    The GPU is kept busy with it first: right after a pause, as when a batch is made, a short batch may
    be slow (8 x 32K was 82 us a layer then and 75 us else), most likely as its clocks were low.
    """
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    started = time.perf_counter()
    while time.perf_counter() - started < BUSY_S:
        graph.replay()
        torch.cuda.synchronize()
    return median_ms(graph.replay, repeats)


def programs_for(scene: Scene) -> int:
    """N_CTA: what the GPU holds of the real kernel."""
    return resident_programs(scene.tables, scene.pool, RATIO)
