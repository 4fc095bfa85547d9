"""Counts how often heads ask for more than their calibration saw, in sampled windows of prompts."""

import numpy as np
import torch

from tangram_sglang.plan.drift import DriftRule
from tangram_sglang.plan.grouping import Head
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.score import Window, create_scorer


class DriftWatch:
    """Sees windows as calibration's observer does; never waits for the device.

    Args:
        rule: what is compared.
        layout: places of all heads.
        device: where windows are shown.

    Attributes:
        heads: (layer id, KV head) in global head order, the order of all counts.
    """

    def __init__(self, rule: DriftRule, layout: KVLayout, device: torch.device | str):
        full = layout.groups[: layout.num_full]
        self.heads: list[Head] = sorted(head for group in full for head in group.heads)
        self._rule, self._sinks = rule, layout.rule.sinks
        self._scorer = create_scorer(rule.scorer)
        ids = [layer for layer, _ in self.heads]
        self._span = {x: (ids.index(x), ids.index(x) + ids.count(x)) for x in dict.fromkeys(ids)}
        self._seen = dict.fromkeys(self._span, 0)
        self._scores: dict[int, list[torch.Tensor]] = {x: [] for x in self._span}
        self._limits = torch.tensor(rule.limits, device=device)
        self._exceeded = torch.zeros(len(self.heads), dtype=torch.int32, device=device)
        self._looked_at = 0
        self._copy: tuple[int, torch.Tensor, torch.cuda.Event | None] | None = None
        self._read = 0, np.zeros(len(self.heads), dtype=np.int64)

    def wants(self, layer_id: int) -> bool:
        """Whether to show the next window of this layer; each layer is asked for each window."""
        self._seen[layer_id] += 1
        return (self._seen[layer_id] - 1) % self._rule.every == 0

    def queries(self, layer_id: int, q: torch.Tensor, positions: torch.Tensor) -> None:
        """Not needed."""

    def context(
        self, layer_id: int, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> None:
        """Not needed."""

    @torch.no_grad()
    def window(self, layer_id: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Score one window of one layer, K and V [H, W, D]; with the last layer, count."""
        heads = torch.arange(*self._span[layer_id], device=k.device)
        sinks = self._sinks if start == 0 else 0
        seen = Window(k, v, start, heads, sinks, None)
        self._scores[layer_id].append(self._scorer.score(seen).float())
        if all(self._scores.values()):
            self._count([scores.pop(0) for scores in self._scores.values()])

    def read(self) -> tuple[int, np.ndarray]:
        """Windows looked at, and [H] in how many of them each head asked for more than its limit.

        As of the last count that the device has finished, or the one before it.
        """
        if self._copy is not None and (self._copy[2] is None or self._copy[2].query()):
            self._read = self._copy[0], self._copy[1].numpy().astype(np.int64)
            self._copy = None
        return self._read

    def _count(self, layers: list[torch.Tensor]) -> None:
        parts = layers if self._rule.scope == "layer" else [torch.cat(layers)]
        asked = torch.cat([top_shares(part, self._rule.retention) for part in parts])
        self._exceeded += asked > self._limits
        self._looked_at += 1
        self.read()
        if self._copy is None:
            self._copy = self._looked_at, *_to_host(self._exceeded)


def top_shares(scores: torch.Tensor, retention: float) -> torch.Tensor:
    """Share of each head when the top ``retention`` of all tokens is taken, [H].

    As ``calib.shares.window_shares``, on the device and without a wait for it.

    Args:
        scores: [H, W], higher is kept; ties go to the head and token that come first.
    """
    heads, window = scores.shape
    order = torch.argsort(scores.flatten(), descending=True, stable=True)
    owner = order[: round(retention * scores.numel())] // window
    ones = torch.ones_like(owner, dtype=torch.float32)
    return torch.zeros(heads, device=scores.device).index_add_(0, owner, ones) / window


def _to_host(counts: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """A copy on the host, and what says when it is there."""
    if counts.device.type == "cpu":
        return counts.clone(), None
    host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    host.copy_(counts, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event
