"""Queries and gate scores that the GPU backend holds for scorers, against the CPU backend's."""

import numpy as np
import pytest
import torch

from tangram_sglang.backend import sealer
from tests.kernels.sides import HEADS, LAYERS, RULE, random_qkv, read_pages

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
