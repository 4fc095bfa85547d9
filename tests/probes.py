"""Functions that run inside a scheduler's process and tell a test what the backend does there."""

from functools import partial

import torch


def watch(control) -> None:
    """``on_step``: record the pool's books at every step and all kept positions at the end.

    Raises if a step leaves the books wrong. ``Result.records`` gets one dict a step.
    """
    pool = control.scheduler.token_to_kv_pool_allocator.get_kvcache()
    if control.step == 0:
        _watch_seals(control, pool)
        _watch_returns(control, pool)
    pool.store.check()
    control.record(
        {
            "free": pool.ledger.free,
            "total": pool.ledger.num_pages,
            "rows": {
                row: (
                    state.n,
                    len(pool.ledger.owned(row)),
                    pool.rows.needs.private(state, state.n),
                )
                for row, state in pool.rows.live.items()
            },
        }
    )


def collect(scheduler) -> dict:
    """``collect``: kept positions and scores by rid, pages given back, and the idle pool."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    pool.store.check()
    return {
        "kept": pool.test_kept,
        "scores": pool.test_scores,
        "returned": pool.test_returned,
        "free": pool.ledger.free,
        "total": pool.ledger.num_pages,
        "live": len(pool.rows.live),
        "locked": pool.store.trie.locked_pages,
        "cached": pool.store.trie.locked_pages + pool.store.trie.unlocked_pages,
        "capacity": pool.size,
        "bytes": pool.get_kv_size_bytes(),
    }


def _watch_seals(control, pool) -> None:
    from tangram_sglang.backend.compressor import Compressor
    from tangram_sglang.backend.req_pool import TangramReqToTokenPool

    rid_of, alloc = {}, TangramReqToTokenPool.alloc

    def note_rows(self, reqs):
        indices = alloc(self, reqs)
        rid_of.update((req.kv.req_pool_idx, req.rid) for req in reqs)
        return indices

    TangramReqToTokenPool.alloc = note_rows
    pool.test_kept, pool.test_scores = {}, {}
    names = sorted(h for g in pool.plan.layout.groups if g.sliding_window is None for h in g.heads)
    size = pool.plan.layout.rule.window
    seal, scores = Compressor.seal, Compressor._scores
    last = {}

    def keep_scores(self, *args):
        last["scores"] = scores(self, *args)
        return last["scores"]

    def keep(self, row, window, k, v, heads, *rest):
        kept = seal(self, row, window, k, v, heads, *rest)
        for mine, offsets in kept:
            for i, positions in zip(mine.tolist(), offsets, strict=True):
                key = (*names[int(heads[i])], window)
                pool.test_kept.setdefault(rid_of[row], {})[key] = (
                    positions + window * size
                ).tolist()
                if last["scores"] is not None:
                    mine_scores = last["scores"][i].to(torch.float32).numpy().copy()
                    pool.test_scores.setdefault(rid_of[row], {})[key] = mine_scores
        return kept

    Compressor.seal, Compressor._scores = keep, keep_scores


def _watch_returns(control, pool) -> None:
    """Count pages that live rows give back, and how many of them sealing or sliding explains."""
    pool.test_returned = {"given": 0, "explained": 0}
    rows, ledger = pool.rows, pool.ledger
    advance, give = rows.advance, ledger.give

    def explained(row, n1) -> int:
        layout, state = rows.layout, rows.live[row]
        n0 = state.n
        total = 0
        for kind in layout.kinds:
            first, end = (layout.held_start(kind.sliding_window, n, state.floor) for n in (n0, n1))
            full = kind.sliding_window is None
            first = max(first, state.cached_tokens if full else state.cached_slide)
            gone = min(end // layout.rule.page, layout.rule.pages(n0)) - first // layout.rule.page
            total += max(0, gone) * (kind.end - kind.first)
        s0, s1 = (layout.rule.sealed(n, state.floor) for n in (n0, n1))
        begun = layout.queries.begun(layout.rule, n0)
        return total + max(0, min(s1, begun) - s0) * layout.queries.pages

    def counting_advance(targets):
        pool.test_returned["explained"] += sum(explained(row, n1) for row, n1 in targets)
        ledger.give = partial(_count, pool, give)
        try:
            advance(targets)
        finally:
            ledger.give = give

    rows.advance = counting_advance


def _count(pool, give, pages, row, last=False):
    pool.test_returned["given"] += len(pages)
    give(pages, row, last)
