"""Scores, selection and the kernels that move kept and raw tokens, against PyTorch."""

import math

import numpy as np
import pytest
import torch

from tangram_sglang.plan.window import WindowRule
from tangram_sglang.score import ExpectedAttention, KeyDiff, QueryStats, Window
from tests.kernels.world import DEVICE, World, relative_error, to_device

# rows are (n0, n1, floor); W 16, R 5, P 4: windows from old pages, from new tokens and from both
ROWS = [(23, 70, 0), (40, 41, 0), (0, 40, 0), (53, 54, 0), (32, 60, 2)]


def statistics(heads, ratio, dim, rank, rotary, scaling=0.3) -> QueryStats:
    half = rotary // 2
    inv_freq = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    return QueryStats(
        torch.randn(heads, ratio, dim).to(DEVICE),
        torch.randn(heads, ratio, dim, rank).to(DEVICE) / 3,
        torch.rand(heads, ratio, dim).to(DEVICE),
        (inv_freq * torch.linspace(1, 0.5, heads)[:, None].double()).to(DEVICE),
        torch.full((heads,), scaling).to(DEVICE),
    )


def windows(world: World):
    """(unit, K, V) of every window that the step seals; [H, W, D] each."""
    from tangram_sglang.kernels.records import seal_units

    units = seal_units(world.pieces, world.rule)
    size = world.rule.window
    for unit in units.tolist():
        span = slice(unit[1] * size, (unit[1] + 1) * size)
        k, v = (x[unit[0] - 1][span].transpose(0, 1) for x in (world.k, world.v))
        yield unit, k, v


def units_of(world: World) -> torch.Tensor:
    from tangram_sglang.kernels.records import seal_units

    return to_device(seal_units(world.pieces, world.rule))


def scores_like(units, world):
    shape = (len(units), world.heads, world.rule.window)
    return torch.full(shape, torch.nan, device=DEVICE)


