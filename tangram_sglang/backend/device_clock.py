"""Seconds that the device spends on parts of a step, read without waiting for it."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch


class DeviceClock:
    """Adds up stretches of work on one stream.

    Events that the device has passed are read when the next stretch begins, so a total may lack what
    is still running.

    Args:
        device: a CPU's work is done when its call returns.
        add: takes seconds.
    """

    def __init__(self, device: torch.device | str, add: Callable[[float], None]):
        self._on_gpu = torch.device(device).type == "cuda"
        self._add = add
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Time what the block launches on the current stream."""
        if not self._on_gpu:
            started = time.perf_counter()
            yield
            self._add(time.perf_counter() - started)
            return
        self._collect()
        start, end = pair = self._spare.pop() if self._spare else _events()
        start.record()
        yield
        end.record()
        self._running.append(pair)

    def _collect(self) -> None:
        while self._running and self._running[0][1].query():
            start, end = pair = self._running.popleft()
            self._add(start.elapsed_time(end) / 1e3)
            self._spare.append(pair)


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
