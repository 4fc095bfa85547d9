"""The CPU and the GPU backend side by side, each over a pool of its own, taking the same steps."""

from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import nn

from tangram_sglang.backend.attention import TangramAttentionBackend
from tangram_sglang.backend.build import spare_pages
from tangram_sglang.backend.cuda_attention import TangramCudaBackend
from tangram_sglang.backend.drift import DriftWatch
from tangram_sglang.backend.gates import GateScores
from tangram_sglang.backend.kv_pool import TangramKVPool
from tangram_sglang.cache.store import PrefixStore
from tangram_sglang.plan.drift import DriftRule
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.serving import ServingPlan
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.score import create_scorer

LAYERS, Q_HEADS, HEADS, DIM = 2, 4, 2, 16
GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where the GPU backend runs
RULE = WindowRule(16, 8, 4, 2)


class Side:
    """One backend over a pool of its own; both sides take the same steps and are watched."""

    def __init__(
        self,
        backend,
        pages: int,
        spare: int,
        scorer="keydiff",
        watcher=None,
        splits="map",
        rule=RULE,
        slide=None,
    ):
        # with ``slide``, the second layer sees so many tokens
        windows = [None] * (LAYERS - 1) + [slide]
        shape = ModelShape(
            tuple(LayerShape(i, Q_HEADS, HEADS, DIM, w, DIM**-0.5) for i, w in enumerate(windows))
        )
        layout = KVLayout.build(
            shape,
            rule,
            budgets=[0.3, 0.9, 0.5, 0.1][: len(shape.full_heads)],
            retention=0.5,
            per_group=2,
            grouping="global",
            max_tokens=200,
        )
        self.device = GPU if backend is TangramCudaBackend else "cpu"
        chosen = create_scorer(scorer)
        scaling = frequencies = self.gates = None
        if "q_window" in chosen.needs:
            layout = layout.with_queries(shape, chosen.q_window(rule.window))
            scaling = torch.tensor(shape.scalings, device=self.device)
        if "rope" in chosen.needs:
            heads = len(shape.full_heads)
            frequencies = torch.logspace(0, -3, DIM // 2, dtype=torch.float64, device=self.device)
            frequencies = frequencies.expand(heads, -1)
        if "hidden" in chosen.needs:
            layout = layout.with_scores()
            # prefills are longer than what has a fixed place
            self.gates = GateScores(list(range(LAYERS)), 3, HEADS, self.device)
        plan = ServingPlan(
            "test", 0.5, scorer, chosen, None, layout, "none", scaling, frequencies, splits=splits
        )
        self.pool = TangramKVPool(
            plan,
            size=200,
            num_pages=pages,
            num_spare=spare,
            max_rows=3,
            dtype=torch.float32,
            device=self.device,
            layer_num=LAYERS,
            enable_memory_saver=False,
        )
        self.pool.pages.fill_(torch.nan)
        self.pool.pages[0] = 0
        self.pool.store = PrefixStore(self.pool.rows)
        layers = [
            RadixAttention(Q_HEADS, DIM, DIM**-0.5, HEADS, i, sliding_window_size=(w or 0) - 1)
            for i, w in enumerate(windows)
        ]
        model = nn.ModuleList(layers)
        runner = SimpleNamespace(
            device=self.device, req_to_token_pool=None, token_to_kv_pool=self.pool, model=model
        )
        self.layers = layers
        limits = (0.3, 0.5, 0.4, 0.6)[: len(shape.full_heads)]
        drift = DriftRule("keydiff", limits, 0.5, "global", 2)
        self.watch = watcher or DriftWatch(drift, layout, self.device)
        self.backend = backend(runner, self.watch, self.gates)

    def forward(self, targets, decode: bool, qkv, gates=None, sinks=None) -> list[torch.Tensor]:
        """One step of SGLang's: pages, metadata, then every layer.

        Args:
            targets: (row, tokens after the step).
            decode: whether it decodes.
            qkv: q, k and v of each layer.
            gates: [layers, T, H], what hooks would score, for a scorer that reads them.
            sinks: [HQ], what a model with attention sinks hands over.
        """
        extra = {} if sinks is None else {"sinks": sinks.to(self.device)}
        before = [self.pool.rows.live[row].n for row, _ in targets]
        self.pool.rows.advance(targets)
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            batch_size=len(targets),
            req_pool_indices=torch.tensor([row for row, _ in targets], device=self.device),
            seq_lens=torch.tensor([n for _, n in targets], device=self.device),
            extend_prefix_lens_cpu=before,
            positions=torch.cat(
                [torch.arange(a, n) for a, (_, n) in zip(before, targets, strict=True)]
            ),
        )
        self.backend.init_forward_metadata(batch)
        run = self.backend.forward_decode if decode else self.backend.forward_extend
        found = []
        for layer, mine in zip(self.layers, qkv, strict=True):
            if self.gates is not None:
                self.gates.put(layer.layer_id, gates[layer.layer_id].to(self.device))
            found.append(run(*(x.to(self.device) for x in mine), layer, batch, **extra).cpu())
        return found


def make_sides(
    pages: int,
    scorer="keydiff",
    watchers=(None, None),
    splits="map",
    rule=RULE,
    slide=None,
) -> tuple[Side, Side]:
    """The CPU's and the GPU's, of ``pages`` pages each."""
    cpu = Side(TangramAttentionBackend, pages, 0, scorer, watchers[0], rule=rule, slide=slide)
    spare = spare_pages(cpu.pool.plan.layout, "cuda")
    return cpu, Side(TangramCudaBackend, pages, spare, scorer, watchers[1], splits, rule, slide)


def random_qkv(tokens: int, generator):
    """q, k, v of every layer, as slices of one projection."""
    for _ in range(LAYERS):
        both = torch.randn(tokens, (Q_HEADS + 2 * HEADS) * DIM, generator=generator)
        q, k, v = both.split([Q_HEADS * DIM, HEADS * DIM, HEADS * DIM], dim=1)
        yield q, k.view(-1, HEADS, DIM), v.view(-1, HEADS, DIM)


def read_pages(side: Side) -> np.ndarray:
    """Pages that the last step reads although it may give them away."""
    steps = [state.step for state in side.pool.rows.live.values() if state.step]
    pages = [x.ravel() for step in steps for x in (*step.tail, *step.queries)]
    return np.concatenate(pages or [np.empty(0)])
