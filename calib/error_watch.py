"""Measures error curves inside the server: keeps one prompt's keys, and queries as they come."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from tangram_sglang.calib.error_curves import (
    error_curves,
    grid,
    head_gram,
    query_positions,
    selection_order,
)
from tangram_sglang.calib.observations import write_error
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.score import Scorer, Window


class ErrorWatch:
    """Called layer by layer within a pass; prompts come one after another, in any chunks.

    Memory: K and V of one prompt in every layer, and one of ``W / QUERIES`` of its queries. A window
    is measured once W queries that would see it sealed have come, so the last one of a prompt may
    not be.
    """

    def __init__(
        self,
        shape: ModelShape,
        rule: WindowRule,
        out: Path,
        selection: Scorer,
        window_of: Callable[[int, int, torch.Tensor, torch.Tensor], Window],
        projections: Mapping[int, torch.Tensor],
    ):
        """Prepare for the layers of ``shape``, all of full attention.

        Args:
            shape, rule: of this rank.
            out: folder for the error files.
            selection: the scorer that serves.
            window_of: (layer id, start, k, v [H, W, D]) -> what the scorer gets.
            projections: weights of the output projections by layer id.
        """
        self._rule, self._out = rule, out
        self._selection, self._window_of = selection, window_of
        self._points = grid(rule.window)
        self._layers: dict[int, _Layer] = {}
        for x in shape.layers:
            if x.layer_id not in projections:
                raise TangramError(
                    f"layer {x.layer_id}: its output projection was not found, or is quantised; "
                    "profile error needs its weights: calibrate from other profiles"
                )
            self._layers[x.layer_id] = _Layer(x, projections[x.layer_id])
        self._last = shape.layers[-1].layer_id
        self._written = 0

    def queries(self, layer_id: int, q: torch.Tensor, positions: torch.Tensor) -> None:
        """Keep some queries of one layer in one pass, [T, HQ, D] after RoPE, at positions [T] int64.

        TangramError unless they go on from the layer's last ones, or begin a prompt.
        """
        layer = self._layers[layer_id]
        first = int(positions[0])
        if first == 0:
            layer.forget()
        if first != layer.tokens or not bool((positions.diff() == 1).all()):
            raise TangramError(
                "profile error watches one prompt at a time, from its first token on: a batch of "
                "several, or a reused prefix, was served"
            )
        stride = query_positions(0, self._rule.window).diff()[0]
        mine = (positions - self._rule.recent) % stride == 0
        layer.q.append(q[mine])
        layer.positions.append(positions[mine])

    def context(
        self, layer_id: int, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> None:
        """Keep K and V of the same tokens, [T, H, D], and measure the windows that they complete."""
        layer, rule = self._layers[layer_id], self._rule
        layer.sinks = sinks
        layer.k.append(k)
        layer.v.append(v)
        before, layer.tokens = layer.tokens, layer.tokens + len(k)
        # window j is complete with the last of the W queries from its epoch's end on
        windows = range(
            max(0, (before - rule.recent) // rule.window - 1),
            max(0, (layer.tokens - rule.recent) // rule.window - 1),
        )
        if windows:
            layer.join()
        for window in windows:
            layer.found.append(self._measure(layer_id, layer, window))
        if layer_id == self._last:
            for window in windows:
                self._finish(window)

    def _measure(self, layer_id: int, layer: "_Layer", window: int):
        rule = self._rule
        start, first = window * rule.window, rule.epoch_end(window)
        positions = query_positions(first, rule.window)
        begin = int((layer.positions[0] < first).sum())
        end = int(positions[-1]) + 1
        span = slice(begin, begin + len(positions))
        k, v = layer.k[0][:end], layer.v[0][:end]
        mine = slice(start, start + rule.window)
        seen = self._window_of(layer_id, start, k[mine].transpose(0, 1), v[mine].transpose(0, 1))
        order = selection_order(self._selection.score(seen), seen.sinks)
        curves, power = error_curves(
            layer.q[0][span], layer.positions[0][span], k, v, start, order,
            layer.gram, layer.shape.scaling, self._points, layer.sinks,
        )  # fmt: skip
        return curves.cpu().numpy(), power.cpu().numpy()

    def _finish(self, window: int) -> None:
        found = [layer.found.pop(0) for layer in self._layers.values()]
        curves, power = (np.concatenate(x) for x in zip(*found, strict=True))
        write_error(self._out, self._written, window * self._rule.window, curves, power)
        self._written += 1


class _Layer:
    """One layer's share of the prompt that is being watched."""

    def __init__(self, shape: LayerShape, projection: torch.Tensor):
        self.shape = shape
        self.gram = head_gram(projection, shape.q_heads, shape.kv_heads)
        self.found: list[tuple[np.ndarray, np.ndarray]] = []
        self.sinks: torch.Tensor | None = None
        self.forget()

    def forget(self) -> None:
        self.tokens = 0
        self.q: list[torch.Tensor] = []
        self.positions: list[torch.Tensor] = []
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []

    def join(self) -> None:
        """One tensor of each list."""
        for parts in (self.q, self.positions, self.k, self.v):
            parts[:] = [torch.cat(parts)]
