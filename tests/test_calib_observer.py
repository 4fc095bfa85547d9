"""The observer by itself: which calls make a window, and what is written of it."""

import numpy as np
import pytest
import torch

from tangram_sglang.calib.moments import QueryMoments, unrotate
from tangram_sglang.calib.observations import (
    RETENTIONS,
    Request,
    count_windows,
    profile_key,
    read_queries,
    windows_of,
    write_request,
)
from tangram_sglang.calib.observer import Observer
from tangram_sglang.calib.shares import window_shares
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.score import KeyDiff, QueryStats, Window, create_scorer
from tests.calib_stand_in import read_shares

W, D, FREQ = 16, 8, torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
RULE = WindowRule(window=W, recent=8, page=4, sinks=2)
# layer 3 has a sliding window; 2 of the 8 dimensions are not rotated
SHAPE = ModelShape(
    (
        LayerShape(1, 4, 2, D, None, D**-0.5),
        LayerShape(3, 4, 2, D, 32, D**-0.5),
        LayerShape(4, 2, 1, D, None, D**-0.5),
    )
)


def rotate(x, positions):
    """RoPE, as a complex product."""
    turn = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None].double() * FREQ)
    pairs = torch.complex(x[..., :3], x[..., 3:6]) * turn[:, None]
    return torch.cat([pairs.real, pairs.imag, x[..., 6:]], dim=-1)


def kv(seed, heads):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, W, D, generator=generator)


def observe(out, windows, **kwargs):
    """One pass in which every layer sees ``windows``, a list of (start, seed)."""
    observer = Observer(SHAPE, {1: FREQ, 4: FREQ}, RULE, out, **kwargs)
    for layer in SHAPE.layers:
        for start, seed in windows:
            observer.window(layer.layer_id, start, *kv(seed + layer.layer_id, layer.kv_heads))
    return observer


def expected(start, seed):
    heads = torch.arange(3)
    keys = torch.cat([kv(seed + 1, 2)[0], kv(seed + 4, 1)[0]])
    scores = KeyDiff().score(Window(keys, keys, start, heads, 0, None)).numpy()
    return window_shares(scores, RETENTIONS, [2, 1])


def test_windows_of_two_requests_with_the_same_start_stay_apart(tmp_path):
    windows = [(0, 10), (W, 20), (0, 30)]
    observe(tmp_path, windows)
    assert count_windows(tmp_path) == 3
    for scope in ("global", "layer"):
        found = read_shares(tmp_path, "keydiff", scope, 0.3)
        want = [expected(*window)[scope][RETENTIONS.index(0.3)] for window in windows]
        assert found == pytest.approx(np.stack(want))


def test_nothing_is_written_before_the_last_layer_has_seen_the_window(tmp_path):
    observer = Observer(SHAPE, {1: FREQ, 4: FREQ}, RULE, tmp_path)
    observer.window(1, 0, *kv(1, 2))
    assert count_windows(tmp_path) == 0
    observer.window(4, 0, *kv(4, 1))
    assert count_windows(tmp_path) == 1
    assert {path.suffix for path in tmp_path.iterdir()} == {".npz"}
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_the_request_file_chooses_profiles_and_retentions(tmp_path):
    write_request(tmp_path, Request(profiles=["streaming"], retentions=[0.25]))
    observe(tmp_path, [(0, 1)])
    [found] = windows_of(tmp_path, profile_key("streaming", "layer")).values()
    assert found.shape == (1, 3)
    assert windows_of(tmp_path, profile_key("keydiff", "layer")) == {}


def test_a_profile_that_needs_statistics_leaves_the_first_window_out(tmp_path):
    write_request(tmp_path, Request(["keydiff", "expected_attention"], [0.5]))
    with pytest.raises(TangramError, match="needs query statistics"):
        observe(tmp_path, [])
    flat = torch.zeros(3, 2, D)
    stats = QueryStats(flat, flat[..., None], flat, FREQ.expand(3, 3), torch.ones(3))
    observe(tmp_path, [(0, 1), (W, 2), (2 * W, 3)], query_stats=stats)
    assert len(read_shares(tmp_path, "keydiff", "global", 0.5)) == 3
    assert len(read_shares(tmp_path, "expected_attention", "global", 0.5)) == 2


