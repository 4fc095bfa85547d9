"""Prometheus metrics under ``tangram:``; exist only with --enable-metrics (docs/metrics.md)."""

from collections.abc import Callable

import numpy as np

from tangram_sglang.backend.drift import DriftWatch
from tangram_sglang.backend.kv_pool import TangramKVPool


class KVMetrics:
    """Exports a pool's tally and the state of its pages.

    Args:
        pool: with its prefix cache in place.
    """

    def __init__(self, pool: TangramKVPool):
        # imported late: prometheus_client picks its mode from the environment SGLang sets
        from prometheus_client import Counter, Gauge

        self._pool = pool
        self._layout = pool.plan.layout
        self._totals = [
            (Counter(f"tangram:{name}", text), total, [0])
            for name, text, total in self._counted(pool)
        ]
        self._states = [
            (Gauge(f"tangram:{name}", text, multiprocess_mode="mostrecent"), state)
            for name, text, state in _states(pool)
        ]
        self._finished = {
            name: Counter(f"tangram:finished_{name}", text) for name, text in _FINISHED.items()
        }
        self._drift = None if pool.drift is None else _DriftMetrics(pool.drift)
        self.publish()

    def publish(self) -> None:
        """Bring every counter and gauge up to date; cheap enough for every step."""
        for counter, total, seen in self._totals:
            value = total()
            if value > seen[0]:
                counter.inc(value - seen[0])
                seen[0] = value
        for gauge, state in self._states:
            gauge.set(state())
        if self._drift is not None:
            self._drift.publish()

    def finished(self, n: int, floor: int) -> None:
        """Count a request that ended with ``n`` tokens stored and started from ``floor`` windows."""
        layout, itemsize = self._layout, self._pool.dtype.itemsize
        self._finished["requests"].inc()
        self._finished["kv_tokens"].inc(n)
        self._finished["kv_entries"].inc(layout.total_entries(n, floor))
        self._finished["kv_bytes"].inc(layout.pages(n, floor) * layout.page_bytes(itemsize))
        self._finished["kv_bytes_full"].inc(layout.full_bytes(n, itemsize))

    def _counted(self, pool: TangramKVPool) -> list[tuple[str, str, Callable[[], float]]]:
        tally, layout = pool.rows.tally, self._layout
        kept, seen = layout.window_entries, layout.window_tokens
        return [
            ("admissions", "Requests that were given a row.", lambda: tally.admissions),
            ("prefix_hits", "Admissions behind a cached prefix.", lambda: tally.hits),
            ("prefix_hit_tokens", "True tokens reused.", lambda: tally.hit_tokens),
            (
                "prefix_branches",
                "Admissions that could not start from all that the cache held for them.",
                lambda: tally.branches,
            ),
            (
                "prefix_given_up_tokens",
                "Cached true tokens computed again, because too few behind them are raw.",
                lambda: tally.given_up_tokens,
            ),
            ("windows_sealed", "Windows sealed, over all requests.", lambda: tally.windows_sealed),
            (
                "entries_kept",
                "K/V pairs kept by sealing, over all layers and heads.",
                lambda: tally.windows_sealed * kept,
            ),
            (
                "entries_dropped",
                "K/V pairs dropped by sealing, over all layers and heads.",
                lambda: tally.windows_sealed * (seen - kept),
            ),
            (
                "compression_seconds",
                "Seconds spent scoring, selecting and writing sealed windows.",
                lambda: tally.compression_s,
            ),
            (
                "evicted_pages",
                "Pages that the prefix cache gave back for want of memory.",
                lambda: tally.evicted_pages,
            ),
        ]


class _DriftMetrics:
    """Exports what a ``DriftWatch`` counted."""

    def __init__(self, watch: DriftWatch):
        from prometheus_client import Counter

        self._watch = watch
        self._windows, self._seen = 0, np.zeros(len(watch.heads), dtype=np.int64)
        self._looked_at = Counter("tangram:drift_windows", "Windows compared with the calibration.")
        self._exceeded = Counter(
            "tangram:drift_exceeded",
            "Of these, windows in which a head asked for more than nearly all of the calibration's.",
            ["layer", "head"],
        )

    def publish(self) -> None:
        windows, exceeded = self._watch.read()
        if windows == self._windows:
            return
        self._looked_at.inc(windows - self._windows)
        for i in np.flatnonzero(exceeded - self._seen):
            layer, head = self._watch.heads[i]
            self._exceeded.labels(layer, head).inc(int(exceeded[i] - self._seen[i]))
        self._windows, self._seen = windows, exceeded


_FINISHED = {
    "requests": "Requests that finished.",
    "kv_tokens": "True tokens of finished requests at their end.",
    "kv_entries": "K/V pairs, over all layers and heads, that finished requests held at their end.",
    "kv_bytes": "Bytes of pages that finished requests held at their end.",
    "kv_bytes_full": "Bytes that an uncompressed cache would have held for the same tokens.",
}


def _states(pool: TangramKVPool) -> list[tuple[str, str, Callable[[], float]]]:
    ledger, rows, trie = pool.ledger, pool.rows, pool.store.trie
    cached = "Pages of the prefix cache that"
    return [
        ("pages_total", "Pages of the pool.", lambda: ledger.num_pages),
        ("pages_free", "Pages that nobody holds.", lambda: ledger.free),
        (
            "pages_private",
            "Pages that live requests hold and share with nobody.",
            lambda: ledger.num_pages - ledger.free - trie.locked_pages - trie.unlocked_pages,
        ),
        ("pages_cached_locked", f"{cached} live requests read.", lambda: trie.locked_pages),
        ("pages_cached_evictable", f"{cached} no request reads.", lambda: trie.unlocked_pages),
        (
            "pages_reserved",
            "Pages promised to prompts that are still in prefill, not taken yet.",
            lambda: rows.promised,
        ),
    ]
