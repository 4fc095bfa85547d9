"""The GPU backend's host part and its kernels, against the CPU backend, on the same pool and steps."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch.nn.functional import scaled_dot_product_attention

from tangram_sglang.backend import sealer, split_dispatch, splitter
from tangram_sglang.plan.reclaim import ReclaimRule
from tests.kernels.sides import DIM, HEADS, LAYERS, Q_HEADS, RULE, random_qkv, read_pages

STEPS = [
    ([(1, 37)], False),
    ([(1, 61), (2, 23)], False),
    *(([(1, 61 + i), (2, 23 + i)], True) for i in range(1, 4)),
]


def run_both(cpu, gpu, sinks=None) -> tuple[int, list]:
    """Both sides through ``STEPS``, outputs compared.

    Returns:
        Pages that steps read and gave away; q, k, v and outputs of each step, by layer.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = {1: 61, 2: 23}
    for side in (cpu, gpu):
        for row, prompt in prompts.items():
            side.pool.rows.open(row, prompt)
    copied, seen = 0, []
    for targets, decode in STEPS:
        tokens = sum(n - cpu.pool.rows.live[row].n for row, n in targets)
        qkv = list(random_qkv(tokens, generator))
        expected, found = (side.forward(targets, decode, qkv, sinks=sinks) for side in (cpu, gpu))
        copied += len(np.intersect1d(gpu.pool.rows.taken, read_pages(gpu)))
        for a, b in zip(expected, found, strict=True):
            assert torch.allclose(a, b, atol=1e-5)
        seen.append([(*x, out) for x, out in zip(qkv, found, strict=True)])
    return copied, seen


@pytest.mark.parametrize(
    ("split", "slide"),
    [(False, None), (True, None), (False, 12)],
    ids=["whole", "split", "sliding"],
)
@pytest.mark.parametrize("scarce", [False, True], ids=["roomy", "scarce"])
def test_prefill_chunks_and_decode_equal_the_cpu_backend(sides, monkeypatch, scarce, split, slide):
    """In a pool of just the pages that are held, a step hands out some that it still reads."""
    if split:
        # as for a short message in a long conversation
        monkeypatch.setattr(splitter, "split_counts", lambda *a: (2, 1))
    cpu, gpu = sides(400, slide=slide)
    if scarce:
        layout = cpu.pool.plan.layout
        held = max(sum(layout.pages(n) for _, n in targets) for targets, _ in STEPS)
        cpu, gpu = sides(held, slide=slide)
    # compiling is no compression
    assert gpu.pool.rows.tally.compression_s == 0
    copied, _ = run_both(cpu, gpu)
    assert (copied > 0) == scarce
    assert gpu.pool.rows.tally.compression_s > 0
    for side in (cpu, gpu):
        side.watch.read()
    assert cpu.watch.read()[0] == gpu.watch.read()[0] > 0
    assert np.array_equal(cpu.watch.read()[1], gpu.watch.read()[1])


def test_attention_sinks_in_prefill_and_decode(sides):
    """Of which one takes all: its query head must answer nothing."""
    sinks = torch.tensor([1.5, -2.0, 60.0, 0.5])
    seen = run_both(*sides(400), sinks)[1]
    heads = torch.cat([out for step in seen for *_, out in step]).view(-1, Q_HEADS, DIM)
    assert [head.abs().max() < 1e-6 for head in heads.unbind(1)] == [False, False, True, False]


def test_a_scorer_without_a_kernel_of_its_own(sides):
    """In prefill and in decode; it gets its windows' numbers from the host."""
    run_both(*sides(400, "knorm"))


