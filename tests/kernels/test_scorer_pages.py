"""Queries and gate scores that the GPU backend holds for scorers, against the CPU backend's."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl

from tangram_sglang.backend import sealer
from tangram_sglang.backend.heads import head_tables
from tangram_sglang.backend.pieces import step_pieces
from tangram_sglang.backend.query_pages import QueryPages
from tangram_sglang.backend.score_pages import ScorePages
from tangram_sglang.backend.scorer_pages import ScorerPages
from tangram_sglang.backend.seal_inputs import SealHeads
from tangram_sglang.kernels.gate_pages import GatePlace, gather_gates
from tangram_sglang.kernels.query_pages import gather_queries
from tangram_sglang.kernels.raw_write import BLOCK
from tangram_sglang.kernels.records import raw_spans, seal_units
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.pool.ledger import Ledger
from tangram_sglang.pool.rows import Rows
from tests.kernels.sides import GPU, HEADS, LAYERS, RULE, random_qkv, read_pages

# Windows are 16 tokens and sealed 8 behind their end. In row 1 window 3 gets its last tokens while
# decoding, is sealed while decoding too, and a chunk comes in between; row 2 leaves.
STEPS = [
    ([(1, 37)], False),
    ([(1, 62), (2, 23)], False),
    ([(1, 63), (2, 24)], True),
    ([(1, 64), (2, 25)], True),
    ([(1, 72)], False),
    ([(1, 73)], True),
]


@pytest.mark.parametrize("scorer", ["snapkv", "tova", "expected_attention_local", "fastkvzip"])
def test_every_step_equals_the_cpu_backend(sides, monkeypatch, scorer):
    """In as few pages as the fullest step holds, so that some change hands while they are read."""
    layout = sides(400, scorer)[0].pool.plan.layout
    held = [sum(layout.pages(n) for _, n in targets) for targets, _ in STEPS]
    cpu, gpu = sides(max(*held, layout.peak_pages(90)), scorer)
    # two heads of one window at a time
    monkeypatch.setattr(sealer, "SCRATCH", 2 * gpu.backend._sealer._head_bytes())
    generator = torch.Generator().manual_seed(0)
    lost = set()

    def step(targets, decode):
        tokens = sum(n - cpu.pool.rows.live[row].n for row, n in targets)
        qkv = list(random_qkv(tokens, generator))
        gates = torch.rand(LAYERS, tokens, HEADS, generator=generator)
        expected, found = (side.forward(targets, decode, qkv, gates) for side in (cpu, gpu))
        lost.update(np.intersect1d(gpu.pool.rows.taken, read_pages(gpu)))
        for a, b in zip(expected, found, strict=True):
            assert torch.allclose(a, b, atol=1e-5)

    for side in (cpu, gpu):
        side.pool.rows.open(1, 62)
        side.pool.rows.open(2, 23)
    for targets, decode in STEPS:
        if targets == [(1, 72)]:
            # as if the prompt went on, which takes one step where decoding takes eight
            for side in (cpu, gpu):
                side.pool.rows.close(2)
                side.pool.rows.live[1].prompt = 72
                side.pool.rows.live[1].quiet = 0
        step(targets, decode)
    assert lost
    # another turn, behind what the first one left in the prefix cache
    tokens = list(range(73))
    for side in (cpu, gpu):
        rows, store = side.pool.rows, side.pool.store
        store.publish(1, None, tokens)
        rows.close(1)
        found = store.trie.match(None, [*tokens, *range(500, 520)], 90)
        store.trie.lock(found)
        assert found.tokens >= 3 * RULE.window
        rows.open(3, 90, *([x.pages for x in part] for part in (found.windows, found.tail)))
    step([(3, 84)], False)
    step([(3, 90)], False)
    for side in (cpu, gpu):
        side.pool.store.check()


def test_many_heads_of_a_half_precision_pool():
    """Odd sizes, scores of 9 heads in pages for 4, two rows, a padded decode step; no other byte."""
    shape = ModelShape(tuple(LayerShape(i, 9, 3, 4, None, 0.5) for i in range(3)))
    layout = KVLayout.build(
        shape,
        RULE,
        budgets=[0.5] * 9,
        retention=0.5,
        per_group=1,
        grouping="global",
        max_tokens=100,
    )
    layout = layout.with_queries(shape, 5).with_scores()
    assert layout.score_groups == 3
    rows = Rows(layout, Ledger(900), 3)
    plan, size, place = SimpleNamespace(layout=layout), RULE.window, GatePlace.of(layout)
    theirs, mine = (
        torch.full((901, 1, 2, RULE.page, 4), torch.nan, dtype=torch.float16, device=device)
        for device in ("cpu", GPU)
    )
    their_lines, lines = (x.flatten(1).view(torch.float32) for x in (theirs, mine))
    held, device_table = torch.from_numpy(rows.table), torch.from_numpy(rows.table).to(GPU)
    cpu = SimpleNamespace(pages=theirs, flat=theirs.view(-1, 4), lines=their_lines, plan=plan)
    queries = QueryPages(cpu, held)
    scores = ScorePages(cpu, held, head_tables(layout, "cpu")[1][0])
    pages = ScorerPages(SimpleNamespace(pages=mine, lines=lines, plan=plan), device_table)
    generator = torch.Generator().manual_seed(0)
    # every token's, by row: [n, 27, 4] and [n, 9]
    all_q = {row: torch.randn(90, 27, 4, generator=generator).half() for row in (1, 2)}
    all_gates = {row: torch.rand(90, 9, generator=generator) for row in (1, 2)}

    def gathered(found, layer, q, gate):
        old, units = (torch.from_numpy(x).to(GPU) for x in (found.old, units_of(found)))
        out_q = torch.full((len(units), 3, 3, 5, 4), torch.nan, dtype=torch.float16, device=GPU)
        gather_queries(out_q, q, mine, old, units, size, 3 * layer)
        out_gate = torch.full((len(units), 3, size), torch.nan, device=GPU)
        gather_gates(out_gate, gate, lines, old, units, place, 3 * layer)
        for i, (row, window) in enumerate(units[:, :2].tolist()):
            end, span = (window + 1) * size, slice(3 * layer, 3 * layer + 3)
            asked = all_q[row][end - 5 : end, 9 * layer : 9 * layer + 9]
            assert torch.equal(out_q[i].cpu(), asked.view(5, 3, 3, 4).permute(1, 2, 0, 3))
            assert torch.equal(out_gate[i].cpu(), all_gates[row][end - size : end, span].T)
        return len(units)

    def units_of(found):
        return seal_units(found.pieces[0], RULE)

    for row in (1, 2):
        rows.open(row, 70)
    sealed = 0
    for targets in ([(1, 37), (2, 14)], [(1, 70), (2, 30)], [(1, 71), (2, 31)]):
        rows.advance(targets)
        device_table.copy_(held)
        steps, decodes = rows.granted, targets[0][1] == 71
        new_q, new_gates = (
            torch.cat([x[s.row][s.n0 : s.n1] for s in steps]) for x in (all_q, all_gates)
        )
        if decodes:
            padding = (0, 0, 0, 0, 0, 2)
            new_q = torch.nn.functional.pad(new_q, padding, value=torch.nan)
            new_gates = torch.nn.functional.pad(new_gates, padding[2:], value=torch.nan)
            pages.start_decode(
                4, torch.tensor([1, 2, 0, 0], device=GPU), torch.tensor([71, 31, 1, 1], device=GPU)
            )
        found = step_pieces(layout, steps, rows.taken, range(0))
        starts = [layout.tail_start(None, s.n1) for s in steps]
        spans = torch.from_numpy(raw_spans(found.pieces[0], starts, BLOCK)).to(GPU)
        for layer in range(3):
            span = slice(3 * layer, 3 * layer + 3)
            q = new_q[:, 9 * layer : 9 * layer + 9].to(GPU)
            gate = new_gates[:, span].to(GPU)
            sealed += gathered(found, layer, q, gate)
            heads = SealHeads(None, span, 0)
            if decodes:
                pages.write_decode(q, gate, heads)
            else:
                pages.write(q, gate, spans, heads)
            first = 0
            for s in steps:
                one = slice(first, first + s.n1 - s.n0)
                queries.write(s, 3 * layer, q[one].cpu().view(-1, 3, 3, 4))
                scores.write(s, 3 * layer, gate[one].cpu().T)
                first = one.stop
        assert torch.equal(mine.cpu().view(torch.int16), theirs.view(torch.int16))
    assert sealed == 3 * 4


@pytest.mark.skipif(GPU == "cuda", reason="launches are noted by Triton's interpreter")
@pytest.mark.parametrize("scorer", ["snapkv", "fastkvzip"])
def test_sealing_while_decoding_takes_the_kernels_that_the_warm_up_compiled(
    sides, monkeypatch, scorer
):
    """A prefill seals the heads of a layer, a decode step those of all; else the first one compiles."""
    from triton.runtime.interpreter import InterpretedFunction

    launched, run = {}, InterpretedFunction.run

    def noting(kernel, *args, **kwargs):
        values = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        general = kernel.kwargs.get("do_not_specialize") or ()
        variant = []
        for name, parameter in inspect.signature(kernel.fn).parameters.items():
            x = values[name]
            if parameter.annotation is tl.constexpr:
                variant.append(x)
            elif isinstance(x, int) and name not in general:
                variant.append("1" if x == 1 else x % 16 == 0)
        launched.setdefault(kernel.fn, set()).add(tuple(variant))
        return run(kernel, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", noting)
    gpu = sides(400, scorer)[1]
    compiled = {kernel: set(variants) for kernel, variants in launched.items()}
    generator = torch.Generator().manual_seed(0)
    gpu.pool.rows.open(1, 40)
    for n in (40, 41):
        tokens = 40 if n == 40 else 1
        gates = torch.rand(LAYERS, tokens, HEADS, generator=generator)
        launched.clear()
        gpu.forward([(1, n)], n > 40, random_qkv(tokens, generator), gates)
    assert gpu.pool.rows.granted == [] and gpu.pool.rows.live[1].step.s1 == 2
    for kernel in launched.keys() & compiled.keys():
        assert launched[kernel] <= compiled[kernel], kernel.__qualname__
    assert len(launched.keys() & compiled.keys()) > 2
