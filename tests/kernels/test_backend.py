"""The GPU backend's host part and its kernels, against the CPU backend, on the same pool and steps."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from tangram_sglang.backend import sealer, split_dispatch, splitter
from tangram_sglang.backend.attention import TangramAttentionBackend
from tangram_sglang.backend.build import spare_pages
from tangram_sglang.backend.cuda_attention import TangramCudaBackend
from tangram_sglang.backend.drift import DriftWatch
from tangram_sglang.backend.kv_pool import TangramKVPool
from tangram_sglang.cache.store import PrefixStore
from tangram_sglang.plan.drift import DriftRule
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.reclaim import ReclaimRule
from tangram_sglang.plan.serving import ServingPlan
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.score import create_scorer

LAYERS, Q_HEADS, HEADS, DIM = 2, 4, 2, 16
GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where the GPU backend runs
RULE = WindowRule(16, 8, 4, 2)


class Side:
    """One backend over a pool of its own; both sides take the same steps and are watched."""

    def __init__(
        self,
        backend,
        pages: int,
        spare: int,
        scorer="keydiff",
        watcher=None,
        splits="map",
        rule=RULE,
    ):
        shape = ModelShape(
            tuple(LayerShape(i, Q_HEADS, HEADS, DIM, None, DIM**-0.5) for i in range(LAYERS))
        )
        layout = KVLayout.build(
            shape,
            rule,
            budgets=[0.3, 0.9, 0.5, 0.1],
            retention=0.5,
            per_group=2,
            grouping="global",
            max_tokens=200,
        )
        self.device = GPU if backend is TangramCudaBackend else "cpu"
        plan = ServingPlan(
            "test", 0.5, scorer, create_scorer(scorer), None, layout, "none", splits=splits
        )
        self.pool = TangramKVPool(
            plan,
            size=200,
            num_pages=pages,
            num_spare=spare,
            max_rows=3,
            dtype=torch.float32,
            device=self.device,
            layer_num=LAYERS,
            enable_memory_saver=False,
        )
        self.pool.pages.fill_(torch.nan)
        self.pool.pages[0] = 0
        self.pool.store = PrefixStore(self.pool.rows)
        layers = [RadixAttention(Q_HEADS, DIM, DIM**-0.5, HEADS, i) for i in range(LAYERS)]
        model = nn.ModuleList(layers)
        runner = SimpleNamespace(
            device=self.device, req_to_token_pool=None, token_to_kv_pool=self.pool, model=model
        )
        self.layers = layers
        rule = DriftRule("keydiff", (0.3, 0.5, 0.4, 0.6), 0.5, "global", 2)
        self.watch = watcher or DriftWatch(rule, layout, self.device)
        self.backend = backend(runner, self.watch)

    def forward(self, targets, decode: bool, qkv) -> list[torch.Tensor]:
        """One step of SGLang's: pages, metadata, then every layer."""
        before = [self.pool.rows.live[row].n for row, _ in targets]
        self.pool.rows.advance(targets)
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            batch_size=len(targets),
            req_pool_indices=torch.tensor([row for row, _ in targets], device=self.device),
            seq_lens=torch.tensor([n for _, n in targets], device=self.device),
            extend_prefix_lens_cpu=before,
            positions=torch.cat(
                [torch.arange(a, n) for a, (_, n) in zip(before, targets, strict=True)]
            ),
        )
        self.backend.init_forward_metadata(batch)
        run = self.backend.forward_decode if decode else self.backend.forward_extend
        qkv = [[x.to(self.device) for x in layer] for layer in qkv]
        found = [run(*x, layer, batch) for x, layer in zip(qkv, self.layers, strict=True)]
        return [x.cpu() for x in found]


@pytest.fixture
def sides(monkeypatch):
    if GPU == "cpu":
        # the occupancy of a kernel is a GPU's
        monkeypatch.setattr(split_dispatch, "resident_programs", lambda *a, **k: 6)

    def make(pages, scorer="keydiff", watchers=(None, None), splits="map", rule=RULE):
        cpu = Side(TangramAttentionBackend, pages, 0, scorer, watchers[0], rule=rule)
        spare = spare_pages(cpu.pool.plan.layout, "cuda")
        return (
            cpu,
            Side(TangramCudaBackend, pages, spare, scorer, watchers[1], splits, rule),
        )

    return make


def random_qkv(tokens: int, generator):
    """q, k, v of every layer, as slices of one projection."""
    for _ in range(LAYERS):
        both = torch.randn(tokens, (Q_HEADS + 2 * HEADS) * DIM, generator=generator)
        q, k, v = both.split([Q_HEADS * DIM, HEADS * DIM, HEADS * DIM], dim=1)
        yield q, k.view(-1, HEADS, DIM), v.view(-1, HEADS, DIM)


STEPS = [
    ([(1, 37)], False),
    ([(1, 61), (2, 23)], False),
    *(([(1, 61 + i), (2, 23 + i)], True) for i in range(1, 4)),
]


def run_both(cpu, gpu) -> tuple[int, list]:
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
        expected, found = (side.forward(targets, decode, qkv) for side in (cpu, gpu))
        copied += len(np.intersect1d(gpu.pool.rows.taken, _tails(gpu)))
        for a, b in zip(expected, found, strict=True):
            assert torch.allclose(a, b, atol=1e-5)
        seen.append([(*x, out) for x, out in zip(qkv, found, strict=True)])
    return copied, seen


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("scarce", [False, True], ids=["roomy", "scarce"])
def test_prefill_chunks_and_decode_equal_the_cpu_backend(sides, monkeypatch, scarce, split):
    """In a pool of just the pages that are held, a step hands out some that it still reads."""
    if split:
        # as for a short message in a long conversation
        monkeypatch.setattr(splitter, "split_counts", lambda *a: (2, 1))
    cpu, gpu = sides(400)
    if scarce:
        layout = cpu.pool.plan.layout
        cpu, gpu = sides(max(sum(layout.pages(n) for _, n in targets) for targets, _ in STEPS))
    # compiling is no compression
    assert gpu.pool.rows.tally.compression_s == 0
    copied, _ = run_both(cpu, gpu)
    assert (copied > 0) == scarce
    assert gpu.pool.rows.tally.compression_s > 0
    for side in (cpu, gpu):
        side.watch.read()
    assert cpu.watch.read()[0] == gpu.watch.read()[0] > 0
    assert np.array_equal(cpu.watch.read()[1], gpu.watch.read()[1])


@pytest.mark.parametrize("scorer", ["streaming", "knorm"])
def test_scorers_without_a_kernel_of_their_own(sides, scorer):
    """In prefill and in decode; they get their windows' numbers from the host."""
    run_both(*sides(400, scorer))


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
    dispatch = gpu.backend._splits.of(2)[0]
    assert not dispatch.stretched and (dispatch.splits[..., 1] == 2).all()
    stretched = sides(400)[1].backend._splits.of(2)[0]
    assert stretched.stretched and not (stretched.splits[..., 1] == 2).all()


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

    def context(self, layer, k, v):
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


def _tails(side) -> np.ndarray:
    steps = [state.step for state in side.pool.rows.live.values() if state.step]
    return np.concatenate([x.ravel() for step in steps for x in step.tail] or [np.empty(0)])
