"""FlashInfer's paged decode on the batches of ``bench.scenes``: full KV, and the same ragged KV."""

import time

import flashinfer
import numpy as np
import torch

from bench.llama import DIM, DTYPE, HEADS, LAYERS, PER_GROUP, RATIO
from bench.scenes import PAGE, Scene, graph_ms

WORKSPACE = 256 << 20


def _buffer() -> torch.Tensor:
    return torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")


def _wrapper(tensor_cores: bool, buffer: torch.Tensor):
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
        wrapper = _wrapper(tensor_cores, _buffer())
        _plan(wrapper, indptr, indices, last, HEADS * RATIO, HEADS)

        def run(wrapper=wrapper):
            for layer in kv:
                wrapper.run(q, layer, out=out)

        best.append(graph_ms(run) / layers)
    return min(best)


class Ragged:
    """The scene's own pages, each KV head a request of its group of queries.

    Every layer has a wrapper of its own. A plan is copied to the device from a pinned buffer of the
    wrapper, without waiting, and the next plan overwrites that buffer. With one wrapper for all layers
    the kernels of 8 x 128K, which take the GPU longer than a plan takes the host, did not end.
    """

    def __init__(self, scene: Scene):
        self.scene = scene
        self.kv = scene.pool.view(-1, 2, PAGE, 1, DIM)
        self.layers = [self._layer(i) for i in range(LAYERS)]

    def _layer(self, layer: int):
        counts, pages, last = [0], [], []
        for b in range(len(self.scene.lengths)):
            for h in range(HEADS):
                held, entries = self.scene.head_entries(layer, b, h)
                pages.append(held * PER_GROUP + self.scene.layout.place[layer, h][1])
                counts.append(len(held))
                last.append((entries - 1) % PAGE + 1)
        indices = torch.from_numpy(np.concatenate(pages)).int().cuda()
        indptr = torch.from_numpy(np.cumsum(counts)).int()
        return indptr, indices, torch.tensor(last, dtype=torch.int32)

    def ms(self, repeats: int = 3) -> tuple[float, float, float]:
        """Time of a layer with its plan, without it, and the relative difference to the scene's
        outputs; each of the better of its two kernels, the difference of the worse one.

        With its plan: all layers one after the other, from the first call to the last result. Without
        it: all layers, planned before, in a CUDA graph, as ours are timed. Between two events around a
        call the GPU would mostly wait for Python to launch.
        """
        queries = [self.scene.q[i].view(-1, RATIO, DIM) for i in range(LAYERS)]
        expected = self.scene.out[LAYERS - 1].view_as(queries[-1]).float()
        found = []
        for tensor_cores in (False, True):
            buffer = _buffer()
            wrappers = [_wrapper(tensor_cores, buffer) for _ in self.layers]
            out = torch.empty_like(queries[-1])

            def run(wrappers=wrappers, out=out):
                for wrapper, q in zip(wrappers, queries, strict=True):
                    wrapper.run(q, self.kv, out=out)

            totals = []
            for _ in range(repeats + 1):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for wrapper, layer, q in zip(wrappers, self.layers, queries, strict=True):
                    _plan(wrapper, *layer, RATIO, 1)
                    wrapper.run(q, self.kv, out=out)
                torch.cuda.synchronize()
                totals.append((time.perf_counter() - start) * 1e3 / LAYERS)
            alone = graph_ms(run) / LAYERS
            error = ((out.float() - expected).norm() / expected.norm()).item()
            found.append((float(np.median(totals[1:])), alone, error))
        total, alone, error = np.array(found).T
        # not ``max``, which may pass over a NaN
        return float(total.min()), float(alone.min()), float(np.max(error))