def test_prompts_held_whole_see_all_of_themselves_and_are_sealed_at_their_end(sides):
    """In a pool of just the pages that are held: the last chunk seals into pages that it reads."""
    rule = ReclaimRule(RULE.window, RULE.recent, RULE.page, RULE.sinks, longest=200)
    layout = sides(400, rule=rule)[0].pool.plan.layout
    assert [layout.pages(n, -61) for n in (60, 61)] == [2 * 15, 3 * layout.window_pages + 2 * 4]
    held = (sum(layout.pages(n, -{1: 61, 2: 23}[row]) for row, n in step) for step, _ in STEPS)
    cpu, gpu = sides(max(held), rule=rule)
    copied, seen = run_both(cpu, gpu)
    assert copied > 0
    for side in (cpu, gpu):
        side.pool.rows.check()
    for layer in range(LAYERS):
        # row 1's prompt in two chunks, all queries but the last
        q, k, v, out = (torch.cat([seen[0][layer][i], seen[1][layer][i][:24]]) for i in range(4))
        whole = scaled_dot_product_attention(
            q.view(61, Q_HEADS, DIM).transpose(0, 1),
            *(x.transpose(0, 1).repeat_interleave(Q_HEADS // HEADS, 0) for x in (k, v)),
            is_causal=True,
        )
        whole = whole.transpose(0, 1).flatten(1)
        assert torch.allclose(out[:60], whole[:60], atol=1e-5)
        assert not torch.allclose(out[60], whole[60], atol=1e-3)


def test_equal_splits_change_who_computes_and_not_what(sides):
    cpu, gpu = sides(400, splits="equal")
    run_both(cpu, gpu)
    splits = gpu.backend._splits
    dispatch, heads = splits.of(2)[0], 4  # of two requests
    each = max(1, splits.programs // heads)
    assert not dispatch.stretched and (dispatch.splits[..., 1] == each).all()
    assert dispatch.grid == (each * heads,) * 2
    stretched = sides(400)[1].backend._splits.of(2)[0]
    assert stretched.stretched and stretched.grid == (splits.programs,) * 2


def test_many_rows_that_seal_in_one_step_do_so_in_parts(sides, monkeypatch):
    monkeypatch.setattr(sealer, "SCRATCH", 1)
    cpu, gpu = sides(400)
    calls, seal = [], gpu.backend._sealer.seal
    gpu.backend._sealer.seal = lambda units, *rest: (calls.append(len(units)), seal(units, *rest))
    generator = torch.Generator().manual_seed(0)
    for side in (cpu, gpu):
        for row in (1, 2, 3):
            side.pool.rows.open(row, 24)
    for n in (24, 25, 26):
        qkv = list(random_qkv(72 if n == 24 else 3, generator))
        targets = [(row, n) for row in (1, 2, 3)]
        expected, found = (side.forward(targets, n > 24, qkv) for side in (cpu, gpu))
        for a, b in zip(expected, found, strict=True):
            assert torch.allclose(a, b, atol=1e-5)
    assert calls == [1, 1, 1]


def test_a_larger_batch_leaves_captured_graphs_their_workspace(sides):
    """F3 (sgl-project/sglang PR#28767): a graph goes on writing where it wrote when captured."""
    splits = sides(400)[1].backend._splits
    dispatch, workspace = splits.of(1, capture=True)
    larger = splits.of(64)[1]
    assert len(larger.lse) > len(workspace.lse)
    assert splits.of(1)[0] is dispatch and splits.of(1)[1] is workspace


def test_batches_that_no_graph_was_captured_for_take_bounded_memory(sides):
    splits = sides(400)[1].backend._splits
    captured = splits.of(4, capture=True)[0]
    maps, workspaces = set(), set()
    for batch in range(5, 70):
        dispatch, workspace = splits.of(batch)
        assert dispatch.batch == batch and splits.of(batch)[0] is dispatch
        maps.add(weakref.ref(dispatch.pieces))
        workspaces.add(weakref.ref(workspace.mid))
        del dispatch, workspace
    assert sum(x() is not None for x in maps) <= split_dispatch.EAGER
    # 69 requests take one of 128; captured maps may keep one more
    assert sum(x() is not None for x in workspaces) <= 2
    assert splits.of(4)[0] is captured


@pytest.mark.parametrize("decode", [False, True])
def test_pages_granted_for_another_batch_are_noticed(sides, decode):
    gpu = sides(400)[1]
    for row in (1, 2):
        gpu.pool.rows.open(row, 30)
    gpu.pool.rows.advance([(1, 20), (2, 20)])
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
        batch_size=1 if decode else 2,
        extend_prefix_lens_cpu=[0, 7],
    )
    with pytest.raises(RuntimeError, match="pages were granted for"):
        gpu.backend.init_forward_metadata_out_graph(batch)
    # a graph's replay is no warm-up
    batch.forward_mode, batch.batch_size, batch.num_padding = ForwardMode.DECODE, 4, 2
    with pytest.raises(RuntimeError, match="runs 2 rows"):
        gpu.backend.init_forward_metadata_out_graph(batch)


class Notes:
    """An observer that remembers what it was shown."""

    def __init__(self):
        self.seen = []

    def queries(self, layer, q, positions):
        self.seen.append(("queries", layer, q.sum().item(), positions.sum().item()))

    def context(self, layer, k, v, sinks):
        self.seen.append(("context", layer, k.sum().item(), v.sum().item()))

    def wants(self, layer):
        return True

    def window(self, layer, start, k, v):
        self.seen.append(("window", layer, start, k.sum().item(), v.sum().item()))


def test_an_observer_sees_prefills_and_no_warm_up(sides):
    notes = Notes(), Notes()
    cpu, gpu = sides(400, watchers=notes)
    assert not notes[1].seen
    qkv = list(random_qkv(61, torch.Generator().manual_seed(0)))
    for side in (cpu, gpu):
        side.pool.rows.open(1, 61)
        side.forward([(1, 61)], False, qkv)
    assert len(notes[0].seen) == len(notes[1].seen)
    for expected, found in zip(sorted(notes[0].seen), sorted(notes[1].seen), strict=True):
        assert expected[:2] == found[:2] and found[2:] == pytest.approx(expected[2:], abs=1e-3)
