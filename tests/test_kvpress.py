"""Fidelity: our scorers choose what the presses of kvpress 0.5.5 choose (NVIDIA/kvpress).

One window of one layer, the same queries, keys and values for both. Where we differ on purpose, the
test says by what: docs/scorers.md has the list.
"""

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tangram_sglang.backend.compressor import Compressor
from tangram_sglang.backend.heads import head_tables
from tangram_sglang.backend.kv_pool import TangramKVPool
from tangram_sglang.calib.texts import corpus
from tangram_sglang.kernels.select_reference import select_reference
from tangram_sglang.plan.layout import Group, KVLayout
from tangram_sglang.plan.serving import ServingPlan
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.score import QueryStats, Window, create_scorer
from tests.reference.tiny import tiny_llama
from tests.serving import assert_same_kept

RATIO = 0.3


def press_class(module: str, name: str):
    """A press; kvpress' own __init__ is not run: it imports data sets and patches transformers."""
    if "kvpress" not in sys.modules:
        found = importlib.util.find_spec("kvpress")
        assert found is not None, "kvpress is missing: make env"
        package = ModuleType("kvpress")
        package.__path__ = list(found.submodule_search_locations)
        sys.modules["kvpress"] = package
    return getattr(importlib.import_module(f"kvpress.presses.{module}"), name)


@dataclass
class Layer:
    """An attention layer and what enters it in one window, [1, W, hidden]."""

    attention: nn.Module
    hidden: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.hidden.shape[1]

    def rotary(self, start: int):
        return self.attention.rotary_emb(
            self.hidden, torch.arange(start, start + self.tokens)[None]
        )

    def project(self, start: int):
        """q [1, HQ, W, D], k and v [1, H, W, D] of a window that starts at ``start``."""
        module, split = self.attention, (1, self.tokens, -1, self.attention.head_dim)
        layers = (module.q_proj, module.k_proj, module.v_proj)
        q, k, v = (layer(self.hidden).view(split).transpose(1, 2) for layer in layers)
        return *apply_rotary_pos_emb(q, k, *self.rotary(start)), v

    def press(self, press, start: int) -> torch.Tensor:
        """Scores of a press, [H, W]."""
        _, k, v = self.project(start)
        more = {"position_embeddings": self.rotary(start)}
        return press.score(self.attention, self.hidden, k, v, None, more)[0]

    def window(self, scorer, start: int, sinks: int, stats=None) -> Window:
        q, k, v = (x[0] for x in self.project(start))
        heads, asked = len(k), None
        if "q_window" in scorer.needs:
            asked = q.view(heads, -1, *q.shape[1:])[:, :, -scorer.q_window(self.tokens) :]
        scaling = torch.full((heads,), self.attention.scaling)
        return Window(k, v, start, torch.arange(heads), sinks, stats, asked, scaling, self.inv_freq)

    @property
    def inv_freq(self) -> torch.Tensor:
        heads = self.attention.config.num_key_value_heads
        return self.attention.rotary_emb.inv_freq.double().expand(heads, -1)


def random_layer(tokens=90, kv_heads=3) -> Layer:
    model = tiny_llama(seed=3, q_heads=6, kv_heads=kv_heads)
    attention = model.model.layers[0].self_attn
    attention.rotary_emb = model.model.rotary_emb
    generator = torch.Generator().manual_seed(0)
    return Layer(attention, torch.randn(1, tokens, 96, generator=generator))


@pytest.fixture(scope="module")
def real_layer(smollm2) -> Layer:
    """Layer 10 of SmolLM2 over the first 512 tokens of a calibration text."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    model.model.layers = model.model.layers[:11]
    (text,) = (text for text in corpus() if text.name == "persuasion")
    tokens = text.tokens(AutoTokenizer.from_pretrained(smollm2))[:512]
    attention, seen = model.model.layers[10].self_attn, []
    attention.rotary_emb = model.model.rotary_emb
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True
    )
    model.model(torch.tensor([tokens]))
    return Layer(attention, seen[0])


@pytest.fixture(params=["random", "real"])
def layer(request) -> Layer:
    return random_layer() if request.param == "random" else request.getfixturevalue("real_layer")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def calibrated(layer: Layer) -> QueryStats:
    """Statistics of queries that are not the window's, with a covariance of full rank."""
    config = layer.attention.config
    heads = (config.num_key_value_heads, -1)
    generator = torch.Generator().manual_seed(7)
    shape = (config.num_attention_heads, layer.attention.head_dim)
    mean = 2 * torch.randn(shape, generator=generator)
    factor = torch.randn(*shape, shape[1], generator=generator) / shape[1] ** 0.5
    diagonal = torch.rand(shape, generator=generator)
    scaling = torch.full((heads[0],), layer.attention.scaling)
    stats = (x.unflatten(0, heads) for x in (mean, factor, diagonal))
    return QueryStats(*stats, layer.inv_freq, scaling)


