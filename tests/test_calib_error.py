"""Error curves: what they are by the formula, whatever the chunks, and from a real scheduler."""

import numpy as np
import pytest
import torch

from tangram_sglang.calib.error_curves import (
    error_curves,
    grid,
    head_gram,
    query_positions,
    selection_order,
)
from tangram_sglang.calib.observations import Request, errors_of, write_request
from tangram_sglang.calib.observer import Observer
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.score import KeyDiff, Window
from tests.harness import Req, run_scenario
from tests.reference.model import final_hidden
from tests.reference.tiny import random_tokens, save, tiny_gpt_oss, tiny_llama

W, R, SINKS, D, H, HQ = 32, 16, 4, 16, 3, 6
RULE = WindowRule(W, R, 4, SINKS)
SHAPE = ModelShape(tuple(LayerShape(i, HQ, H, D, None, 0.3) for i in range(2)))
FREQ = dict.fromkeys(range(2), torch.ones(D // 2, dtype=torch.float64))


def by_the_formula(q, k, v, projection, window, scaling, kept, learnt=None):
    """One head by one, one query by one, in fp64: [H] at ``kept`` tokens of a window.

    With ``kept`` None the difference to no output at all; ``learnt``: attention sinks, [HQ].
    """
    q, k, v = q.double(), k.double(), v.double()
    start, ratio, dim = window * W, q.shape[1] // k.shape[1], q.shape[2]
    mine = slice(start, start + W)
    errors = []
    for head in range(k.shape[1]):
        sinks = SINKS if window == 0 else 0
        seen = Window(
            k[mine, head][None], v[mine, head][None], start, torch.tensor([head]), sinks, None
        )
        scores = KeyDiff().score(seen)[0].tolist()
        order = sorted(range(W), key=lambda j: (j >= sinks, (j >= sinks) * -scores[j], j))
        dropped = set() if kept is None else {start + j for j in order[kept:]}
        total = []
        for p in range((window + 1) * W + R, (window + 2) * W + R):
            difference = torch.zeros(projection.shape[0], dtype=torch.float64)
            for i in range(head * ratio, (head + 1) * ratio):
                outs = []
                for gone in (set(), dropped):
                    places = [t for t in range(p + 1) if t not in gone]
                    logits = scaling * (k[places, head] @ q[p, i])
                    if learnt is not None:
                        logits = torch.cat([logits, learnt[i : i + 1].double()])
                    weights = logits.softmax(dim=0)[: len(places)]
                    outs.append(weights @ v[places, head])
                columns = projection[:, i * dim : (i + 1) * dim].double()
                difference += columns @ (outs[1] - outs[0] if kept is not None else outs[0])
            total.append(difference.square().sum())
        errors.append(torch.stack(total).mean())
    return torch.stack(errors)


@pytest.fixture(scope="module")
def tensors():
    generator = torch.Generator().manual_seed(4)
    n = 3 * W + R
    q, k, v = (torch.randn(n, heads, D, generator=generator) for heads in (HQ, H, H))
    return q, k, v, torch.randn(40, HQ * D, generator=generator)


@pytest.mark.parametrize(
    ("window", "learnt"),
    [(0, None), (1, None), (1, torch.tensor([4.0, -2.0, 0.0, 3.0, 1.0, 6.0]))],
    ids=["first", "second", "attention-sinks"],
)
def test_curves_are_those_of_the_formula(tensors, window, learnt):
    q, k, v, projection = tensors
    mine = slice(window * W, (window + 1) * W)
    sinks = SINKS if window == 0 else 0
    seen = Window(
        k[mine].transpose(0, 1), v[mine].transpose(0, 1), window * W, torch.arange(H), sinks, None
    )
    positions = query_positions(RULE.epoch_end(window), W)
    assert len(positions) == W
    n = int(positions[-1]) + 1
    curves, power = error_curves(
        q[positions],
        positions,
        k[:n],
        v[:n],
        window * W,
        selection_order(KeyDiff().score(seen), sinks),
        head_gram(projection, HQ, H),
        0.3,
        grid(W),
        learnt,
    )
    assert grid(W)[-1] == W and (curves[:, -1] == 0).all()
    for i in (0, 5, 11):
        want = by_the_formula(q, k, v, projection, window, 0.3, grid(W)[i], learnt)
        torch.testing.assert_close(curves[:, i].double(), want, rtol=1e-3, atol=1e-4)
    want = by_the_formula(q, k, v, projection, window, 0.3, None, learnt)
    torch.testing.assert_close(power.double(), want, rtol=1e-3, atol=1e-4)


def test_long_windows_are_seen_by_a_sample_of_the_queries():
    assert query_positions(768, 512).tolist() == list(range(768, 1280, 8))


def observe(out, tensors, chunk, prompts=1):
    write_request(out, Request(profiles=[], moments=False, error="keydiff"))
    q, k, v, projection = tensors
    observer = Observer(
        SHAPE, FREQ, RULE, out, projections=lambda: {0: projection, 1: 2 * projection}
    )
    for _ in range(prompts):
        for first in range(0, len(q), chunk):
            end = min(len(q), first + chunk)
            for layer in range(2):
                observer.queries(layer, q[first:end], torch.arange(first, end))
                observer.context(layer, k[first:end], v[first:end])
    return errors_of(out, "curves")


@pytest.mark.parametrize("chunk", [7, 50])
def test_chunks_and_other_prompts_change_nothing(tensors, tmp_path, chunk):
    (tmp_path / "a").mkdir()
    whole = observe(tmp_path / "a", tensors, 1000)
    # windows 0 and 1 are followed by W tokens that see them sealed, window 2 is not
    assert list(whole) == ["error-00000.npz", "error-00001.npz"]
    (tmp_path / "b").mkdir()
    found = observe(tmp_path / "b", tensors, chunk, prompts=2)
    assert len(found) == 4
    for i, curves in enumerate(found.values()):
        want = whole[f"error-{i % 2:05}.npz"]
        assert curves == pytest.approx(want, rel=1e-4, abs=1e-5)
        # the second layer projects twice as strongly
        assert curves[H:] == pytest.approx(4 * curves[:H], rel=1e-4)


def test_a_batch_of_several_prompts_is_refused(tensors, tmp_path):
    write_request(tmp_path, Request(profiles=[], error="keydiff"))
    q, _, _, projection = tensors
    observer = Observer(
        SHAPE, FREQ, RULE, tmp_path, projections=lambda: dict.fromkeys(range(2), projection)
    )
    both = torch.cat([torch.arange(40), torch.arange(72)])
    with pytest.raises(TangramError, match="one prompt at a time"):
        observer.queries(0, q, both)


def test_a_model_whose_output_projection_is_not_found_is_refused(tmp_path):
    write_request(tmp_path, Request(profiles=[], error="keydiff"))
    with pytest.raises(TangramError, match="layer 0: its output projection was not found"):
        Observer(SHAPE, FREQ, RULE, tmp_path)


MAKERS = {
    "llama": lambda **heads: tiny_llama(layers=2, **heads),
    "gpt-oss": lambda **heads: tiny_gpt_oss(layer_types=["full_attention"] * 2, **heads),
}


@pytest.mark.server
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_server_measures_what_a_plain_forward_pass_gives(tmp_path, make):
    torch.set_num_threads(1)
    model = make(seed=7, q_heads=HQ, kv_heads=H)
    folder, prompt = save(model, tmp_path / "model"), random_tokens(3 * W + R, seed=1)
    out = tmp_path / "out"
    out.mkdir()
    write_request(out, Request(profiles=[], moments=False, error="keydiff"))
    run_scenario(
        folder,
        [Req(prompt, max_new_tokens=1)],
        server_args={"attention_backend": "tangram", "chunked_prefill_size": 50},
        env={
            **{"TANGRAM_WINDOW": str(W), "TANGRAM_RECENT": str(R), "TANGRAM_PAGE": "4"},
            **{"TANGRAM_RETENTION": "1.0", "TANGRAM_OBSERVE": str(out)},
        },
        timeout_s=300,
    )
    seen = []

    def attend(layer, q, k, v):
        seen.append([x.transpose(0, 1) for x in (q, k, v)])
        k, v = (x.repeat_interleave(HQ // H, dim=0) for x in (k, v))
        logits = q @ k.transpose(1, 2) * model.model.layers[0].self_attn.scaling
        logits += torch.full_like(logits, -torch.inf).triu(1)
        learnt = sinks_of(layer)
        if learnt is not None:
            column = learnt[:, None, None].expand(-1, len(prompt), 1)
            logits = torch.cat([logits, column], dim=2)
        return logits.softmax(dim=2)[..., : len(prompt)] @ v

    def sinks_of(layer):
        return getattr(model.model.layers[layer].self_attn, "sinks", None)

    with torch.no_grad():
        final_hidden(model, prompt, 0, attend)
        found = errors_of(out, "curves")
        assert len(found) == 2
        for window, curves in enumerate(found.values()):
            for layer, (q, k, v) in enumerate(seen):
                attention = model.model.layers[layer].self_attn
                weight = attention.o_proj.weight
                rest = window, attention.scaling, grid(W)[6], sinks_of(layer)
                want = by_the_formula(q, k, v, weight, *rest)
                mine = curves[layer * H : (layer + 1) * H, 6]
                assert mine == pytest.approx(want.numpy(), rel=2e-3, abs=1e-6)
    assert np.isfinite(list(errors_of(out, "power").values())).all()
