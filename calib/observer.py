"""What the backend calls in observe mode: shares of every window, moments of every query."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from tangram_sglang.calib.moments import QueryMoments
from tangram_sglang.calib.observations import (
    profile_key,
    read_request,
    write_queries,
    write_window,
)
from tangram_sglang.calib.shares import window_shares
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.shape import ModelShape
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.score import QueryStats, Scorer, Window, create_scorer


class Observer:
    """Measures an uncompressed run, layer by layer, and writes to a folder as it goes.

    Within a forward pass every full-attention layer calls ``queries`` once and ``window`` for the
    same windows in the same order; the n-th window of each layer is one and the same, and complete
    once the last layer has shown it. Sliding-window layers may call too and are ignored.
    """

    def __init__(
        self,
        shape: ModelShape,
        inv_freq: Mapping[int, torch.Tensor],
        rule: WindowRule,
        out: Path,
        query_stats: QueryStats | None = None,
    ):
        """Prepare for the layers of ``shape``.

        Args:
            shape: attention layers of this rank.
            inv_freq: RoPE frequencies by layer id, fp64.
            rule: W and the sinks.
            out: existing folder; a request.json there says what to measure.
            query_stats: for profiles that need them, of every full-attention head.
        """
        request = read_request(out)
        layers = tuple(x for x in shape.layers if x.sliding_window is None)
        self._shape = ModelShape(layers)
        self._rule, self._out = rule, out
        self._inv_freq = {x.layer_id: inv_freq[x.layer_id] for x in layers}
        self._moments = {x.layer_id: QueryMoments(x.q_heads, x.head_dim) for x in layers}
        self._last = layers[-1].layer_id
        self._heads, first = {}, 0
        for x in layers:
            self._heads[x.layer_id] = torch.arange(first, first + x.kv_heads)
            first += x.kv_heads
        self._stats = query_stats
        self._retentions = request.retentions
        self._profiles: dict[str, Scorer] = {name: create_scorer(name) for name in request.profiles}
        for name, scorer in self._profiles.items():
            if "query_stats" in scorer.needs and query_stats is None:
                raise TangramError(
                    f"profile {name!r} needs query statistics, which exist only after a first run"
                )
            if missing := scorer.needs & {"q_window", "rope", "hidden"}:
                raise TangramError(
                    f"profile {name!r} needs {', '.join(sorted(missing))}, which observing does not "
                    "hand over yet; choose a profile that reads K and V only, such as keydiff"
                )
        # scores of the windows of this pass, one list a layer, in the order of the calls
        self._scores: dict[int, list[dict[str, np.ndarray]]] = {x.layer_id: [] for x in layers}
        self._written = 0

    @torch.no_grad()
    def queries(self, layer_id: int, q: torch.Tensor, positions: torch.Tensor) -> None:
        """Take the queries of one layer in one pass, [T, HQ, D] after RoPE, at positions [T]."""
        if layer_id not in self._moments:
            return
        # queries at the sinks are outliers, and never among the queries to come
        late = positions >= self._rule.sinks
        self._moments[layer_id].add(q[late], positions[late], self._inv_freq[layer_id])
        if layer_id == self._last:
            inv_freq = np.stack([x.cpu().double().numpy() for x in self._inv_freq.values()])
            write_queries(self._out, self._shape, inv_freq, list(self._moments.values()))

    @torch.no_grad()
    def window(self, layer_id: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Score one complete window of one layer, K and V [H, W, D] as the layer stored them."""
        if layer_id not in self._scores:
            return
        heads = self._heads[layer_id].to(k.device)
        stats = None if self._stats is None else self._stats.select(heads)
        sinks = self._rule.sinks if start == 0 else 0
        window = Window(k, v, start, heads, sinks, stats)
        self._scores[layer_id].append(
            {
                name: scorer.score(window).float().cpu().numpy()
                for name, scorer in self._profiles.items()
                # the sink takes the softmax of scorers that attend, so their shares there are
                # unlike those of any later window
                if start or "query_stats" not in scorer.needs
            }
        )
        if layer_id == self._last:
            self._finish(start)

    def _finish(self, start: int) -> None:
        """All layers have shown the oldest window: reduce it to shares and forget it."""
        layers = [scores.pop(0) for scores in self._scores.values()]
        counts = [x.kv_heads for x in self._shape.layers]
        shares = {}
        for name in layers[0]:
            scores = np.concatenate([layer[name] for layer in layers])
            for scope, found in window_shares(scores, self._retentions, counts).items():
                shares[profile_key(name, scope)] = found.astype(np.float32)
        write_window(self._out, self._written, start, shares)
        self._written += 1