def check_keydiff(world: World, tolerance: float):
    from tangram_sglang.kernels.score_keydiff import BLOCK, score_keydiff

    units = units_of(world)
    blocks = -(-world.rule.window // BLOCK)
    shape = (len(units), world.heads, blocks, world.dim)
    sums = torch.full(shape, torch.nan, device=DEVICE)
    found = score_keydiff(
        scores_like(units, world), sums, world.new_k, world.pool, world.old, units, world.head_index
    )
    for i, (unit, k, v) in enumerate(windows(world)):
        heads = torch.arange(world.heads, device=DEVICE)
        expected = KeyDiff().score(Window(k, v, unit[1] * world.rule.window, heads, 0, None))
        assert relative_error(found[i], expected) < tolerance


def check_expected_attention(world: World, rank: int, rotary: int, tolerance: float):
    from tangram_sglang.kernels.score_expected_attention import (
        expected_queries,
        score_expected_attention,
    )

    units, sinks = units_of(world), world.rule.sinks
    stats = statistics(world.heads, world.ratio, world.dim, rank, rotary)
    laid_out = expected_queries(
        stats.mean,
        stats.factor,
        stats.diagonal,
        stats.inv_freq,
        stats.scaling,
        world.rule.window,
        8,
    )
    logits = torch.full(
        (len(units), world.heads, world.ratio, world.rule.window), torch.nan, device=DEVICE
    )
    found = score_expected_attention(
        scores_like(units, world),
        logits,
        world.new_k,
        world.new_v,
        world.pool,
        world.old,
        units,
        world.head_index,
        laid_out,
        sinks,
    )
    for i, (unit, k, v) in enumerate(windows(world)):
        window = Window(
            k,
            v,
            unit[1] * world.rule.window,
            torch.arange(world.heads, device=DEVICE),
            sinks if unit[1] == 0 else 0,
            stats,
        )
        expected = ExpectedAttention().score(window)
        assert relative_error(found[i], expected) < tolerance


def test_keydiff():
    check_keydiff(World(ROWS, heads=3, dim=20, sealed=False), 1e-6)


@pytest.mark.parametrize(("rank", "rotary", "dim"), [(4, 16, 16), (1, 8, 20), (0, 16, 16)])
def test_expected_attention(rank, rotary, dim):
    world = World(ROWS, heads=2, ratio=3, dim=dim, sealed=False)
    check_expected_attention(world, rank, rotary, 1e-5)


def select_like_reference(scores: torch.Tensor, kept: list[int], window: int, sinks: int):
    from tangram_sglang.kernels.select import select
    from tangram_sglang.kernels.select_reference import select_reference

    scores = scores.to(DEVICE)
    units = torch.zeros(len(scores), 8, dtype=torch.int32, device=DEVICE)
    units[:, 1] = window
    counts = torch.tensor(kept, dtype=torch.int32, device=DEVICE)
    shape = (*scores.shape[:2], scores.shape[2] + 3)
    found = torch.full(shape, -7, dtype=torch.int32, device=DEVICE)
    select(found, scores, units, counts, sinks)
    for unit in range(len(scores)):
        for head, count in enumerate(kept):
            line = scores[unit, head][None]
            expected = select_reference(line, count, sinks if window == 0 else 0)[0]
            assert found[unit, head, :count].tolist() == expected.tolist()
            assert (found[unit, head, count:] == -7).all()


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize(("tokens", "kept"), [(16, [1, 16, 7]), (111, [63, 4, 111]), (1, [1] * 3)])
def test_selection_is_the_references(tokens, kept, window):
    sinks = min(min(kept), 4)
    random = torch.randn(1, 3, tokens)
    ties = torch.randint(-2, 3, (1, 3, tokens)).float() * 0.5
    ties[ties == 0] = -0.0
    ties[0, 1, ::5] = 0.0
    odd = random.clone()
    odd[..., ::3] = torch.nan
    odd[..., 1::7] = torch.inf
    odd[..., 2::5] = -torch.inf
    tiny = random * 1e-42
    select_like_reference(torch.cat([random, ties, odd, tiny]), kept, window, sinks)


def test_equal_scores_keep_the_lowest_positions():
    """E13 (pytorch/pytorch#196177): all equal, all NaN, all lowest, and repeated blocks."""
    block = torch.randn(1, 1, 8).repeat(1, 2, 5)
    select_like_reference(block, [13, 29], 1, 0)
    for value in (0.0, math.nan, -math.inf, math.inf, -3.5):
        select_like_reference(torch.full((1, 2, 40), value), [7, 40], 1, 0)


def seal(world: World, positions):
    from tangram_sglang.kernels.seal_write import seal_write

    seal_write(
        world.pool,
        world.table,
        world.new_k,
        world.new_v,
        world.old,
        units_of(world),
        positions,
        world.head_index,
        world.rule.window,
        max(world.kept(h) for h in range(world.heads)),
    )


def test_kept_tokens_go_to_their_pages_and_nowhere_else():
    world = World(ROWS, heads=3, dim=20, sealed=False, guard=20)
    units = units_of(world)
    positions = torch.full(
        (len(units), world.heads, world.rule.window), 10**6, dtype=torch.int32, device=DEVICE
    )
    for i, (unit, _, _) in enumerate(windows(world)):
        for head, chosen in enumerate(world.chosen[unit[0] - 1][unit[1]]):
            positions[i, head, : len(chosen)] = chosen.int()
    seal(world, positions)
    full = World(ROWS, heads=3, dim=20, sealed=True, guard=20)
    assert torch.equal(world.slab.nan_to_num(7e9), full.slab.nan_to_num(7e9))


def test_a_window_that_keeps_everything_needs_no_selection():
    world = World(ROWS, heads=2, retention=1.0, sealed=False)
    seal(world, None)
    for unit, k, v in windows(world):
        for head in range(world.heads):
            found = world.entry(unit[0], unit[1], head)
            assert torch.equal(found[0], k[head]) and torch.equal(found[1], v[head])


@pytest.mark.parametrize("sliding_window", [None, 11])
def test_tokens_that_stay_raw_go_to_the_ring(sliding_window):
    from tangram_sglang.kernels.raw_write import BLOCK, raw_write
    from tangram_sglang.kernels.records import raw_spans

    world = World(ROWS, heads=3, dim=20, sliding_window=sliding_window, guard=20)
    before = world.slab.clone()
    starts = [
        world.layout.tail_start(world.kind.sliding_window, p.n1, p.floor) for p in world.pieces
    ]
    spans = raw_spans(world.pieces, starts, BLOCK)
    raw_write(
        world.pool,
        world.table,
        world.new_k,
        world.new_v,
        to_device(spans),
        world.head_index,
        world.kind.ring,
    )
    expected = before[:, : world.pool[0].numel()].view(world.pool.shape)
    page = world.rule.page
    for row, (piece, start) in enumerate(zip(world.pieces, starts, strict=True)):
        for head, (group, column) in enumerate(world.places):
            for t in range(max(piece.n0, start), piece.n1):
                slot = world.layout.ring_offset[group] + t // page % world.kind.ring
                at = int(world.table[piece.row, slot])
                assert at > 0
                expected[at, column, 0, t % page] = world.k[row][t, head]
                expected[at, column, 1, t % page] = world.v[row][t, head]
    assert torch.equal(world.slab.nan_to_num(7e9), before.nan_to_num(7e9))


def test_windows_side_by_side():
    from tangram_sglang.kernels.tails import gather_windows

    world = World(ROWS, heads=3, dim=20, sealed=False)
    units = units_of(world)
    shape = (len(units), world.heads, world.rule.window, world.dim)
    found_k, found_v = (torch.full(shape, torch.nan, device=DEVICE) for _ in range(2))
    gather_windows(
        found_k,
        found_v,
        world.new_k,
        world.new_v,
        world.pool,
        world.old,
        units,
        world.head_index,
    )
    for i, (_, k, v) in enumerate(windows(world)):
        assert torch.equal(found_k[i], k) and torch.equal(found_v[i], v)


def test_pages_are_copied_whole_and_alone():
    from tangram_sglang.kernels.tails import copy_pages

    slab = torch.randn(9, 2 * 2 * 4 * 20 + 20, device=DEVICE)
    pool = slab[:, :-20].view(9, 2, 2, 4, 20)
    expected = slab.clone()
    expected[[1, 7], :-20] = slab[[4, 2], :-20]
    copy_pages(pool, torch.tensor([[4, 1], [2, 7]], dtype=torch.int32, device=DEVICE))
    assert torch.equal(slab, expected)


def test_table_takes_one_packed_copy_a_step():
    from tangram_sglang.kernels.table import update_table
    from tangram_sglang.kernels.upload import BUFFERS, Upload

    table = torch.full((5, 700), -1, dtype=torch.int32, device=DEVICE)
    host = table.cpu().numpy().copy()
    upload, generator = Upload(DEVICE, capacity=8), np.random.default_rng(0)
    for step in range(2 * BUFFERS + 1):
        changes = generator.integers(0, [5, 700, 1000], (step * 100, 3), dtype=np.int32)
        # the page of a slot named twice is the host table's
        host[changes[:, 0], changes[:, 1]] = changes[:, 2]
        changes[:, 2] = host[changes[:, 0], changes[:, 1]]
        sent = upload.send({"empty": np.zeros((0, 3), np.int32), "changes": changes})
        assert sent["empty"].shape == (0, 3)
        update_table(table, sent["changes"])
        assert np.array_equal(table.cpu().numpy(), host)


GPU_ROWS = [(700, 2111, 0), (1300, 1301, 0), (0, 1400, 0)]


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256])
def test_compiled_scores(dim):
    world = World(
        GPU_ROWS,
        heads=3,
        ratio=3,
        dim=dim,
        rule=WindowRule(512, 64, 16, 4),
        dtype=torch.bfloat16,
        sealed=False,
    )
    check_keydiff(world, 1e-5)
    check_expected_attention(world, 4, dim, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [512, 1000, 2048])
