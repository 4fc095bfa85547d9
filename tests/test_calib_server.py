"""Observe mode in a real scheduler, against the keys and queries of a Hugging Face forward pass."""

import numpy as np
import pytest
import torch

from tangram_sglang.calib.observations import (
    RETENTIONS,
    count_windows,
    profile_key,
    read_queries,
)
from tangram_sglang.calib.shares import window_shares
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.score import KeyDiff, Window
from tests.calib_stand_in import read_shares
from tests.harness import Req, ScenarioFailed, run_scenario
from tests.reference.layout import model_shape
from tests.reference.tiny import random_tokens, save, tiny_gemma3, tiny_gpt_oss, tiny_llama

pytestmark = pytest.mark.server

RULE = WindowRule(window=32, recent=16, page=4, sinks=4)
ENV = {
    "TANGRAM_WINDOW": "32",
    "TANGRAM_RECENT": "16",
    "TANGRAM_PAGE": "4",
    "TANGRAM_RETENTION": "1.0",
}
PROMPTS = [random_tokens(n, seed=n) for n in (200, 49, 113)]
MODELS = {
    "llama": lambda: tiny_llama(seed=7, layers=3, q_heads=6, kv_heads=3),
    "gemma3": lambda: tiny_gemma3(seed=7),
    "gpt-oss": lambda: tiny_gpt_oss(seed=7),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    """Folder of a model, its shape, and per prompt what a forward pass without a server shows."""
    torch.set_num_threads(1)
    model = MODELS[request.param]()
    folder = save(model, tmp_path_factory.mktemp("calib") / "model")
    shape = model_shape(model)
    return folder, shape, [reference(model, shape, prompt) for prompt in PROMPTS]


@torch.no_grad()
def reference(model, shape, prompt):
    """(shares by profile_key of every sealed window, queries before RoPE) of one prompt."""
    full = [x for x in shape.layers if x.sliding_window is None]
    queries = {}

    def keep(layer):
        attention = model.model.layers[layer].self_attn
        module = getattr(attention, "q_norm", attention.q_proj)

        def hook(_, __, out):
            # gemma's norm sees heads apart, and before or after the transpose by version
            out = out[0] if out.ndim == 4 else out[0].unflatten(-1, (-1, shape.head_dim))
            queries[layer] = out if len(out) == len(prompt) else out.transpose(0, 1)

        return module.register_forward_hook(hook)

    hooks = [keep(x.layer_id) for x in full]
    cache = model(torch.tensor([prompt]), use_cache=True).past_key_values
    for hook in hooks:
        hook.remove()
    # YaRN's factor on both cosine and sine stays in the vectors
    factor = getattr(model.model.rotary_emb, "attention_scaling", 1.0)
    keys = torch.cat([cache.layers[x.layer_id].keys[0] for x in full])
    shares = []
    for j in range(RULE.sealed(len(prompt))):
        k = keys[:, j * 32 : (j + 1) * 32]
        scores = KeyDiff().score(Window(k, k, j * 32, torch.arange(len(k)), 0, None))
        shares.append(window_shares(scores.numpy(), RETENTIONS, [x.kv_heads for x in full]))
    return shares, factor * torch.stack([queries[x.layer_id][4:] for x in full]).double()


def observe(folder, out, prompts, **server_args):
    run_scenario(
        folder,
        [Req(prompt, max_new_tokens=3, rid=f"p{i}-") for i, prompt in enumerate(prompts)],
        server_args={"attention_backend": "tangram", **server_args},
        env={**ENV, "TANGRAM_OBSERVE": str(out)},
        timeout_s=300,
    )


@pytest.mark.parametrize("chunk", [50, 2048])
def test_a_server_shows_what_a_plain_forward_pass_shows(case, tmp_path, chunk):
    folder, shape, references = case
    observe(folder, tmp_path, PROMPTS[:1], chunked_prefill_size=chunk)
    shares, queries = references[0]
    for scope in ("global", "layer"):
        for i, rho in enumerate(RETENTIONS):
            found = read_shares(tmp_path, "keydiff", scope, rho)
            want = np.stack([window[scope][i] for window in shares])
            # a token more or less where two scores are equal but for rounding
            assert np.abs(found - want).max() <= 1 / 32 + 1e-6
            assert np.abs(found - want).mean() < 1e-3
    found = read_queries(tmp_path)
    assert found.shape.layers == tuple(x for x in shape.layers if x.sliding_window is None)
    assert found.count == queries.shape[1] == 196
    assert found.total == pytest.approx(queries.sum(dim=1).numpy(), abs=2e-3)
    square = torch.einsum("lthd,lthe->lhde", queries, queries).numpy()
    assert found.square == pytest.approx(square, rel=1e-4, abs=2e-3)


def test_prompts_in_one_batch_are_observed_like_prompts_alone(case, tmp_path):
    folder, _, references = case
    observe(folder, tmp_path, PROMPTS, chunked_prefill_size=2048)
    want = [window["global"] for shares, _ in references for window in shares]
    assert count_windows(tmp_path) == len(want)
    found = []
    for path in tmp_path.glob("window-*.npz"):
        with np.load(path) as window:
            found.append(window[profile_key("keydiff", "global")])
    # the scheduler chooses the order
    for shares in want:
        assert min(np.abs(shares - other).mean() for other in found) < 1e-3
    count = sum(queries.shape[1] for _, queries in references)
    assert read_queries(tmp_path).count == count


def test_observing_while_tokens_are_dropped_is_refused(tmp_path):
    folder = save(tiny_llama(), tmp_path / "model")
    with pytest.raises(ScenarioFailed, match="TANGRAM_OBSERVE needs every token"):
        run_scenario(
            folder,
            [],
            server_args={"attention_backend": "tangram"},
            env={**ENV, "TANGRAM_RETENTION": "0.5", "TANGRAM_OBSERVE": str(tmp_path)},
        )
