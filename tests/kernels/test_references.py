"""The PyTorch operations against loops that cannot be wrong, on odd sizes and poisoned pools."""

import math

import numpy as np
import pytest
import torch

from tangram_sglang.kernels.decode_reference import decode_reference
from tangram_sglang.kernels.prefill_reference import prefill_reference, sliding_reference
from tangram_sglang.kernels.select_reference import select_reference
from tangram_sglang.kernels.slots_reference import column_rows, entry_rows, page_rows
from tangram_sglang.plan.window import WindowRule

with_and_without_sinks = pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])


def attention(q, k, v, scaling, sink=None):
    """One query [D] against [N, D]."""
    logits = k.double() @ q.double() * scaling
    if sink is not None:
        logits = torch.cat([logits, sink.double().view(1)])
    weights = logits.softmax(dim=0)[: len(k)]
    return (weights[:, None] * v.double()).sum(dim=0).float()


def random_sinks(has_sinks, *shape):
    """Some take nearly all of a softmax; and each query head's, or None."""
    sinks = torch.randn(shape) * 4 if has_sinks else None
    return sinks, (lambda *at: None) if sinks is None else (lambda *at: sinks[at])


@pytest.mark.parametrize(
    ("kept", "sinks", "tokens"), [(1, 0, 1), (3, 2, 7), (63, 4, 111), (64, 0, 64)]
)
def test_selection_equals_a_sort_by_score_then_position(kept, sinks, tokens):
    scores = torch.randint(0, 5, (3, tokens)).float()
    scores[1, ::3] = torch.nan
    found = select_reference(scores, kept, sinks)
    for line, positions in zip(scores.tolist(), found.tolist(), strict=True):
        key = [
            (0, i) if i < sinks else (1, 0 if not math.isnan(s) else 1, -s, i)
            for i, s in enumerate(line)
        ]
        order = sorted(range(tokens), key=lambda i: tuple(map(float, key[i])))
        assert positions == sorted(order[:kept])


def test_equal_scores_keep_the_lowest_positions():
    """E13 (pytorch/pytorch#196177)."""
    assert select_reference(torch.zeros(2, 50), 7, 0).tolist() == [list(range(7))] * 2