def stats_press(stats: QueryStats, **settings):
    """ExpectedAttentionStatsPress without its module, which imports data sets: the same override."""
    mean = stats.mean.flatten(0, 1)[None]
    factor, diagonal = stats.factor.flatten(0, 1), stats.diagonal.flatten(0, 1)
    covariance = (factor @ factor.mT + torch.diag_embed(diagonal))[None]

    class StatsPress(press_class("expected_attention_press", "ExpectedAttentionPress")):
        def get_query_statistics(self, module, hidden_states):
            return self.apply_avg_rope(module, mean, covariance, hidden_states.shape[1])

    return StatsPress(**settings)


def kept_count(tokens: int) -> int:
    press_class("base_press", "BasePress")
    return importlib.import_module("kvpress.utils").compute_n_kept(tokens, 1 - RATIO)


def assert_same_choice(layer: Layer, scores, theirs, sinks: int) -> None:
    """Top positions of every head; ties within rounding are counted, and none is allowed."""
    count = kept_count(layer.tokens)
    mine = select_reference(scores, count, sinks).tolist()
    wanted = theirs.topk(count, dim=-1).indices.sort(dim=-1).values.tolist()
    heads = [(0, head, 0) for head in range(len(mine))]
    by_head = (dict(zip(heads, x, strict=True)) for x in (mine, wanted, scores))
    assert_same_kept(*by_head, allowed=0)


PRESSES = [
    ("keydiff", "keydiff_press", "KeyDiffPress", {}),
    ("knorm", "knorm_press", "KnormPress", {}),
    ("streaming", "streaming_llm_press", "StreamingLLMPress", {"compression_ratio": 1 - RATIO}),
    ("snapkv", "snapkv_press", "SnapKVPress", {}),
]


@pytest.mark.parametrize("start", [0, 1024])
@pytest.mark.parametrize(
    ("name", "module", "press", "settings"), PRESSES, ids=[x[0] for x in PRESSES]
)
def test_a_press_chooses_the_same(layer, name, module, press, settings, start):
    scorer = create_scorer(name)
    if name == "snapkv":
        settings = {"window_size": scorer.q_window(layer.tokens)}
        assert settings == {"window_size": 32 if layer.tokens == 512 else 22}
    theirs = layer.press(press_class(module, press)(**settings), start)
    sinks = 4 if name == "streaming" else 0
    assert_same_choice(layer, scorer.score(layer.window(scorer, start, sinks)), theirs, sinks)


@pytest.mark.parametrize(("start", "sinks"), [(0, 4), (1024, 0)])
@pytest.mark.parametrize("name", ["expected_attention", "expected_attention_local"])
def test_expected_attention_chooses_the_same_as_its_press(layer, name, start, sinks):
    """The press knows windows at position 0 only; ours depend on the distance alone.

    Only the first window has sinks: of any other the press, too, is told to leave out none.
    """
    scorer, stats = create_scorer(name), None
    if name == "expected_attention":
        stats = calibrated(layer)
        press = stats_press(stats, n_sink=sinks)
    else:
        press = press_class("expected_attention_press", "ExpectedAttentionPress")(n_sink=sinks)
    mine = scorer.score(layer.window(scorer, start, sinks, stats))
    theirs = layer.press(press, 0)
    torch.testing.assert_close(mine[:, sinks:], theirs[:, sinks:], rtol=2e-3, atol=1e-7)
    assert_same_choice(layer, mine, theirs, sinks)


def test_tova_chooses_the_same_where_a_layer_has_one_kv_head():
    layer, scorer = random_layer(kv_heads=1), create_scorer("tova")
    theirs = layer.press(press_class("tova_press", "TOVAPress")(), 0)
    assert_same_choice(layer, scorer.score(layer.window(scorer, 0, 0)), theirs, 0)


