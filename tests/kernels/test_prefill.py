"""Prefill attention against its PyTorch reference: odd sizes, poisoned pools, many epochs."""

import numpy as np
import pytest
import torch

from tangram_sglang.plan.window import WindowRule
from tests.kernels.world import DEVICE, World, relative_error, to_device

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def run(world: World, sinks=None, chosen=None, count=0):
    from tangram_sglang.kernels.prefill import config_for, prefill_attention
    from tangram_sglang.kernels.prefill_split import Split
    from tangram_sglang.kernels.records import prefill_tiles

    rows = (chosen or config_for(world.dim, world.dtype)).rows
    tiles = prefill_tiles(world.pieces, world.rule, rows // world.ratio, world.kind.sliding_window)
    out = torch.full_like(world.q, torch.nan)
    split = None
    if count:
        parts = len(tiles) * world.heads * count
        poisoned = [
            torch.full((n,), torch.nan, device=DEVICE)
            for n in (parts * rows * world.dim, parts * rows)
        ]
        used = torch.full((len(tiles) * world.heads,), 10**6, dtype=torch.int32, device=DEVICE)
        split = Split(count, 2, *poisoned, used)
    order = torch.argsort(world.head_index.kept, descending=True).int()
    return prefill_attention(
        world.q,
        world.new_k,
        world.new_v,
        out,
        world.pool,
        world.table,
        world.old,
        to_device(tiles),
        world.head_index,
        order,
        world.dim**-0.5,
        world.kind.sliding_window,
        sinks,
        split,
        chosen,
    )


def reference(world: World) -> torch.Tensor:
    from tangram_sglang.kernels.prefill_reference import prefill_reference, sliding_reference

    out = torch.empty_like(world.q, dtype=torch.float32)
    for row, piece in enumerate(world.pieces):
        span = slice(piece.first, piece.first + piece.n1 - piece.n0)
        for head in range(world.heads):
            lines = slice(head * world.ratio, (head + 1) * world.ratio)
            q = world.q[span, lines].float().permute(1, 0, 2)[None]
            k, v = (x[row][:, head].float()[None] for x in (world.k, world.v))
            scaling = world.dim**-0.5
            if world.kind.sliding_window is not None:
                found = sliding_reference(q, k, v, world.kind.sliding_window, scaling)
            else:
                rule = world.rule
                start = rule.sealed(piece.n0 + 1, piece.floor) * rule.window
                sealed = world.sealed_rows(row, head, rule.sealed(piece.n1, piece.floor))
                found = prefill_reference(
                    q,
                    *(x.float()[None] for x in sealed),
                    k[:, start:],
                    v[:, start:],
                    start,
                    rule,
                    scaling,
                    piece.floor,
                )
            out[span, lines] = found[0].permute(1, 0, 2)
    return out


def small(rows=32, block=16):
    from tangram_sglang.kernels.prefill import Config

    return Config(rows, block, 4, 2)


# rows are (n0, n1, floor); W 16, R 5, P 4
CASES = {
    "one-token": {"rows": [(0, 1, 0)], "ratio": 1},
    "one-token-after-windows": {"rows": [(75, 76, 0)], "ratio": 3},
    "several-epochs-from-nothing": {"rows": [(0, 75, 0)], "ratio": 3},
    "several-rows-several-epochs": {"rows": [(3, 60, 0), (41, 42, 0), (0, 7, 0)], "ratio": 2},
    # a prefix of the cache that is sealed further than its length says
    "floor-above-sealed": {"rows": [(48, 71, 3), (64, 66, 4), (37, 38, 0)], "ratio": 2},
    "odd-ratio-5-three-heads": {"rows": [(13, 47, 0)], "heads": 3, "ratio": 5, "dim": 8},
    "ratio-7-long-beside-short": {
        "rows": [(23, 45, 0)],
        "heads": 4,
        "ratio": 7,
        "budgets": [0.01, 1.0, 0.01, 0.01],
        "per_group": 1,
    },
    "sliding-within-window": {"rows": [(0, 9, 0)], "sliding_window": 12},
    "sliding-across-pages": {"rows": [(37, 60, 0), (5, 31, 0)], "ratio": 3, "sliding_window": 11},
    "sliding-of-one-token": {"rows": [(6, 12, 0)], "sliding_window": 1},
    "head-dim-no-power-of-two": {"rows": [(30, 44, 0)], "ratio": 3, "dim": 20},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_query_sees_its_own_epoch(case):
    world = World(**case)
    assert relative_error(run(world, chosen=small()), reference(world)) < 1e-5


def test_split_keys_merge_to_the_whole():
    """Splits of two blocks and more; some hold only keys behind a query, some are empty."""
    rows = [(75, 84, 0), (48, 71, 3)]
    world = World(rows, ratio=2, heads=2, budgets=[0.1, 1.0], per_group=1)
    assert relative_error(run(world, chosen=small(), count=3), reference(world)) < 1e-5
    sinks = torch.linspace(-3, 4, world.heads * world.ratio, device=DEVICE)
    found = run(world, sinks, small(), 2)
    assert relative_error(found, run(world, sinks, small())) < 1e-5


def test_few_tokens_after_many_are_split_and_a_full_chunk_is_not():
    from tangram_sglang.kernels.prefill_split import CAPACITY, split_counts
    from tangram_sglang.kernels.records import Piece, prefill_tiles

    rule, kept = WindowRule(1024, 256, 16, 4), np.array([16, 16, 16, 1024])
    for new, is_split in ((1, True), (300, True), (8192, False)):
        piece = Piece(1, 120000, 120000 + new, 0, 0, 0, 1, 0)
        tiles = prefill_tiles([piece], rule, 32)
        count, target = split_counts(tiles, kept, 8, 128, 132)
        assert (count > 1) == is_split
        assert count * len(tiles) * 8 <= max(CAPACITY, len(tiles) * 8)
        if is_split:
            assert count * target * 128 >= 117 * 1024
    assert split_counts(tiles[:0], kept, 8, 128, 132) == (1, 1)
    # a short request has nothing to split
    assert (
        split_counts(prefill_tiles([Piece(1, 0, 40, 0, 0, 0, 0, 0)], rule, 32), kept, 8, 128, 132)[
            0
        ]
        == 1
    )


def test_no_head_reads_another_heads_keys():
    """E9 (vllm-project/vllm PR#40792): 24 query heads per KV head, every other head poisoned."""
    world = World([(30, 43, 0)], heads=3, ratio=24, dim=16, per_group=3)
    expected = reference(world)
    for head in (0, 2):
        world.new_k[:, head] = torch.nan
        world.pool[:, world.places[head][1]] = torch.nan
    found = run(world, chosen=small(64))[:, 24:48]
    assert relative_error(found, expected[:, 24:48]) < 1e-5


@pytest.mark.parametrize("sliding_window", [None, 9])
def test_sinks_join_the_softmax_once(sliding_window):
    """G5 (kekzl/imp#1303), against one softmax over logits and sink."""
    world = World([(30, 41, 0)], ratio=3, sliding_window=sliding_window)
    sinks = torch.linspace(-3, 4, world.heads * world.ratio, device=DEVICE)
    found = run(world, sinks, small())
    plain = run(world, None, small())
    # softmax with a sink = softmax without it, times its share of the sum
    for i, position in enumerate(range(30, 41)):
        for head in range(world.heads):
            if sliding_window is None:
                seen = world.rule.sealed(position + 1)
                k = world.sealed_rows(0, head, seen)[0]
                k = torch.cat([k, world.k[0][seen * world.rule.window : position + 1, head]])
            else:
                first = max(0, position - sliding_window + 1)
                k = world.k[0][first : position + 1, head]
            for query in range(head * world.ratio, (head + 1) * world.ratio):
                logits = k @ world.q[i, query] * world.dim**-0.5
                share = torch.cat([logits, sinks[query : query + 1]]).softmax(0)[:-1].sum()
                assert torch.allclose(found[i, query], plain[i, query] * share, atol=1e-5)


def test_pages_between_guards_are_left_alone():
    """E11 (vllm-project/vllm#49716): a page stride longer than a page; reads write nothing."""
    world = World([(20, 33, 0)], guard=48)
    before = world.slab.clone()
    assert not run(world, chosen=small()).isnan().any()
    assert torch.equal(before.nan_to_num(7), world.slab.nan_to_num(7))


def test_tiles_cover_each_token_once_and_keep_to_one_epoch():
    from tangram_sglang.kernels.records import Piece, prefill_tiles

    rule = WindowRule(16, 5, 4, 2)
    pieces = [Piece(1, 3, 90, 0, 0, 0, 1, 0), Piece(2, 48, 55, 3, 87, 8, 0, 48)]
    tiles = prefill_tiles(pieces, rule, 7, kept=4.0)
    covered = np.concatenate([np.arange(t[1], t[1] + t[2]) for t in tiles])
    assert sorted(covered) == list(range(94))
    floors = {1: 0, 2: 3}
    for row, _, tokens, position, n_win, raw_start, *_ in tiles.tolist():
        ends = {rule.sealed(p + 1, floors[row]) for p in (position, position + tokens - 1)}
        assert ends == {n_win}
        assert raw_start == n_win * 16
    cost = tiles[:, 4] * 4 + tiles[:, 3] + tiles[:, 2] - tiles[:, 5]
    assert (np.diff(cost) <= 0).all()


GPU_CASES = {
    # E7 (sgl-project/sglang#1159): head sizes that are no power of two
    **{
        f"D{dim}-ratio{ratio}": {"rows": [(700, 1111, 0), (0, 63, 0)], "dim": dim, "ratio": ratio}
        for dim, ratio in ((64, 7), (80, 3), (96, 4), (128, 4), (128, 5), (192, 6), (256, 2))
    },
    "D128-ratio24": {"rows": [(300, 431, 0)], "dim": 128, "ratio": 24, "heads": 3},
    "D128-page64": {
        "rows": [(700, 1111, 0)],
        "dim": 128,
        "ratio": 4,
        "rule": WindowRule(256, 64, 64, 4),
    },
    "D128-ratio1": {"rows": [(700, 1111, 3)], "dim": 128, "ratio": 1, "heads": 4},
    "D64-sliding": {
        "rows": [(700, 1111, 0), (0, 300, 0)],
        "dim": 64,
        "ratio": 8,
        "sliding_window": 128,
    },
    "D256-sliding": {"rows": [(512, 1111, 0)], "dim": 256, "ratio": 2, "sliding_window": 300},
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES)
def test_compiled(case, dtype):
    from tangram_sglang.kernels.prefill import config_for

    case = {"rule": WindowRule(256, 64, 16, 4), **case}
    world = World(**case, dtype=dtype)
    expected = reference(world)
    sinks = torch.linspace(-3, 4, world.heads * world.ratio, device=DEVICE)
    # the kernel that is chosen here, and the one for every other GPU
    for chosen in (None, config_for(world.dim, dtype)):
        error = relative_error(run(world, chosen=chosen), expected)
        assert error < TOLERANCE[dtype], (chosen, error)
    chosen = config_for(world.dim, dtype)
    error = relative_error(run(world, sinks), run(world, sinks, chosen))
    assert error < TOLERANCE[dtype], error
    if world.kind.sliding_window is None:
        for count in (3, 8):
            assert relative_error(run(world, count=count), expected) < TOLERANCE[dtype]
        error = relative_error(run(world, sinks, count=3), run(world, sinks, chosen))
        assert error < TOLERANCE[dtype], error


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_beside_the_tokens_that_count_may_hold_anything(dim):
    """V behind a row's last token belongs to another row, or to nobody."""
    world = World(
        [(700, 801, 0), (300, 309, 0), (41, 42, 0)],
        dim=dim,
        dtype=torch.bfloat16,
        rule=WindowRule(256, 64, 16, 4),
    )
    expected = reference(world)
    for poisoned in (0, 1):
        copy = world.new_k.clone(), world.new_v.clone()
        piece = world.pieces[poisoned]
        for x in (world.new_k, world.new_v):
            x[piece.first : piece.first + piece.n1 - piece.n0] = torch.nan
        others = torch.ones(len(world.q), dtype=torch.bool, device=DEVICE)
        others[piece.first : piece.first + piece.n1 - piece.n0] = False
        error = relative_error(run(world)[others], expected[others])
        assert error < TOLERANCE[torch.bfloat16], error
        world.new_k[:], world.new_v[:] = copy


@pytest.mark.gpu
def test_pages_past_2_to_the_31_elements():
    """E1 (sgl-project/sglang#20389): the last page of a pool of more than 2^31 elements."""
    world = World([(700, 801, 0)], dim=128, dtype=torch.bfloat16, rule=WindowRule(256, 64, 16, 4))
    expected = reference(world)
    page = world.pool[0].numel()
    pages = (1 << 31) // page + len(world.pool) + 2
    pool = torch.zeros(pages, *world.pool.shape[1:], dtype=torch.bfloat16, device=DEVICE)
    shift = pages - len(world.pool)
    pool[shift:] = world.pool
    world.pool, world.table, world.old = pool, world.table + shift, world.old + shift
    assert relative_error(run(world), expected) < TOLERANCE[torch.bfloat16]