@pytest.mark.parametrize(
    ("sealed", "tail_start", "n"),
    [([0, 0], 0, 1), ([8, 24], 32, 41), ([4, 4], 32, 36), ([16, 4], 64, 101)],
)
def test_entry_rows_name_the_slot_of_every_entry(sealed, tail_start, n):
    page, per_group, ring = 4, 3, 11
    generator = np.random.default_rng(n)
    widths = [s // page for s in sealed]
    offset = np.array([2, 2 + widths[0] + ring])
    ring_offset = offset + widths
    table = generator.permutation(500)[: ring_offset[1] + ring].astype(np.int32)
    rows = entry_rows(
        torch.from_numpy(table),
        torch.from_numpy(offset),
        torch.from_numpy(ring_offset),
        ring,
        torch.tensor(sealed),
        tail_start,
        n,
        per_group,
        page,
    )
    for g in range(2):
        expected = []
        for i in range(sealed[g]):
            expected.append((table[offset[g] + i // page], i % page))
        for token in range(tail_start, n):
            expected.append((table[ring_offset[g] + token // page % ring], token % page))
        expected = [int(p) * per_group * 2 * page + slot for p, slot in expected]
        assert rows[g, : len(expected)].tolist() == expected
        assert set(rows[g, len(expected) :].tolist()) <= {expected[-1]}


def test_rows_of_a_page_are_its_slots_in_the_column_asked_for():
    pool = torch.arange(5 * 3 * 2 * 4).view(5, 3, 2, 4)
    rows = column_rows(page_rows(torch.tensor([[3, 1]]), 3, 4), torch.tensor([2]), 4)
    assert torch.equal(pool.flatten()[rows], pool[[3, 1], 2, 0].reshape(1, 8))
    assert torch.equal(pool.flatten()[rows + 4], pool[[3, 1], 2, 1].reshape(1, 8))


@pytest.mark.parametrize(
    ("heads", "ratio", "dim", "lengths"),
    [(1, 1, 8, [1]), (3, 3, 16, [1, 63, 64]), (2, 5, 80, [65, 2])],
    ids=["one", "H3-HQ9-D16", "H2-HQ10-D80"],
)
@with_and_without_sinks
def test_decode_reads_exactly_the_entries_each_head_holds(heads, ratio, dim, lengths, has_sinks):
    page = 4
    sinks, sink = random_sinks(has_sinks, heads * ratio)
    pool = torch.full((4000, dim), torch.nan)
    rows = torch.randperm(400)[: heads * max(lengths)].view(heads, -1) * 2 * page
    q = torch.randn(heads * ratio, dim)
    expected = torch.empty_like(q)
    for h, length in enumerate(lengths):
        k, v = torch.randn(length, dim), torch.randn(length, dim)
        pool[rows[h, :length]], pool[rows[h, :length] + page] = k, v
        rows[h, length:] = rows[h, length - 1]
        for r in range(ratio):
            i = h * ratio + r
            expected[i] = attention(q[i], k, v, 0.3, sink(i))
    found = decode_reference(q, pool, rows, torch.tensor(lengths), page, 0.3, sinks)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("n0", "n1", "recent"), [(0, 1, 8), (0, 150, 5), (70, 71, 0), (37, 139, 20), (24, 25, 8)]
)
@with_and_without_sinks
def test_prefill_gives_every_query_its_own_epoch(n0, n1, recent, has_sinks):
    rule, kept, dim = WindowRule(16, recent, 4, 2), 8, 8
    heads, ratio = 2, 3
    sinks, sink = random_sinks(has_sinks, heads, ratio)
    k, v = torch.randn(heads, n1, dim), torch.randn(heads, n1, dim)
    q = torch.randn(heads, ratio, n1 - n0, dim)
    windows = rule.sealed(n1)
    chosen = [
        [sorted((torch.randperm(16)[:kept] + 16 * j).tolist()) for j in range(windows)]
        for _ in range(heads)
    ]
    flat = [[p for w in per_head for p in w] for per_head in chosen]
    raw_start = rule.sealed(n0) * 16
    sealed_k = torch.stack([k[h, flat[h]] for h in range(heads)])
    sealed_v = torch.stack([v[h, flat[h]] for h in range(heads)])
    raw = k[:, raw_start:], v[:, raw_start:], raw_start
    found = prefill_reference(q, sealed_k, sealed_v, *raw, rule, 0.3, sinks=sinks)
    for h in range(heads):
        for p in range(n0, n1):
            j = max(0, (p - recent) // 16)
            seen = [p for w in chosen[h][:j] for p in w] + list(range(16 * j, p + 1))
            for r in range(ratio):
                expected = attention(q[h, r, p - n0], k[h, seen], v[h, seen], 0.3, sink(h, r))
                assert torch.allclose(found[h, r, p - n0], expected, atol=1e-5)


@pytest.mark.parametrize(("past", "new", "window"), [(0, 30, 8), (13, 9, 5), (40, 1, 64)])
@with_and_without_sinks
def test_sliding_sees_the_window_and_no_more(past, new, window, has_sinks):
    sinks, sink = random_sinks(has_sinks, 2, 3)
    k, v = torch.randn(2, past + new, 8), torch.randn(2, past + new, 8)
    q = torch.randn(2, 3, new, 8)
    found = sliding_reference(q, k, v, window, 0.3, sinks, tile=7)
    for h in range(2):
        for i in range(new):
            seen = slice(max(0, past + i - window + 1), past + i + 1)
            for r in range(3):
                expected = attention(q[h, r, i], k[h, seen], v[h, seen], 0.3, sink(h, r))
                assert torch.allclose(found[h, r, i], expected, atol=1e-5)
