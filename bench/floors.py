"""The least time that a load's work can take on a GPU, from its rates of arithmetic and of reading.

Of the work that the design asks for, not of one kernel: weights and KV are read once, a query meets the
entries that it sees, and decode reads a shared prefix for every request. Padding, what is computed
again after a retraction, and windows that a cached prefix has sealed before their time do not count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.fleet import Entry
from bench.kernel_classes import (
    DECODE_ATTENTION,
    DECODE_GEMM,
    PREFILL_ATTENTION,
    PREFILL_GEMM,
)
from tangram_sglang.plan.described import plan_layout
from tangram_sglang.plan.file import load_plan
from tangram_sglang.settings import Settings


@dataclass(frozen=True)
class Rates:
    """Of a GPU: FLOP and bytes a second."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Model:
    """What of a dense decoder's config counts; sizes are numbers of weights.

    Attributes:
        layers_size: of all layers' matrices.
        head_size: of the matrix that makes logits.
        heads: KV heads of all layers.
        ratio: query heads a KV head.
    """

    layers_size: int
    head_size: int
    heads: int
    ratio: int
    head_dim: int
    itemsize: int

    @classmethod
    def of(cls, config: Mapping[str, Any], itemsize: int) -> "Model":
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        q_heads, kv_heads, dim = (
            config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        attention = hidden * dim * (2 * q_heads + 2 * kv_heads)
        return cls(
            layers * (attention + 3 * hidden * config["intermediate_size"]),
            hidden * config["vocab_size"],
            layers * kv_heads,
            q_heads // kv_heads,
            dim,
            itemsize,
        )


@dataclass(frozen=True)
class Kept:
    """What a request of n tokens holds: entries of all heads."""

    heads: int
    window: int = 1
    recent: int = 0
    window_entries: int | None = None  # of a sealed window, all heads; None: nothing is sealed

    @classmethod
    def of(cls, entry: Entry, model: Model, longest: int) -> "Kept | None":
        """None where no closed form says it: budgets without a plan file, another order of sealing."""
        if entry.stock or entry.retention == 1:
            return cls(model.heads)
        if not (plan := entry.settings.get("TANGRAM_PLAN")) or "TANGRAM_RESERVE" in entry.settings:
            return None
        layout = plan_layout(load_plan(Path(plan)), Settings.from_env(entry.settings), longest)
        kept = sum(len(group.heads) * group.kept for group in layout.groups)
        return cls(model.heads, layout.rule.window, layout.rule.recent, kept)

    def entries(self, n: np.ndarray) -> np.ndarray:
        """K/V pairs that the query of each request's last token sees, itself included."""
        n = n.astype(np.int64)
        if self.window_entries is None:
            return n * self.heads
        sealed = np.maximum(0, (n - 1 - self.recent) // self.window)
        return sealed * self.window_entries + (n - sealed * self.window) * self.heads


@dataclass(frozen=True)
class Load:
    """Prompts, how much of each came from the cache, and answers; in tokens."""

    prompts: Sequence[int]
    cached: Sequence[int]
    answers: Sequence[int]

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> "Load":
        """From what SGLang's client writes."""
        return cls(result["input_lens"], result["cached_tokens"], result["output_lens"])

    @property
    def computed(self) -> int:
        return sum(self.prompts) - sum(self.cached)


def floors_ms(
    load: Load, steps: int, model: Model, kept: Kept | None, rates: Rates
) -> dict[str, float]:
    """By class of work; ``steps`` of decode are what the server needed for the answers."""
    weights = (model.layers_size + model.head_size) * model.itemsize
    found = {
        PREFILL_GEMM: 2 * model.layers_size * load.computed / rates.flops,
        DECODE_GEMM: steps * weights / rates.bytes,
    }
    if kept is not None:
        met = read = 0
        for prompt, cached, answer in zip(load.prompts, load.cached, load.answers, strict=True):
            met += kept.entries(np.arange(cached + 1, prompt + 1)).sum()
            # an answer's first token comes from the prompt's last chunk
            read += kept.entries(np.arange(prompt + 1, prompt + answer)).sum()
        # q.k and p.v, a multiplication and an addition for each of the head's numbers
        found[PREFILL_ATTENTION] = 4 * model.head_dim * model.ratio * int(met) / rates.flops
        found[DECODE_ATTENTION] = 2 * model.head_dim * model.itemsize * int(read) / rates.bytes
    return {work: 1e3 * seconds for work, seconds in found.items()}