def test_tova_differs_by_averaging_within_a_kv_head_only(layer):
    """On purpose: the press gives all KV heads of a layer the mean of our rows."""
    scorer = create_scorer("tova")
    mine = scorer.score(layer.window(scorer, 0, 0))
    theirs = layer.press(press_class("tova_press", "TOVAPress")(), 0)
    mean = mine[:, :-1].mean(dim=0).expand(len(mine), -1)
    torch.testing.assert_close(mean, theirs[:, :-1], rtol=1e-4, atol=1e-7)
    chosen = [select_reference(x, kept_count(layer.tokens), 0) for x in (mine, theirs)]
    assert not torch.equal(*chosen)


@pytest.mark.parametrize(
    ("name", "module", "press"),
    [
        ("keydiff", "keydiff_press", "KeyDiffPress"),
        ("snapkv", "snapkv_press", "SnapKVPress"),
        ("expected_attention_local", "expected_attention_press", "ExpectedAttentionPress"),
    ],
    ids=["keydiff", "snapkv", "expected_attention_local"],
)
def test_adakv_keeps_the_same_when_its_counts_are_our_budgets(layer, name, module, press):
    """AdaKV (arXiv 2407.11550) takes the top over all heads of a layer; what each head got of it is
    forced as its budget, and the window sealed into a pool."""
    scorer = create_scorer(name)
    settings = {"window_size": scorer.q_window(layer.tokens)} if name == "snapkv" else {}
    settings |= {"n_sink": 0} if name == "expected_attention_local" else {}
    inner = press_class(module, press)(compression_ratio=1 - RATIO, **settings)
    adakv = press_class("adakv_press", "AdaKVPress")(inner)
    _, k, v = layer.project(0)
    layer.attention.config._attn_implementation = "sdpa"
    more = {"position_embeddings": layer.rotary(0)}
    adakv.compress(layer.attention, layer.hidden, k, v, None, more)
    masked = layer.attention.masked_key_indices
    present = torch.ones(k.shape[1:3], dtype=torch.bool)
    present[masked[1], masked[2]] = False
    counts = present.sum(dim=1).tolist()
    assert len(set(counts)) > 1, "all heads keep the same"
    for head, (kept, stored) in enumerate(sealed(layer, scorer, counts)):
        wanted = present[head].nonzero()[:, 0]
        assert kept.tolist() == wanted.tolist()
        assert torch.equal(stored, torch.stack([k[0, head, wanted], v[0, head, wanted]]))


def sealed(layer: Layer, scorer, counts: list[int]):
    """Seal the window under these counts: of every head, offsets kept, and K and V in the pool."""
    window = layer.window(scorer, 0, 0)
    heads, size, dim = window.k.shape
    q_heads = layer.attention.config.num_attention_heads
    shape = ModelShape((LayerShape(0, q_heads, heads, dim, None, layer.attention.scaling),))
    groups = tuple(Group(((0, head),), count) for head, count in enumerate(counts))
    form = KVLayout(WindowRule(size, 0, 1, 0), groups, 1, dim, 2 * size)
    if window.q is not None:
        form = form.with_queries(shape, scorer.q_window(size))
    more = (window.scaling, window.inv_freq)
    plan = ServingPlan("test", RATIO, "test", scorer, None, form, "none", *more)
    pool = TangramKVPool(
        plan,
        size=2 * size,
        num_pages=form.peak_pages(size + 1),
        num_spare=0,
        max_rows=1,
        dtype=torch.float32,
        device="cpu",
        layer_num=1,
        enable_memory_saver=False,
    )
    pool.rows.open(1, size + 1)
    pool.rows.advance([(1, size + 1)])
    table = torch.from_numpy(pool.rows.table)
    (mine,) = head_tables(form, "cpu")[1]
    compressor = Compressor(pool, table)
    q = window.q
    found = compressor.seal(1, 0, window.k, window.v, window.heads, mine.groups, mine.columns, q)
    kept = {
        int(head): offsets
        for own, all_kept in found
        for head, offsets in zip(own, all_kept, strict=True)
    }
    for head, count in enumerate(counts):
        first = int(form.table_offset[head])
        pages = pool.pages[table[1, first : first + count].long()]
        yield kept[head], pages[:, 0, :, 0].transpose(0, 1)
