"""Prometheus counters of what finished requests held; exist only with --enable-metrics."""

from tangram_sglang.plan.layout import KVLayout


class KVMetrics:
    """Counters under ``tangram:``, added to once a request finishes.

    Args:
        layout: closed forms of entries and pages.
        itemsize: bytes of a K or V element.
    """

    def __init__(self, layout: KVLayout, itemsize: int):
        # imported late: prometheus_client picks its mode from the environment SGLang sets
        from prometheus_client import Counter

        self._layout = layout
        self._itemsize = itemsize
        self._requests = Counter("tangram:finished_requests", "Requests that finished.")
        self._tokens = Counter(
            "tangram:finished_kv_tokens", "True tokens of finished requests at their end."
        )
        self._entries = Counter(
            "tangram:finished_kv_entries",
            "K/V pairs, over all layers and heads, that finished requests held at their end.",
        )
        self._bytes = Counter(
            "tangram:finished_kv_bytes", "Bytes of pages that finished requests held at their end."
        )
        self._full = Counter(
            "tangram:finished_kv_bytes_full",
            "Bytes that an uncompressed cache would have held for the same tokens.",
        )

    def finished(self, n: int, floor: int) -> None:
        """Count a request that ended with ``n`` tokens stored and started from ``floor`` windows."""
        self._requests.inc()
        self._tokens.inc(n)
        self._entries.inc(self._layout.total_entries(n, floor))
        self._bytes.inc(self._layout.pages(n, floor) * self._layout.page_bytes(self._itemsize))
        self._full.inc(self._layout.full_bytes(n, self._itemsize))
