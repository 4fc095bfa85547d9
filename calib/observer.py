"""What the backend calls in observe mode: shares of every window, moments of every query, errors."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tangram_sglang.calib.error_watch import ErrorWatch
from tangram_sglang.calib.moments import QueryMoments
from tangram_sglang.calib.observations import (
    profile_key,
    read_queries,
    read_request,
    write_queries,
    write_window,
)
from tangram_sglang.calib.query_watch import WindowQueries
from tangram_sglang.calib.shares import window_shares
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.shape import ModelShape
from tangram_sglang.plan.stats import load_query_stats
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.score import QueryStats, Scorer, Window, create_scorer


class Observer:
    """Measures an uncompressed run, layer by layer, and writes to a folder as it goes.

    Within a forward pass every full-attention layer calls ``queries`` once, ``context`` once, and
    ``window`` for the same windows in the same order; the n-th window of each layer is one and the
    same, and complete once the last layer has shown it. Sliding-window layers may call too and are
    ignored. A request.json in the folder says what to measure; a new one takes effect with the next
    pass, so one server serves several stages of a calibration.
    """

    def __init__(
        self,
        shape: ModelShape,
        inv_freq: Mapping[int, torch.Tensor],
        rule: WindowRule,
        out: Path,
        query_stats: QueryStats | None = None,
        projections: Callable[[], Mapping[int, torch.Tensor]] = dict,
        device: torch.device | str = "cpu",
    ):
        """Prepare for the layers of ``shape``.

        Args:
            shape: attention layers of this rank.
            inv_freq: RoPE frequencies by layer id, fp64.
            rule: W, R and the sinks.
            out: existing folder; a request.json there says what to measure.
            query_stats: for profiles that need them, of every full-attention head; a request may
                name a file of them instead.
            projections: gives the weights of the output projections, [hidden, HQ * D], by layer id;
                called only where errors are asked for.
            device: where windows lie.
        """
        layers = tuple(x for x in shape.layers if x.sliding_window is None)
        self._shape = ModelShape(layers)
        self._rule, self._out = rule, out
        self._inv_freq = {x.layer_id: inv_freq[x.layer_id] for x in layers}
        self._first, self._last = layers[0].layer_id, layers[-1].layer_id
        self._heads, first = {}, 0
        for x in layers:
            self._heads[x.layer_id] = torch.arange(first, first + x.kv_heads)
            first += x.kv_heads
        self._given_stats, self._projections, self._device = query_stats, projections, device
        self._written, self._stamp = 0, None
        self._follow_request()

    @torch.no_grad()
    def queries(self, layer_id: int, q: torch.Tensor, positions: torch.Tensor) -> None:
        """Take the queries of one layer in one pass, [T, HQ, D] after RoPE, at positions [T]."""
        if layer_id == self._first:
            self._follow_request()
        if layer_id not in self._heads:
            return
        if self._window_queries is not None:
            self._window_queries.add(layer_id, q, positions)
        if self._errors is not None:
            self._errors.queries(layer_id, q, positions)
        if self._moments is None:
            return
        # queries at the sinks are outliers, and never among the queries to come
        late = positions >= self._rule.sinks
        self._moments[layer_id].add(q[late], positions[late], self._inv_freq[layer_id])
        if layer_id == self._last:
            inv_freq = np.stack([x.cpu().double().numpy() for x in self._inv_freq.values()])
            write_queries(self._out, self._shape, inv_freq, list(self._moments.values()))

    @torch.no_grad()
    def context(
        self, layer_id: int, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        """Take the keys and values of the same tokens, [T, H, D] as the layer stores them.

        ``sinks``: [HQ], logits that join each softmax of the layer without a value, or None.
        """
        if self._errors is not None and layer_id in self._heads:
            self._errors.context(layer_id, k, v, sinks)

    def wants(self, layer_id: int) -> bool:
        """Every window is looked at."""
        return True

    @torch.no_grad()
    def window(self, layer_id: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Score one complete window of one layer, K and V [H, W, D] as the layer stored them."""
        if layer_id not in self._scores:
            return
        self._scores[layer_id].append(
            {
                name: scorer.score(self._window(scorer, layer_id, start, k, v))
                .float()
                .cpu()
                .numpy()
                for name, scorer in self._profiles.items()
                # the sink takes the softmax of scorers that attend, so their shares there are
                # unlike those of any later window
                if start or "query_stats" not in scorer.needs
            }
        )
        if layer_id == self._last:
            self._finish(start)

    def _window(
        self, scorer: Scorer, layer_id: int, start: int, k: torch.Tensor, v: torch.Tensor
    ) -> Window:
        """What ``scorer`` gets to see of a window, as when serving."""
        heads = self._heads[layer_id].to(k.device)
        sinks = self._rule.sinks if start == 0 else 0
        seen = {}
        if "query_stats" in scorer.needs:
            seen["query_stats"] = self._stats.select(heads)
        if "q_window" in scorer.needs:
            count = scorer.q_window(self._rule.window)
            seen["q"] = self._window_queries.of(layer_id, start, count, len(heads))
            scaling = self._shape.layers[list(self._heads).index(layer_id)].scaling
            seen["scaling"] = torch.full((len(heads),), scaling, device=k.device)
        if "rope" in scorer.needs:
            frequencies = self._inv_freq[layer_id].to(k.device, torch.float64)
            seen["inv_freq"] = frequencies.expand(len(heads), -1)
        return Window(k, v, start, heads, sinks, **seen)

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

    def _follow_request(self) -> None:
        """Read the request again if it is another file than before."""
        path = self._out / "request.json"
        stamp = path.stat().st_ino if path.exists() else -1
        if stamp == self._stamp:
            return
        self._stamp, request = stamp, read_request(self._out)
        self._retentions = request.retentions
        self._profiles: dict[str, Scorer] = {name: create_scorer(name) for name in request.profiles}
        selection = None if request.error is None else create_scorer(request.error)
        self._stats = self._given_stats
        if request.stats_file is not None:
            self._stats = load_query_stats(
                Path(request.stats_file), request.stats_hash, self._shape, self._device
            )
        for name, scorer in {**self._profiles, request.error: selection}.items():
            if scorer and "query_stats" in scorer.needs and self._stats is None:
                raise TangramError(
                    f"profile {name!r} needs query statistics, which exist only after a first run"
                )
            if scorer and "hidden" in scorer.needs:
                raise TangramError(
                    f"profile {name!r} needs hidden, which observing does not hand over; choose a "
                    "profile that reads windows, such as keydiff"
                )
        readers = [x for x in (*self._profiles.values(), selection) if x and "q_window" in x.needs]
        self._window_queries = None
        if readers:
            most = max(x.q_window(self._rule.window) for x in readers)
            self._window_queries = WindowQueries(self._rule.window, most)
        # scores of the windows of this pass, one list a layer, in the order of the calls
        self._scores: dict[int, list[dict[str, np.ndarray]]] = {x: [] for x in self._heads}
        self._moments = self._start_moments(request.sums) if request.moments else None
        self._errors = None
        if selection is not None:
            self._errors = ErrorWatch(
                self._shape,
                self._rule,
                self._out,
                selection,
                partial(self._window, selection),
                self._projections(),
            )

    def _start_moments(self, sums: str | None) -> dict[int, QueryMoments]:
        moments = {x.layer_id: QueryMoments(x.q_heads, x.head_dim) for x in self._shape.layers}
        if sums is not None:
            before = read_queries(Path(sums))
            for i, mine in enumerate(moments.values()):
                mine.count = before.count
                mine.total += torch.from_numpy(before.total[i])
                mine.square += torch.from_numpy(before.square[i])
        return moments
