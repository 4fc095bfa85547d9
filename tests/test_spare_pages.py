"""What a GPU's step overwrites while it still reads it fits into the spare pages (docs/gpu.md).

The books are the same on a CPU, which copies elsewhere; here it is told to have as many spare pages.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tangram_sglang.backend import build
from tangram_sglang.backend.budget import TangramPrefillBudget
from tangram_sglang.backend.build import spare_pages
from tangram_sglang.cache.store import PrefixStore
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.reclaim import ReclaimRule
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.pool.ledger import Ledger
from tangram_sglang.pool.rows import Rows
from tests.harness import Req
from tests.probes import watch
from tests.reference.tiny import random_tokens, save, tiny_llama
from tests.serving import TINY_ENV, serve

# its queries are held in pages of their own, which change hands like the tails'
ENV = {**TINY_ENV, "TANGRAM_RETENTION": "0.5", "TANGRAM_SCORER": "snapkv"}


def spared(control) -> None:
    """``on_step``: as on a GPU; records how many pages each step reads and hands out, and rows."""
    pool = control.scheduler.token_to_kv_pool_allocator.get_kvcache()
    if control.step == 0:
        rows, count = pool.rows, spare_pages(pool.plan.layout, "cuda")
        pool.spare, rows.spare = range(count), count
        advance = rows.advance

        def noting(targets):
            advance(targets)
            read = [x.ravel() for step in rows.granted for x in (*step.tail, *step.queries)]
            if read:
                lost = len(np.intersect1d(np.concatenate(read), rows.taken))
                control.record({"rows": {}, "lost": lost, "spare": count, "batch": len(targets)})

        rows.advance = noting
    watch(control)


def steps(result) -> list[dict]:
    return [record for record in result.records if "lost" in record]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.set_num_threads(1)
    return save(tiny_llama(seed=6), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(("turns", "queries"), [(2, 0), (3, 0), (4, 0), (3, 4)])
def test_second_turns_of_one_step_move_one_tail_between_them(turns, queries):
    """Each would fit with the pages that it sets free by sealing its own cached tail."""
    full = ModelShape(tuple(LayerShape(i, 3, 3, 8, None, 1.0) for i in range(3)))
    layout = KVLayout.build(
        full,
        WindowRule(16, 8, 4, 2),
        budgets=[i / 9 for i in range(9)],
        retention=0.4,
        per_group=3,
        grouping="global",
        max_tokens=300,
    )
    if queries:
        layout = layout.with_queries(full, queries)
    most = 0
    for pages in range(30, 50 * turns):
        lost, admitted = _second_turns(layout, pages, turns)
        assert lost <= spare_pages(layout, "cuda"), f"{admitted} of {turns} in {pages} pages"
        most = max(most, lost)
    assert most > 0 and admitted == turns


def _second_turns(layout: KVLayout, pages: int, turns: int) -> tuple[int, int]:
    """Pages that one prefill step of many second turns reads and hands out; turns admitted."""
    rows = Rows(layout, Ledger(pages), turns)
    rows.spare = spare_pages(layout, "cuda")
    store, locks = PrefixStore(rows), {}
    rows.sole_from = lambda row: locks[row].sole_from(layout.rule.page)

    def leave(row, start):
        before, locks[row] = locks[row], locks[row].behind(start)
        store.trie.lock(locks[row])
        store.trie.unlock(before)

    rows.tail_left = leave
    texts = [[100 * turn + i % 100 for i in range(80)] for turn in range(turns)]
    for text in texts:
        if rows.ledger.free + store.trie.unlocked_pages >= layout.peak_pages(40):
            rows.open(1, 40)
            rows.advance([(1, 40)])
            store.publish(1, None, text[:40])
            rows.close(1)
    pool = SimpleNamespace(rows=rows, plan=SimpleNamespace(layout=layout))
    budget = TangramPrefillBudget(SimpleNamespace(page_size=1), None, pool)
    targets = []
    for row, text in enumerate(texts, 1):
        prefix = pool.candidate = store.trie.match(None, text, 79)
        store.trie.lock(prefix)
        pool.reachable_pages = rows.ledger.free + store.trie.unlocked_pages
        sizes = {"extend_input_len": 80 - prefix.tokens, "max_new_tokens": 0}
        fits, _ = budget.check_prefill(
            **sizes, total_tokens=80, input_tokens=80, swa_host_hit_length=0, chunk_limit=None
        )
        if not fits:
            store.trie.unlock(prefix)
            break
        budget.reserve(**sizes)
        locks[row] = prefix
        targets.append((row, 80))
    for row, _ in targets:
        windows, tail = ([x.pages for x in part] for part in (locks[row].windows, locks[row].tail))
        rows.open(row, 80, windows, tail)
    rows.advance(targets)
    read = [pages.ravel() for step in rows.granted for pages in (*step.tail, *step.queries)]
    return len(np.intersect1d(np.concatenate([*read, []]), rows.taken)), len(targets)


@pytest.mark.server
def test_rows_that_seal_together_take_cached_pages_before_their_own(llama):
    """The prefix cache fills the pool, as it does on a server that has run for a while."""
    old = [Req(random_tokens(120, seed=i), 1, rid=f"old{i}-") for i in range(12)]
    rows = [Req(random_tokens(20, seed=50 + i), 40, rid=f"r{i}-", arrive=8) for i in range(8)]
    result = serve(llama, old + rows, env=ENV, on_step=spared, max_total_tokens=1300)
    assert all(len(result[r.rid].output_ids) == 40 for r in rows)
    assert all(step["lost"] <= step["spare"] for step in steps(result))
    assert max(step["lost"] for step in steps(result) if step["batch"] == 8) > 0


def test_a_prompt_that_fills_a_pool_with_sliding_layers_takes_the_pages_it_slides_past():
    """Layers as Gemma 3 has them; the pool holds this prompt and no page more."""
    windows = [21 if i % 6 else None for i in range(12)]
    layout = KVLayout.build(
        ModelShape(tuple(LayerShape(i, 4, 2, 8, x, 1.0) for i, x in enumerate(windows))),
        WindowRule(16, 8, 4, 2),
        budgets=[0.5] * 4,
        retention=0.5,
        per_group=2,
        grouping="global",
        max_tokens=300,
    )
    lost, _ = _lost(layout)
    assert layout.num_full * layout.rule.tail_pages < lost


def test_a_prompt_that_fills_a_pool_takes_pages_of_queries_it_scores():
    """Windows are sealed long after their end, so that several hold all of their queries."""
    shape = ModelShape(tuple(LayerShape(i, 4, 2, 8, None, 1.0) for i in range(3)))
    layout = KVLayout.build(
        shape,
        WindowRule(16, 56, 4, 2),
        budgets=[0.1] * 6,
        retention=0.25,
        per_group=2,
        grouping="global",
        max_tokens=300,
    ).with_queries(shape, 16)
    assert layout.queries.slots == 5
    lost, queries = _lost(layout)
    assert lost > queries > 0


@pytest.mark.parametrize("held", ["budget", "whole"])
def test_a_pool_that_spare_pages_fill_says_so(monkeypatch, held):
    shape = ModelShape((LayerShape(0, 2, 2, 8, None, 1.0),))
    whole = ReclaimRule(16, 8, 4, 2, longest=4000)
    layout = KVLayout.build(
        shape,
        whole if held == "whole" else WindowRule(16, 8, 4, 2),
        budgets=[0.5] * 2,
        retention=0.5,
        per_group=2,
        grouping="global",
        max_tokens=4000,
    )
    spare = spare_pages(layout, "cuda")
    monkeypatch.setattr(build, "get_available_gpu_memory", lambda *_: 1)
    monkeypatch.setenv("TANGRAM_POOL_BYTES", str((spare + 1) * layout.page_bytes(2)))
    model = SimpleNamespace(tangram_plan=SimpleNamespace(layout=layout))
    kvc = SimpleNamespace(device="cuda", gpu_id=0, kv_cache_dtype=torch.bfloat16, model=model)
    with pytest.raises(TangramError, match=f"beside {spare} spare pages") as error:
        build.TangramPoolConfigurator(kvc).calculate_pool_sizes(0, 1)
    assert ("--context-length" in str(error.value)) == (held == "whole")


def _lost(layout: KVLayout) -> tuple[int, int]:
    """Most pages that a chunk in a full pool reads and hands out; most of queries among them."""
    rows, found = Rows(layout, Ledger(layout.peak_pages(250)), 1), []
    rows.spare = spare_pages(layout, "cuda")
    rows.open(1, 250)
    for n in range(50, 251, 50):
        rows.advance([(1, n)])
        step = rows.granted[0]
        reads = [x.ravel() for x in step.tail], [*step.queries, np.empty(0, np.int32)]
        tails, queries = (len(np.intersect1d(np.concatenate(x), rows.taken)) for x in reads)
        assert tails + queries <= rows.spare
        found.append((tails + queries, queries))
    return max(x for x, _ in found), max(x for _, x in found)
