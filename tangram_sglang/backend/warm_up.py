"""Compiles every kernel before the first request, which would wait 10 s or more for each.

The steps run on row 0 of the page table, which names page 0 only: nobody's row, nobody's page.
"""

from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tangram_sglang.kernels.table import update_table
from tangram_sglang.kernels.tails import copy_pages
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.pool.row import Step

# a short message at the end of the longest request
FEW = 8


def warm_up(backend, model: torch.nn.Module, table: torch.Tensor) -> None:
    """Run a prefill that seals a window, and one of few tokens after many, in each kind of layer."""
    pool, layout = backend.token_to_kv_pool, backend.token_to_kv_pool.plan.layout
    rule, most = layout.rule, layout.max_tokens
    # row 0, slot 0, page 0: as it is, and page 0 onto itself; no step below has changes or copies
    zeros = torch.zeros(1, 3, dtype=torch.int32, device=pool.device)
    update_table(table, zeros)
    copy_pages(pool.pages, zeros[:, :2].contiguous())
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, positions=None)
    spans = [(0, min(rule.window + rule.recent + 1, most)), (max(0, most - FEW), most)]
    for n0, n1 in spans:
        backend.start_prefill([_step(layout, n0, n1)])
        for layer, sinks in _one_of_each(model):
            q, k, v = (
                torch.zeros(n1 - n0, heads * layer.head_dim, dtype=pool.dtype, device=pool.device)
                for heads in (layer.tp_q_head_num, layer.tp_k_head_num, layer.tp_k_head_num)
            )
            if backend.gates is not None and layer.sliding_window_size < 0:
                scores = torch.zeros(n1 - n0, layer.tp_k_head_num, device=pool.device)
                backend.gates.put(layer.layer_id, scores)
            backend.forward_extend(q, k, v, layer, batch, sinks=sinks)


def _step(layout: KVLayout, n0: int, n1: int) -> Step:
    """A step of row 0 behind ``n0`` tokens, all of whose pages are page 0."""
    rule, tail = layout.rule, []
    for kind in layout.kinds:
        start = layout.tail_start(kind.sliding_window, n0)
        pages = rule.pages(n0) - start // rule.page
        tail.append(np.zeros((kind.end - kind.first, pages), dtype=np.int32))
    s0, s1 = rule.sealed(n0), rule.sealed(n1)
    held = min(s1, layout.queries.begun(rule, n0)) - s0
    queries = [np.zeros(layout.queries.pages, dtype=np.int32)] * max(0, held)
    return Step(0, n0, n1, s0, s1, 0, tuple(tail), tuple(queries))


def _one_of_each(model: torch.nn.Module) -> list[tuple[RadixAttention, torch.Tensor | None]]:
    """The first layer of each kind, and its attention sinks, for which kernels are others."""
    found = {}
    for owner in model.modules():
        for layer in owner.children():
            if isinstance(layer, RadixAttention):
                sinks = getattr(owner, "sinks", None)
                found.setdefault(layer.sliding_window_size, (layer, sinks))
    return list(found.values())