def test_queries_are_summed_before_rope_and_without_those_at_the_sinks(tmp_path):
    observer = Observer(SHAPE, {1: FREQ, 4: FREQ}, RULE, tmp_path)
    positions = torch.tensor([0, 1, 2, 3, 7000, 8191])
    plain = {x.layer_id: torch.randn(6, x.q_heads, D, dtype=torch.float64) for x in SHAPE.layers}
    plain[4] = torch.cat([plain[4], plain[4]], dim=1)
    shape = ModelShape((SHAPE.layers[0], LayerShape(4, 4, 2, D, None, 1.0)))
    observer = Observer(shape, {1: FREQ, 4: FREQ}, RULE, tmp_path)
    for layer in (1, 3, 4):
        observer.queries(layer, rotate(plain[layer], positions), positions)
    found = read_queries(tmp_path)
    assert found.count == 4
    assert [x.layer_id for x in found.shape.layers] == [1, 4]
    for i, layer in enumerate((1, 4)):
        late = plain[layer][2:]
        assert found.total[i] == pytest.approx(late.sum(dim=0).numpy(), abs=1e-9)
        square = torch.einsum("thd,the->hde", late, late).numpy()
        assert found.square[i] == pytest.approx(square, abs=1e-9)


def test_moments_add_up_over_passes():
    q, positions = torch.randn(9, 2, D), torch.arange(9)
    whole, parts = QueryMoments(2, D), QueryMoments(2, D)
    whole.add(q, positions, FREQ)
    parts.add(q[:4], positions[:4], FREQ)
    parts.add(q[4:], positions[4:], FREQ)
    assert whole.count == parts.count == 9
    torch.testing.assert_close(whole.square, parts.square)


def test_unrotate_undoes_rope_far_out():
    x, positions = torch.randn(3, 2, D, dtype=torch.float64), torch.tensor([5, 8191, 131071])
    torch.testing.assert_close(unrotate(rotate(x, positions), positions, FREQ), x)


@pytest.mark.parametrize("chunk", [5, 1000])
def test_profiles_that_read_queries_get_those_of_the_windows_last_tokens(tmp_path, chunk):
    names = ["snapkv", "tova", "expected_attention_local"]
    write_request(tmp_path, Request(names, [0.5], moments=False))
    observer = Observer(SHAPE, {1: FREQ, 4: FREQ}, RULE, tmp_path)
    full = [x for x in SHAPE.layers if x.sliding_window is None]
    n = 2 * W + 3
    shown = {x.layer_id: torch.randn(3, n, x.q_heads, D) for x in full}
    for _ in range(2):
        for first in range(0, n, chunk):
            end = min(n, first + chunk)
            for x in full:
                q = shown[x.layer_id][0][first:end]
                observer.queries(x.layer_id, q, torch.arange(first, end))
        for x in full:
            _, k, v = shown[x.layer_id][:, :, : x.kv_heads].transpose(1, 2)
            for j in range(2):
                mine = slice(j * W, (j + 1) * W)
                observer.window(x.layer_id, j * W, k[:, mine], v[:, mine])
    assert count_windows(tmp_path) == 4
    for name in names:
        scorer, want = create_scorer(name), []
        for j in range(2):
            mine, scores = slice(j * W, (j + 1) * W), []
            for x in full:
                q, k, v = shown[x.layer_id][:, mine].transpose(1, 2)
                last = q[:, W - scorer.q_window(W) :].unflatten(0, (x.kv_heads, -1))
                heads = torch.arange(x.kv_heads)
                window = Window(
                    k[: x.kv_heads], v[: x.kv_heads], j * W, heads, RULE.sinks if j == 0 else 0,
                    None, last, torch.full((x.kv_heads,), x.scaling), FREQ.expand(x.kv_heads, -1),
                )  # fmt: skip
                scores.append(scorer.score(window))
            want.append(window_shares(torch.cat(scores).numpy(), [0.5], [2, 1])["global"][0])
        found = read_shares(tmp_path, name, "global", 0.5)
        assert found == pytest.approx(np.stack([*want, *want]))


def test_queries_of_a_batch_of_prompts_are_refused(tmp_path):
    write_request(tmp_path, Request(["tova"], [0.5]))
    observer = Observer(SHAPE, {1: FREQ, 4: FREQ}, RULE, tmp_path)
    with pytest.raises(TangramError, match="one prompt at a time"):
        observer.queries(1, torch.randn(9, 4, D), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]))