def test_compiled_selection(tokens):
    torch.manual_seed(tokens)
    random = torch.randn(3, 3, tokens)
    ties = torch.randint(-2, 3, (3, 3, tokens)).float() * 0.5
    odd = random.clone()
    odd[..., ::3] = torch.nan
    odd[..., 1::7] = -torch.inf
    for window in (0, 2):
        scores = torch.cat([random, ties, odd, -ties])
        select_like_reference(scores, [64, tokens // 2, tokens], window, 4)
        select_like_reference(scores, [64, tokens // 2, tokens], window, 4)


@pytest.mark.gpu
def test_the_gpu_and_the_cpu_keep_the_same_positions():
    """The interpreter runs elsewhere; here the CPU's sort is the judge of the kernel's choice."""
    from tangram_sglang.kernels.select import select
    from tangram_sglang.kernels.select_reference import select_reference

    scores = (torch.randn(2, 8, 1024) * 4).round() / 4
    units = torch.zeros(2, 8, dtype=torch.int32)
    counts = torch.full((8,), 256, dtype=torch.int32)
    found = torch.empty(2, 8, 256, dtype=torch.int32, device=DEVICE)
    select(found, scores.to(DEVICE), units.to(DEVICE), counts.to(DEVICE), 4)
    for unit in range(2):
        expected = select_reference(scores[unit], 256, 4)
        assert torch.equal(found[unit].cpu().long(), expected)
