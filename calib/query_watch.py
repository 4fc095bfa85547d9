"""Queries of a prompt's windows, as they come, for scorers that read those of a window's last tokens."""

import torch

from tangram_sglang.errors import TangramError


class WindowQueries:
    """One prompt at a time, in any chunks; memory for ``tokens`` queries of each window and layer.

    Args:
        window: W.
        tokens: w, last tokens of each window whose queries are kept.
    """

    def __init__(self, window: int, tokens: int):
        self._window, self._tokens = window, tokens
        self._seen: dict[int, int] = {}
        self._kept: dict[int, list[torch.Tensor]] = {}

    def add(self, layer: int, q: torch.Tensor, positions: torch.Tensor) -> None:
        """Take the queries [T, HQ, D] of one layer at ``positions`` [T]."""
        first = int(positions[0])
        if first == 0:
            self._seen[layer], self._kept[layer] = 0, []
        if first != self._seen.get(layer) or not bool((positions.diff() == 1).all()):
            raise TangramError(
                "profiles that read queries watch one prompt at a time, from its first token on: a "
                "batch of several, or a reused prefix, was served"
            )
        self._seen[layer] = first + len(positions)
        self._kept[layer].append(q[positions % self._window >= self._window - self._tokens])

    def of(self, layer: int, start: int, count: int, kv_heads: int) -> torch.Tensor:
        """[H, r, count, D] of the last ``count`` tokens of the window at ``start``."""
        kept = self._kept[layer]
        kept[:] = [torch.cat(kept)]
        end = (start // self._window + 1) * self._tokens
        q = kept[0][end - count : end]
        return q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
