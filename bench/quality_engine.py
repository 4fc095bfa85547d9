"""docs/design.md in one process: a Hugging Face model with a compressed past, several plans at once.

Serves no requests and saves no memory: K and V of every token stay, and what a head dropped is masked.
The scorers are those that serve, and the kept counts come from a KVLayout; tests hold the result
against the server. Runs on any device in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers.models.llama.modeling_llama import rotate_half

from tangram_sglang.calib.error_curves import selection_order
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.score import QueryStats, Window, create_scorer
from tangram_sglang.score.gate import Gates

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# what this engine can show a scorer beside K, V and positions
SHOWN = frozenset({"query_stats", "q_window", "rope", "hidden"})


@dataclass(frozen=True)
class Lane:
    """One way to compress.

    Attributes:
        layout: how much each head keeps of a window; at retention 1.0 nothing is scored.
        scorer: name of the scorer that picks tokens.
        query_stats: of every head, for scorers that read them.
        gates: of every layer, in float32, for scorers that read hidden states.
    """

    layout: KVLayout
    scorer: str
    query_stats: QueryStats | None = None
    gates: Gates | None = None


def model_shape(model) -> ModelShape:
    """Attention layers of a Hugging Face model, all of full attention."""
    config = model.config
    if config.model_type not in MODEL_TYPES or getattr(config, "use_sliding_window", False):
        raise ValueError(
            f"model type {config.model_type} (or its sliding window): expected one of "
            f"{', '.join(MODEL_TYPES)} with full attention in every layer"
        )
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelShape(
        tuple(
            LayerShape(
                i, config.num_attention_heads, config.num_key_value_heads, dim, None,
                layer.self_attn.scaling,
            )
            for i, layer in enumerate(model.model.layers)
        )
    )  # fmt: skip


@torch.no_grad()
def hidden_states(
    model, ids: Sequence[int], lanes: Sequence[Lane], positions: torch.Tensor
) -> torch.Tensor:
    """Final hidden states before the output embedding, [lanes, len(positions), hidden] fp32.

    Args:
        model: in float32, on its device.
        ids: tokens of one request.
        lanes: of one window rule.
        positions: ascending positions to return.
    """
    run = _Run(model, len(ids), lanes)
    rule, parts, first = lanes[0].layout.rule, [], 0
    while first < len(ids):
        sealed = max(0, (first - rule.recent) // rule.window)
        run.seal(sealed)
        # positions below this one see the same windows sealed
        end = min(len(ids), rule.epoch_end(sealed))
        hidden = run.forward(ids[first:end], first)
        wanted = positions[(positions >= first) & (positions < end)] - first
        # all lanes are one as long as nothing is sealed
        parts.append(hidden[:, wanted.to(hidden.device)].expand(len(lanes), -1, -1))
        first = end
    return torch.cat(parts, dim=1)


class _Run:
    """K, V and what is left of them, of one request in every lane."""

    def __init__(self, model, tokens: int, lanes: Sequence[Lane]):
        shape, self._lanes = model_shape(model), lanes
        self._model, self._layers = model, shape.layers
        x, device = shape.layers[0], model.device
        size = (len(shape.layers), 1, x.kv_heads, tokens)
        self._k = torch.zeros(*size, x.head_dim, device=device)
        self._v = torch.zeros_like(self._k)
        self._scorers = [create_scorer(lane.scorer) for lane in lanes]
        self._q = None
        if any("q_window" in scorer.needs for scorer in self._scorers):
            self._q = self._k.new_zeros(size[0], 1, x.q_heads, tokens, x.head_dim)
        # what the gates say of a token; all lanes that read it have the same gates
        self._gates = next((lane.gates for lane in lanes if lane.gates is not None), None)
        self._gate = None if self._gates is None else self._k.new_zeros(size)
        self._present = torch.ones(size, dtype=torch.bool, device=device)
        self._sealed = 0
        self._kept = [
            torch.tensor([lane.layout.kept[lane.layout.place[h][0]] for h in shape.full_heads])
            for lane in lanes
        ]
        for lane, scorer in zip(lanes, self._scorers, strict=True):
            if unknown := scorer.needs - SHOWN:
                raise ValueError(f"scorer {lane.scorer} reads {sorted(unknown)}, not shown here")

    def seal(self, windows: int) -> None:
        """Drop what the lanes do not keep of all windows up to number ``windows``."""
        if windows and self._k.shape[1] < len(self._lanes):
            self._k, self._v, self._present = (
                x.expand(-1, len(self._lanes), *x.shape[2:]).clone()
                for x in (self._k, self._v, self._present)
            )
            self._q, self._gate = (
                x if x is None else x.expand(-1, len(self._lanes), *x.shape[2:]).clone()
                for x in (self._q, self._gate)
            )
        for window in range(self._sealed, windows):
            for lane in range(len(self._lanes)):
                self._seal(window, lane)
        self._sealed = max(self._sealed, windows)

    def _seal(self, window: int, lane: int) -> None:
        rule = self._lanes[lane].layout.rule
        if not self._lanes[lane].layout.compresses:
            return
        span = slice(window * rule.window, (window + 1) * rule.window)
        k, v = (x[:, lane, :, span].flatten(0, 1) for x in (self._k, self._v))
        heads = torch.arange(len(k), device=k.device)
        sinks = rule.sinks if window == 0 else 0
        seen = self._shown(lane, span)
        scores = self._scorers[lane].score(Window(k, v, span.start, heads, sinks, **seen))
        order = selection_order(scores, sinks)
        rank = torch.arange(rule.window, device=k.device)
        kept = torch.zeros_like(order, dtype=torch.bool)
        kept.scatter_(1, order, rank < self._kept[lane].to(k.device)[:, None])
        self._present[:, lane, :, span] = kept.unflatten(0, self._present.shape[::2][:2])

    def _shown(self, lane: int, span: slice) -> dict:
        """What the lane's scorer needs beside K and V of the window ``span``."""
        needs, seen, shape, end = self._scorers[lane].needs, {}, self._k.shape, span.stop
        if "query_stats" in needs:
            seen["query_stats"] = self._lanes[lane].query_stats
        if "q_window" in needs:
            count = self._scorers[lane].q_window(self._lanes[lane].layout.rule.window)
            q = self._q[:, lane, :, end - count : end]
            seen["q"] = q.unflatten(1, (shape[2], -1)).flatten(0, 1)
            scalings = torch.tensor([x.scaling for x in self._layers], device=self._k.device)
            seen["scaling"] = scalings.repeat_interleave(shape[2])
        if "hidden" in needs:
            seen["gate"] = self._gate[:, lane, :, span].flatten(0, 1)
        if "rope" in needs:
            frequencies = self._model.model.rotary_emb.inv_freq.double().to(self._k.device)
            seen["inv_freq"] = frequencies.expand(shape[0] * shape[2], -1)
        return seen

    def forward(self, ids: Sequence[int], first: int) -> torch.Tensor:
        """Hidden states of tokens at ``first``.., [lanes or 1, T, hidden]."""
        decoder = self._model.model
        device = self._model.device
        positions = torch.arange(first, first + len(ids), device=device)
        x = decoder.embed_tokens(torch.tensor([list(ids)], device=device))
        x = x.expand(self._k.shape[1], -1, -1)
        cos, sin = decoder.rotary_emb(x, positions[None])
        for i, layer in enumerate(decoder.layers):
            read = layer.input_layernorm(x)
            if self._gates is not None:
                scores = self._gates.layer(i).scores(read.flatten(0, 1))
                scores = scores.unflatten(0, read.shape[:2]).transpose(1, 2)
                self._gate[i, :, :, first : first + len(ids)] = scores
            attend = partial(self._attend, i, first)
            x = x + _attention(layer.self_attn, read, cos[:, None], sin[:, None], attend)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return decoder.norm(x)

    def _attend(self, layer: int, first: int, q, k, v) -> torch.Tensor:
        """q [B, HQ, T, D]; k, v [B, H, T, D]; returns [B, HQ, T, D]."""
        end = first + q.shape[2]
        if self._q is not None:
            self._q[layer, :, :, first:end] = q
        self._k[layer, :, :, first:end], self._v[layer, :, :, first:end] = k, v
        k, v = self._k[layer, :, :, :end], self._v[layer, :, :, :end]
        at = torch.arange(end, device=q.device)
        seen = (at <= at[first:, None]) & self._present[layer, :, :, None, :end]
        ratio = q.shape[1] // k.shape[1]
        # query heads of one KV head stand one below the other and share its keys
        rows = q.unflatten(1, (-1, ratio)).flatten(2, 3)
        mask = seen[:, :, None].expand(-1, -1, ratio, -1, -1).flatten(2, 3)
        out = torch.nn.functional.scaled_dot_product_attention(
            rows, k, v, attn_mask=mask, scale=self._layers[layer].scaling
        )
        return out.unflatten(2, (ratio, -1)).flatten(1, 2)


def _attention(module, x, cos, sin, attend) -> torch.Tensor:
    q, k, v = (
        project(x).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    q, k = (x * cos + rotate_half(x) * sin for x in (q, k))
    return module.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))


@torch.no_grad()
def compare(model, full: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(full || other) in nats and whether the most likely token agrees, [N] each, on the CPU.

    Args:
        full, other: hidden states [N, hidden].
    """
    kl, agree = [], []
    for a, b in zip(full.split(64), other.split(64), strict=True):
        p, q = (model.lm_head(x).float().log_softmax(dim=-1) for x in (a, b))
        kl.append((p.exp() * (p - q)).sum(dim=-1))
        agree.append(p.argmax(dim=-1) == q.argmax(dim=-1))
    return torch.cat(kl).cpu(), torch.cat(agree).cpu()
