"""One request with a compressed past (docs/design.md).

    query at position p    j = max(0, (p - R) // W) windows are sealed for it
    it sees, in one head   the kept positions of windows 0 .. j-1, and every token from jW to p

K and V of every token stay in full; what a head dropped is only masked. Tokens whose queries have
the same j form a segment, which is one forward pass through all layers; windows are sealed between
segments, so the keys of a window were computed as the model really ran.
"""

from collections.abc import Sequence
from functools import partial

import torch

from tests.reference.model import final_hidden, frequencies, sliding_window
from tests.reference.scorers import SCORERS, Asked, select


class CompressedRun:
    """A Hugging Face model (fp32, CPU) that runs one sequence under a KVLayout.

    Args:
        model: LlamaForCausalLM, Qwen3ForCausalLM, Gemma3ForCausalLM or GptOssForCausalLM.
        layout: KVLayout of the whole model; read for numbers only.
        scorer_name: of ``tests.reference.scorers.SCORERS``.
        query_stats: QueryStats of all full-attention heads, for ``expected_attention``.
        gates: Gates of all full-attention layers, for ``fastkvzip``; read for tensors only.

    Attributes:
        tokens: all tokens run so far.
        kept: sorted absolute positions by (layer, kv head, window), of the windows that the query
            of the last token sees sealed: ``layout.rule.sealed(len(tokens))`` of them.
        scores: the W scores, fp32, by the same keys.
    """

    def __init__(self, model, layout, scorer_name: str, query_stats=None, gates=None):
        config = model.config
        if model.dtype != torch.float32:
            raise ValueError(f"the reference runs in float32, the model is {model.dtype}")
        if scorer_name == "expected_attention" and query_stats is None:
            raise ValueError("expected_attention needs query_stats")
        if scorer_name == "fastkvzip" and gates is None:
            raise ValueError("fastkvzip needs gates")
        self.tokens: list[int] = []
        self.kept: dict[tuple[int, int, int], list[int]] = {}
        self.scores: dict[tuple[int, int, int], torch.Tensor] = {}
        self._model = model.eval()
        self._scorer = SCORERS[scorer_name]
        self._query_stats = query_stats
        self._gates = gates
        self._window, self._recent = layout.rule.window, layout.rule.recent
        self._sinks = layout.rule.sinks

        layers = range(config.num_hidden_layers)
        self._sliding = [sliding_window(config, layer) for layer in layers]
        # heads that are compressed, in global head order, and how much each keeps of a window
        self._heads = [
            (layer, head)
            for layer in layers
            for head in range(config.num_key_value_heads)
            if self._sliding[layer] is None
        ]
        self._count = {x: layout.groups[layout.place[x][0]].kept for x in self._heads}

        empty = torch.empty(config.num_key_value_heads, 0, config.head_dim)
        self._k = [empty for _ in layers]  # [H, N, D] of each layer
        self._v = [empty for _ in layers]
        self._q = [empty.new_empty(config.num_attention_heads, 0, config.head_dim) for _ in layers]
        self._hidden = [torch.empty(0, config.hidden_size) for _ in layers]
        self._sealed = 0
        self._last_hidden = None

    @torch.no_grad()
    def extend(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Run ``token_ids`` after all tokens so far; their logits [T, vocab]."""
        return self._model.lm_head(self._run(token_ids))

    @torch.no_grad()
    def greedy(self, token_ids: Sequence[int], n: int) -> list[int]:
        """Run ``token_ids``, then the ``n`` most likely tokens one at a time; those n.

        All n are run, the last one too, so the next turn goes on with the user's tokens alone. A
        server that stops after n tokens has not yet stored the last one.
        """
        self._run(token_ids)
        new = []
        for _ in range(n):
            new.append(int(self._model.lm_head(self._last_hidden).argmax()))
            self._run(new[-1:])
        return new

    def _run(self, token_ids):
        """Hidden states [T, hidden]; one forward pass for each epoch that the tokens touch."""
        todo, hidden = [int(t) for t in token_ids], []
        while todo:
            p = len(self.tokens)
            j = max(0, (p - self._recent) // self._window)
            while self._sealed < j:
                self._seal(self._sealed)
                self._sealed += 1
            # positions up to this one see the same j windows sealed
            epoch_end = (j + 1) * self._window + self._recent
            segment, todo = todo[: epoch_end - p], todo[epoch_end - p :]
            hooks = [
                layer.self_attn.k_proj.register_forward_pre_hook(partial(self._project, i))
                for i, layer in enumerate(self._model.model.layers)
            ]
            hidden.append(final_hidden(self._model, segment, p, partial(self._attend, p)))
            for hook in hooks:
                hook.remove()
            self.tokens += segment
            self._last_hidden = hidden[-1][-1]
        return torch.cat(hidden) if hidden else torch.empty(0, self._model.config.hidden_size)

    def _seal(self, j):
        """Score window j in every head, of every layer, and note what stays."""
        start, end = j * self._window, (j + 1) * self._window
        sinks = self._sinks if j == 0 else 0
        for index, (layer, head) in enumerate(self._heads):
            k = self._k[layer][head, start:end]
            v = self._v[layer][head, start:end]
            asked = self._asked(layer, head, start, end)
            scores = self._scorer(k, v, start, sinks, index, self._query_stats, asked)
            chosen = select(scores, self._count[layer, head], sinks)
            self.scores[layer, head, j] = scores
            self.kept[layer, head, j] = [start + i for i in chosen]

    def _asked(self, layer, head, start, end):
        """The window's own queries and hidden states."""
        gate = None
        if self._gates is not None:
            i = [x for x, window in enumerate(self._sliding) if window is None].index(layer)
            per_head = {x: getattr(self._gates, x)[i, head] for x in ("q", "k", "sinks", "bias")}
            gate = per_head | {x: getattr(self._gates, x)[i] for x in ("q_norm", "k_norm")}
        ratio = len(self._q[layer]) // len(self._k[layer])
        return Asked(
            self._q[layer][head * ratio : (head + 1) * ratio, start:end],
            self._model.model.layers[layer].self_attn.scaling,
            frequencies(self._model),
            self._hidden[layer][start:end],
            gate,
        )

    def _project(self, layer, module, args):
        """Hidden states of new tokens are about to be projected."""
        self._hidden[layer] = torch.cat([self._hidden[layer], args[0]])

    def _attend(self, p, layer, q, k, v):
        """Attention of queries at positions p, p + 1..., which all see the same windows sealed."""
        self._k[layer] = k = torch.cat([self._k[layer], k], dim=1)
        self._v[layer] = v = torch.cat([self._v[layer], v], dim=1)
        self._q[layer] = torch.cat([self._q[layer], q], dim=1)
        queries_per_kv = len(q) // len(k)
        attention = self._model.model.layers[layer].self_attn
        # GPT-OSS: a logit per query head that takes part in the softmax and carries no value
        sinks = getattr(attention, "sinks", torch.full([len(q)], -torch.inf))
        out = []
        for head in range(len(k)):
            mask = self._mask(layer, head, p, k.shape[1])
            for i in range(queries_per_kv):
                query = head * queries_per_kv + i
                logits = q[query] @ k[head].T * attention.scaling
                logits = logits.masked_fill(~mask, -torch.inf)
                sink = sinks[query].expand(len(logits), 1)
                weights = torch.cat([logits, sink], dim=1).softmax(dim=1)[:, :-1]
                out.append(weights @ v[head])
        return torch.stack(out)

    def _mask(self, layer, head, p, n):
        """Whether the query at position p + row sees the key at position column, [n - p, n]."""
        query, key = torch.arange(p, n)[:, None], torch.arange(n)[None, :]
        if self._sliding[layer] is not None:
            return (key <= query) & (key > query - self._sliding[layer])
        present = torch.zeros(n, dtype=torch.bool)
        for j in range(self._sealed):
            present[self.kept[layer, head, j]] = True
        present[self._sealed * self._window :] = True
        return (key <= query) & present
