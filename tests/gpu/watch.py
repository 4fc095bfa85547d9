"""Functions that run inside a scheduler's process on a GPU and tell a test what the backend does."""

import torch


def watch(control) -> None:
    """``on_step``: check the pool's books before every step, and keep what each sealing keeps."""
    pool = control.scheduler.token_to_kv_pool_allocator.get_kvcache()
    if control.step == 0:
        pool.test_decode_steps = 0
        _watch_seals(pool)
    pool.store.check()


def forbid_waits(control) -> None:
    """``on_step``: a decode step that waits for the device raises; books are checked as in ``watch``."""
    pool = control.scheduler.token_to_kv_pool_allocator.get_kvcache()
    pool.store.check()
    if control.step == 0:
        pool.test_kept, pool.test_scores, pool.test_decode_steps = {}, {}, 0
        runner = control.scheduler.tp_worker.model_runner
        forward = runner.forward

        def guarded(batch, *args, **kwargs):
            if not batch.forward_mode.is_decode():
                return forward(batch, *args, **kwargs)
            torch.cuda.set_sync_debug_mode("error")
            try:
                pool.test_decode_steps += 1
                return forward(batch, *args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        runner.forward = guarded


def collect(scheduler) -> dict:
    """Kept positions and scores by rid and (layer, head, window), and the idle pool."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    pool.store.check()
    return {
        "kept": pool.test_kept,
        "scores": pool.test_scores,
        "decode_steps": pool.test_decode_steps,
        "seconds": pool.rows.tally.compression_s,
        "free": pool.ledger.free,
        "total": pool.ledger.num_pages,
        "live": len(pool.rows.live),
        "locked": pool.store.trie.locked_pages,
        "cached": pool.store.trie.locked_pages + pool.store.trie.unlocked_pages,
    }


def _watch_seals(pool) -> None:
    from tangram_sglang.backend.req_pool import TangramReqToTokenPool
    from tangram_sglang.backend.sealer import Sealer

    rid_of, alloc = {}, TangramReqToTokenPool.alloc

    def note_rows(self, reqs):
        indices = alloc(self, reqs)
        rid_of.update((req.kv.req_pool_idx, req.rid) for req in reqs)
        return indices

    TangramReqToTokenPool.alloc = note_rows
    pool.test_kept, pool.test_scores = {}, {}
    names = sorted(h for g in pool.plan.layout.groups if g.sliding_window is None for h in g.heads)
    size = pool.plan.layout.rule.window
    seal, scores, last = Sealer.seal, Sealer._scores, {}

    def keep_scores(self, *args):
        last["scores"] = scores(self, *args)
        return last["scores"]

    def keep(self, units, old, fresh, heads, windows):
        positions = seal(self, units, old, fresh, heads, windows)
        if positions is None or not len(units):
            return positions
        counts, chosen = heads.index.kept.tolist(), positions.tolist()
        found = last["scores"].cpu().numpy()
        for i, (row, window) in enumerate(units[:, :2].tolist()):
            for h, count in enumerate(counts if row else ()):
                key = (*names[heads.span.start + h], window)
                mine = [window * size + p for p in chosen[i][h][:count]]
                pool.test_kept.setdefault(rid_of[row], {})[key] = mine
                pool.test_scores.setdefault(rid_of[row], {})[key] = found[i, h].copy()
        return positions

    Sealer.seal, Sealer._scores = keep, keep_scores
