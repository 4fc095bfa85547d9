"""FlashInfer's paged decode on the batches of ``bench.scenes``: full KV, and the same ragged KV."""

import time

import flashinfer
import numpy as np
import torch

from bench.scenes import DIM, DTYPE, HEADS, LAYERS, PAGE, PER_GROUP, RATIO, Scene, graph_ms

WORKSPACE = 256 << 20


def _wrapper(tensor_cores: bool):
    buffer = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        buffer, "NHD", use_tensor_cores=tensor_cores
    )


def _plan(wrapper, indptr, indices, last, q_heads: int, kv_heads: int) -> None:
    types = {"q_data_type": DTYPE, "kv_data_type": DTYPE}
    wrapper.plan(indptr, indices, last, q_heads, kv_heads, DIM, PAGE, **types)


def full_ms(lengths: list[int], layers: int = 4, kinds=(False, True)) -> float:
    """Full KV of every request: median time of a layer in a CUDA graph, of its two kernels the
    faster one. The graph goes round ``layers`` layers, so that the L2 cache helps nobody."""
    lengths = np.array(lengths)
    pages = -(-lengths // PAGE)
    shape = (int(pages.sum()), 2, PAGE, HEADS, DIM)
    kv = [torch.empty(shape, dtype=DTYPE, device="cuda").normal_() for _ in range(layers)]
    q = torch.randn(len(lengths), HEADS * RATIO, DIM, device="cuda").to(DTYPE)
    out = torch.empty_like(q)
    indptr = torch.from_numpy(np.concatenate([[0], pages.cumsum()])).int()
    indices = torch.randperm(shape[0], device="cuda").int()
    last = torch.from_numpy((lengths - 1) % PAGE + 1).int()
    best = []
    for tensor_cores in kinds:
        wrapper = _wrapper(tensor_cores)
        _plan(wrapper, indptr, indices, last, HEADS * RATIO, HEADS)

        def run(wrapper=wrapper):
            for layer in kv:
                wrapper.run(q, layer, out=out)

        best.append(graph_ms(run) / layers)
    return min(best)


class Ragged:
    """The scene's KV, each KV head a request of its group of queries.

    Every layer has a pool of its own, its pages in random order. Given the scene's pool of all layers,
    of 8 x 128K and more than 2^32 elements, FlashInfer 0.7.2's kernel did not end.
    """

    def __init__(self, scene: Scene):
        self.scene = scene
        self.layers = [self._layer(i) for i in range(LAYERS)]

    def _layer(self, layer: int):
        counts, pages, last = [0], [], []
        for b in range(len(self.scene.lengths)):
            for h in range(HEADS):
                held, entries = self.scene.head_entries(layer, b, h)
                pages.append(held * PER_GROUP + self.scene.layout.place[layer, h][1])
                counts.append(len(held))
                last.append((entries - 1) % PAGE + 1)
        found = torch.from_numpy(np.concatenate(pages)).cuda()
        order = torch.randperm(len(found), device="cuda")
        kv = self.scene.pool.view(-1, 2, PAGE, 1, DIM)[found[order]]
        indptr = torch.from_numpy(np.cumsum(counts)).int()
        return indptr, order.argsort().int(), torch.tensor(last, dtype=torch.int32), kv

    def ms(self, repeats: int = 3) -> tuple[float, float, float]:
        """Time of a layer with its plan, without it, and the relative difference to the scene's
        outputs; of the two kernels the faster one.

        With its plan: all layers one after the other, from the first call to the last result.
        """
        best = None
        for tensor_cores in (False, True):
            wrapper = _wrapper(tensor_cores)
            totals, runs, error = [], [], 0.0
            for _ in range(repeats + 1):
                events = []
                torch.cuda.synchronize()
                start = time.perf_counter()
                for i, (indptr, indices, last, kv) in enumerate(self.layers):
                    _plan(wrapper, indptr, indices, last, RATIO, 1)
                    q = self.scene.q[i].view(-1, RATIO, DIM)
                    pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                    pair[0].record()
                    out = wrapper.run(q, kv)
                    pair[1].record()
                    events.append(pair)
                torch.cuda.synchronize()
                totals.append((time.perf_counter() - start) * 1e3 / LAYERS)
                runs.append(sum(a.elapsed_time(b) for a, b in events) / LAYERS)
                expected = self.scene.out[LAYERS - 1].view_as(out).float()
                error = ((out.float() - expected).norm() / expected.norm()).item()
            found = float(np.median(totals[1:])), float(np.median(runs[1:])), error
            best = found if best is None else min(best, found)
        return best
