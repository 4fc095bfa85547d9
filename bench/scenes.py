"""Decode batches of a Llama-3.1-8B shape on real pages: all layers, groups and a shuffled pool.

Everything lies as the server lays it: groups over layers, one page table row per request, pages of
the pool in random order. K and V are random numbers; zeros would run faster than real ones.
"""

import time

import numpy as np
import torch

from bench.shapes import profile_budgets
from tangram_sglang.kernels.decode import Config, decode_attention
from tangram_sglang.kernels.dispatch import Dispatch, dispatch_step
from tangram_sglang.kernels.layer_tables import LayerTables
from tangram_sglang.kernels.occupancy import resident_programs
from tangram_sglang.kernels.workspace import Workspace
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.split_map import SplitMap
from tangram_sglang.plan.window import WindowRule

LAYERS, HEADS, RATIO, DIM = 32, 8, 4, 128
PAGE, RECENT, SINKS, PER_GROUP = 16, 256, 4, 4
DTYPE = torch.bfloat16
DEVICE = "cuda"
BUSY_S = 0.3


class Scene:
    """A batch in its pool.

    Args:
        lengths: tokens per request, the newest included.
        retention: rho.
        window: W.
    """

    def __init__(self, lengths: list[int], retention: float, window: int, seed: int = 0):
        torch.manual_seed(seed)
        self.lengths, self.retention, self.window = lengths, retention, window
        rule = WindowRule(window, RECENT, PAGE, SINKS)
        shape = ModelShape(
            tuple(LayerShape(i, HEADS * RATIO, HEADS, DIM, None, DIM**-0.5) for i in range(LAYERS))
        )
        self.layout = layout = KVLayout.build(
            shape,
            rule,
            budgets=profile_budgets(),
            retention=retention,
            per_group=PER_GROUP,
            grouping="global",
            max_tokens=max(lengths) + 1,
        )
        self.tables = LayerTables.build(layout, DEVICE)
        self.n_win = [rule.sealed(n) for n in lengths]
        total = sum(layout.pages(n) for n in lengths)
        self.pool = torch.empty(
            total + 1, layout.per_group, 2, PAGE, DIM, dtype=DTYPE, device=DEVICE
        )
        self.pool.normal_()
        pages = iter(np.split(*self._shuffled(total)))
        self.table_host = np.zeros((len(lengths) + 1, int(layout.table_offset[-1])), np.int32)
        for b, n in enumerate(lengths):
            entries = self._entries(n)
            self.table_host[b + 1, entries] = next(pages)
        self.table = torch.from_numpy(self.table_host).to(DEVICE)
        self.rows = torch.arange(1, len(lengths) + 1, device=DEVICE)
        self.seq_lens = torch.tensor(lengths, device=DEVICE)
        self.n_win_device = torch.tensor(self.n_win, dtype=torch.int32, device=DEVICE)
        batch = len(lengths)
        self.q = torch.randn(LAYERS, batch, HEADS * RATIO, DIM, device=DEVICE).to(DTYPE)
        self.k_new = torch.randn(LAYERS, batch, HEADS, DIM, device=DEVICE).to(DTYPE)
        self.v_new = torch.randn(LAYERS, batch, HEADS, DIM, device=DEVICE).to(DTYPE)
        self.out = torch.empty_like(self.q)

    def _shuffled(self, total: int):
        pages = torch.randperm(total, device=DEVICE).add_(1).int().cpu().numpy()
        return pages, np.cumsum([self.layout.pages(n) for n in self.lengths])[:-1]

    def _entries(self, n: int) -> np.ndarray:
        """Entries of a table row that a request of ``n`` tokens fills, group by group."""
        layout, found = self.layout, []
        s = layout.rule.sealed(n)
        tail = np.arange(s * self.window // PAGE, layout.rule.pages(n))
        for g in range(len(layout.groups)):
            sealed = s * int(layout.kept[g]) // PAGE
            found.append(layout.table_offset[g] + np.arange(sealed))
            found.append(layout.ring_offset[g] + tail % int(layout.ring_slots[g]))
        return np.concatenate(found)

    @property
    def shares(self) -> np.ndarray:
        """[L, H], what heads keep."""
        return self.tables.kept_pages.cpu().numpy()

    def bytes_read(self) -> int:
        """K and V of every entry, page ids, q and the result, over all layers."""
        entry = 2 * DIM * DTYPE.itemsize
        held = sum(self.layout.total_entries(n) for n in self.lengths)
        pages = sum(self.layout.pages(n) * PER_GROUP for n in self.lengths)
        return held * entry + pages * 4 + 2 * self.q.nbytes

    def step(
        self,
        split_map: SplitMap,
        stretched: bool = True,
        config: Config | None = None,
        **cut: int,
    ):
        """A function that runs one decode step through all layers, the dispatch included."""
        dispatch = Dispatch.build(split_map, DEVICE, stretched)
        workspace = Workspace.build(
            max(dispatch.grid), len(self.lengths), HEADS, RATIO, DIM, DEVICE
        )
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
