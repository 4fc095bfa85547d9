"""Requests behind the same cached prefix read its windows together: who, and with which result."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tangram_sglang.backend import split_dispatch
from tangram_sglang.backend.shared_reads import SharedReads, runs
from tangram_sglang.backend.split_dispatch import SplitDispatch
from tangram_sglang.cache.store import PrefixStore
from tangram_sglang.kernels.shared_prefix import LEADER, LINE, READERS, WINDOWS
from tangram_sglang.kernels.workspace import Workspace
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.pool.ledger import Ledger
from tangram_sglang.pool.rows import Rows
from tests.kernels.sides import RULE, random_qkv


def paths(*found):
    return [np.array(x, dtype=np.int32) for x in found]


def test_neighbours_in_the_order_of_their_paths_read_together():
    a, b = [5, 6, 7, 8], [5, 6, 9]
    found = list(runs(paths(a, [1, 2], b, [], a, [1, 3], [4]), 4))
    # three begin with 5 6: 4 windows saved, as much as by the two equal ones alone
    assert [(sorted(requests), windows) for requests, windows in found] == [
        ([1, 5], 1),
        ([0, 4], 4),
    ]
    assert list(runs(paths([5], [5], [5], [5], [5], [5]), 4)) == [([0, 1, 2, 3], 1), ([4, 5], 1)]
    assert list(runs(paths([5], [5], [5]), 2)) == [([0, 1], 1)]
    assert not list(runs(paths([1], [2], []), 4))


def test_every_run_is_a_common_beginning():
    generator = np.random.default_rng(0)
    for _ in range(50):
        found = paths(*(generator.integers(1, 3, generator.integers(0, 6)) for _ in range(12)))
        seen = []
        for requests, windows in runs(found, 4):
            assert 1 < len(requests) <= 4 and windows > 0
            same = {tuple(found[b][:windows]) for b in requests}
            assert len(same) == 1 and len(next(iter(same))) == windows
            seen += requests
        assert len(seen) == len(set(seen))


SINKS = torch.tensor([1.5, -2.0, 6.0, 0.5])


@pytest.mark.parametrize(
    ("splits", "sinks", "slide"),
    [("map", None, None), ("equal", None, None), ("map", SINKS, 8), ("map", None, 40)],
    ids=["map", "equal", "map-sinks-sliding", "map-sliding-over-windows"],
)
def test_rows_behind_one_prefix_decode_as_if_alone(sides, splits, sinks, slide):
    """The two backends step by step; then one row fewer, in another order.

    Layers with a sliding window have nothing that is read together.
    """
    cpu, gpu = sides(500, splits=splits, slide=slide)
    generator = torch.Generator().manual_seed(0)
    document = list(random_qkv(85, generator))
    for side in (cpu, gpu):
        side.pool.rows.open(1, 85)
        side.forward([(1, 85)], False, document, sinks=sinks)
        side.pool.store.publish(1, (), tuple(range(85)))
    windows = cpu.pool.rows.live[1].cached_windows
    assert windows == 4
    question = list(random_qkv(12, generator))
    for row in (2, 3):
        for side in (cpu, gpu):
            prefix = side.pool.store.trie.match((), range(85), 85)
            assert (prefix.tokens, len(prefix.windows)) == (84, windows)
            known = ([x.pages for x in y] for y in (prefix.windows, prefix.tail, prefix.slide))
            side.pool.rows.open(row, 96, *known)
            side.forward([(row, 96)], False, question, sinks=sinks)
    for rows in ([3, 1, 2], [3, 1, 2], [2, 1]):
        targets = [(row, cpu.pool.rows.live[row].n + 1) for row in rows]
        qkv = list(random_qkv(len(rows), generator))
        expected, found = (side.forward(targets, True, qkv, sinks=sinks) for side in (cpu, gpu))
        for a, b in zip(expected, found, strict=True):
            assert torch.allclose(a, b, atol=1e-5)
        dispatch = gpu.backend._splits.of(len(rows))[0]
        shared = dispatch.shared.cpu().numpy()
        if splits == "equal" or len(rows) == 2:
            # of two, one saves no more than a piece more for each head costs
            assert (shared[:, WINDOWS] == 0).all()
            continue
        assert (shared[:, WINDOWS] == windows).all()
        lead = shared[0, LEADER]
        readers = shared[lead, READERS : READERS + 3].tolist()
        assert sorted(readers) == [0, 1, 2] and readers[0] == lead
        assert [readers.index(b) for b in range(3)] == shared[:, LINE].tolist()


def test_rows_that_other_requests_take_share_what_these_have():
    """The same rows in the same order, step after step, while requests and their prefixes change."""
    shape = ModelShape((LayerShape(0, 4, 2, 16, None, 0.25),))
    plan = {"budgets": [0.5, 0.5], "retention": 0.5, "per_group": 2, "grouping": "global"}
    rows = Rows(KVLayout.build(shape, RULE, max_tokens=200, **plan), Ledger(400), 3)
    store, shared = PrefixStore(rows), SharedReads(rows, 4, 1, 1e9)

    def windows():
        """Read together by rows 1, 2 in their next token."""
        rows.advance([(row, rows.live[row].n + 1) for row in (1, 2)])
        return shared.of(rows.granted, 3)[:, WINDOWS].tolist()

    for row in (1, 2):
        rows.open(row, 80)
        rows.advance([(row, 80)])
    assert windows() == [0, 0, 0]
    # both computed the same; it is one copy from now on
    for row in (1, 2):
        store.publish(row, (), tuple(range(80)))
    assert windows() == [4, 4, 0]
    known = [rows.window_pages(1, j) for j in range(4)]
    for count in (2, 0, 4):
        rows.close(2)
        rows.open(2, 90, known[:count])
        rows.advance([(2, 90)])
        assert windows() == [count, count, 0]


def test_requests_read_alone_rather_than_that_a_workspace_is_refused(monkeypatch):
    """64 KV heads of one query head: a workspace for 4,096 requests is 258 MiB where all read alone
    and 1,290 where four read together."""
    monkeypatch.setattr(split_dispatch, "resident_programs", lambda *a, **k: 924)
    tables = SimpleNamespace(heads=64, kept_pages=torch.ones(1, 64, dtype=torch.int32))
    pool = torch.empty(2, 1, 2, 16, 128, device="meta")
    for most, readers in ((1, 4), (2048, 4), (4096, 3), (8192, 1)):
        splits = SplitDispatch(tables, pool, 1, most)
        splits.reserve(most)
        assert splits.readers == readers
        assert splits._workspace.mid.nbytes < Workspace.CAP
    assert SplitDispatch(tables, pool, 1, 1, equal=True).readers == 1
