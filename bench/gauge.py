"""Samples a gauge of a server's /metrics while something runs."""

import threading
from typing import Self

from bench.server_api import get

PERIOD_S = 0.25


def read(page: str, name: str) -> float:
    """The sum over labels of a gauge or counter; 0 where it is not on the page yet."""
    # parsing the whole page would take the client's time while it measures
    return sum(
        float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith((f"{name}{{", f"{name} "))
    )


class Gauge:
    """Context manager: samples in a thread until the block ends; `peak` is the largest value."""

    def __init__(self, url: str, name: str, period_s: float = PERIOD_S):
        self.samples: list[float] = []
        self._url, self._name, self._period_s = url, name, period_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @property
    def peak(self) -> float:
        return max(self.samples, default=0.0)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.is_set():
            self.samples.append(read(get(f"{self._url}/metrics"), self._name))
            self._over.wait(self._period_s)
