"""A step's integer lists reach the device in one pinned, non-blocking copy."""

from collections.abc import Mapping

import numpy as np
import torch

# the host runs at most a step ahead of the device; a third buffer is never waited for
BUFFERS = 3
ALIGN = 4


class Upload:
    """Pinned host buffers and their copies on the device, used in turn.

    The views that ``send`` returns stay valid until ``BUFFERS`` - 1 more calls; kernels that read
    them must be launched on the stream that was current at the call.
    """

    def __init__(self, device: torch.device | str, capacity: int = 1 << 16):
        self._device = torch.device(device)
        self._pinned = self._device.type == "cuda"
        self._host: list[torch.Tensor | None] = [None] * BUFFERS
        self._target: list[torch.Tensor | None] = [None] * BUFFERS
        self._done: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._turn = 0
        for turn in range(BUFFERS):
            self._grow(turn, capacity)

    def send(self, lists: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Copy int32 arrays; returns them by name, in their shapes, on the device."""
        turn = self._turn = (self._turn + 1) % BUFFERS
        starts, total = {}, 0
        for name, array in lists.items():
            starts[name] = total
            total += -(-array.size // ALIGN) * ALIGN
        if self._done[turn] is not None:
            # done long ago unless the host is BUFFERS steps ahead
            self._done[turn].synchronize()
        if total > len(self._host[turn]):
            self._grow(turn, max(total, 2 * len(self._host[turn])))
        host, target = self._host[turn], self._target[turn]
        packed = host.numpy()
        for name, array in lists.items():
            packed[starts[name] : starts[name] + array.size] = array.ravel()
        target[:total].copy_(host[:total], non_blocking=True)
        if self._pinned:
            self._done[turn] = torch.cuda.Event()
            self._done[turn].record()
        return {
            name: target[starts[name] : starts[name] + array.size].view(array.shape)
            for name, array in lists.items()
        }

    def _grow(self, turn: int, size: int) -> None:
        self._host[turn] = torch.empty(size, dtype=torch.int32, pin_memory=self._pinned)
        self._target[turn] = torch.empty(size, dtype=torch.int32, device=self._device)
