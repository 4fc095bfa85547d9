"""The reference itself: that it is the model at retention 1.0, and docs/design.md below that."""

import json
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tangram_sglang.kernels.select_reference import select_reference
from tangram_sglang.score import Window, create_scorer
from tests.reference import CompressedRun, layout_for
from tests.reference.model import sliding_window
from tests.reference.scorers import SCORERS
from tests.reference.tiny import (
    BOS,
    EOS,
    VOCAB,
    random_gates,
    random_query_stats,
    random_tokens,
    save,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_llama,
)

W, R, P, SINKS = 32, 16, 4, 3
MODELS = {
    "llama-HQ4-H2": tiny_llama,
    "llama-HQ9-H3": lambda: tiny_llama(q_heads=9, kv_heads=3, layers=3, seed=1),
    "gemma3-HQ4-H2-sliding8": tiny_gemma3,
    "gpt-oss-HQ4-H2-sliding8": tiny_gpt_oss,
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads that wait for each other on a busy machine take most of the time of tiny models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=MODELS, scope="module")
def model(request):
    return MODELS[request.param]()


def layout(model, retention=0.4, recent=R, **settings):
    """Budgets differ between heads, so that groups keep different counts."""
    heads = sum(sliding_window(model.config, i) is None for i in range(len(model.model.layers)))
    heads *= model.config.num_key_value_heads
    budgets = [0.1 + 0.8 * (7 * i % heads) / heads for i in range(heads)]
    sizes = {"window": W, "recent": recent, "page": P, "sinks": SINKS, "group_heads": 2}
    return layout_for(model, retention=retention, budgets=budgets, **sizes, **settings)


def run_of(model, scorer="keydiff", **settings):
    stats = random_query_stats(model) if scorer == "expected_attention" else None
    gates = random_gates(model) if scorer == "fastkvzip" else None
    return CompressedRun(model, layout(model, **settings), scorer, stats, gates)


def hf_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def largest_gap(a, b):
    return (a - b).abs().max().item()


# the model


def test_retention_1_is_the_model(model):
    tokens = random_tokens(3 * W + R + 5)
    run = run_of(model, retention=1.0)
    assert largest_gap(run.extend(tokens), hf_logits(model, tokens)) < 1e-4
    assert all(kept == list(range(j * W, j * W + W)) for (_, _, j), kept in run.kept.items())


def test_gemma3_prompt_shorter_than_a_window():
    model = tiny_gemma3(sliding_window=8)
    tokens = random_tokens(21)
    assert largest_gap(run_of(model).extend(tokens), hf_logits(model, tokens)) < 1e-4


def test_greedy_at_retention_1_is_the_models(model):
    tokens = random_tokens(W + 3)
    generated = model.generate(
        torch.tensor([tokens]), max_new_tokens=40, min_new_tokens=40, do_sample=False
    )
    # generate() bars the end of text until min_new_tokens
    expected = generated[0, len(tokens) :].tolist()
    assert EOS not in (got := run_of(model, retention=1.0).greedy(tokens, 40))
    assert got == expected


# docs/design.md, The state is a function of the tokens


@pytest.mark.parametrize("scorer", SCORERS)
def test_one_pass_with_masks_written_from_the_kept_sets(model, scorer):
    """HF's own layers, attention and cache, all tokens at once, each query with its own mask.

    Then the windows are scored and chosen once more, by the package, from HF's cache.
    """
    tokens = random_tokens(2 * W + R + 7)
    run = run_of(model, scorer)
    logits = run.extend(tokens)
    expected, cache = _one_pass(model, run, tokens)
    assert largest_gap(logits, expected) < 1e-4
    assert largest_gap(logits, hf_logits(model, tokens)) > 0.1

    heads = list(dict.fromkeys((layer, head) for layer, head, _ in sorted(run.kept)))
    stats = random_query_stats(model)
    for (layer, head, j), kept in run.kept.items():
        start, sinks = j * W, SINKS if j == 0 else 0
        index = torch.tensor([heads.index((layer, head))])
        k, v = (x[:, head, start : start + W] for x in (cache[layer].keys, cache[layer].values))
        theirs = create_scorer(scorer)
        q, scaling, inv_freq, hidden, _ = run._asked(layer, head, start, start + W)
        gate = None
        if "hidden" in theirs.needs:
            place = sorted({layer for layer, _ in heads}).index(layer)
            gates = random_gates(model).projected_in(torch.float32).layer(place)
            gate = gates.scores(hidden)[None, :, head]
        if "q_window" in theirs.needs:
            q = q[:, -theirs.q_window(W) :]
        window = Window(
            k, v, start, index, sinks, stats.select(index),
            q[None], torch.tensor([scaling]), inv_freq[None], gate,
        )  # fmt: skip
        theirs = theirs.score(window)
        scores = run.scores[layer, head, j]
        # gate scores are rounded to 11 bits, here and there up
        rtol = 2**-10 if scorer == "fastkvzip" else 1e-5
        torch.testing.assert_close(scores[sinks:], theirs[0, sinks:], atol=1e-5, rtol=rtol)
        assert kept == (select_reference(scores[None], len(kept), sinks)[0] + start).tolist()


def _one_pass(model, run, tokens):
    """Logits, and K and V of every layer."""
    config, decoder = model.config, model.model
    n = len(tokens)
    positions = torch.arange(n)[None]
    ratio = config.num_attention_heads // config.num_key_value_heads
    cache = DynamicCache()
    with torch.no_grad():
        x = decoder.embed_tokens(torch.tensor([tokens]))
        for i, layer in enumerate(decoder.layers):
            kind = (config.layer_types[i],) if config.model_type == "gemma3_text" else ()
            mask = torch.full((1, config.num_attention_heads, n, n), -torch.inf)
            for head in range(config.num_key_value_heads):
                for p in range(n):
                    seen = _seen(run, sliding_window(config, i), i, head, p)
                    mask[0, head * ratio : (head + 1) * ratio, p, seen] = 0.0
            rotary = decoder.rotary_emb(x, positions, *kind)
            x = layer(x, attention_mask=mask, position_embeddings=rotary, past_key_values=cache)
        return model.lm_head(decoder.norm(x))[0], cache.layers


def _seen(run, window, layer, kv_head, p):
    if window is not None:
        return [t for t in range(p + 1) if p - t < window]
    j = (p - R) // W if p >= R else 0
    kept = [t for i in range(j) for t in run.kept[layer, kv_head, i]]
    return kept + list(range(j * W, p + 1))


def test_kept_counts_and_sinks(model):
    n = 3 * W + R + 1
    run = run_of(model)
    run.extend(random_tokens(n))
    plan = layout(model)
    assert plan.rule.sealed(n) == 3
    full = [head for head in plan.place if plan.groups[plan.place[head][0]].sliding_window is None]
    assert set(run.kept) == set(run.scores) == {(*x, j) for x in full for j in range(3)}
    assert len({len(kept) for kept in run.kept.values()}) > 1, "all heads keep the same"
    for (layer, head, j), kept in run.kept.items():
        assert len(kept) == plan.kept[plan.place[layer, head][0]]
        assert kept == sorted(set(kept))
        assert j * W <= kept[0] and kept[-1] < (j + 1) * W
        assert j > 0 or kept[:SINKS] == list(range(SINKS))


@pytest.mark.parametrize("n, sealed", [(W + R, 0), (W + R + 1, 1), (2 * W + R, 1)])
def test_a_window_is_sealed_with_the_token_after_the_border(n, sealed):
    run = run_of(tiny_llama())
    run.extend(random_tokens(n))
    assert Counter(j for _, _, j in run.kept) == Counter(dict.fromkeys(range(sealed), 4))
    assert layout(tiny_llama()).rule.sealed(n) == sealed


def test_queries_up_to_the_border_see_raw_tokens(model):
    tokens = random_tokens(W + R + 20)
    gap = (run_of(model).extend(tokens) - hf_logits(model, tokens)).abs().amax(dim=1)
    assert gap[: W + R].max() < 1e-4
    assert gap[W + R] > 1e-2


def test_moving_the_border_by_one_moves_the_first_logits_that_differ(model):
    tokens = random_tokens(W + R + 4)
    here, earlier = (run_of(model, recent=r).extend(tokens) for r in (R, R - 1))
    gap = (here - earlier).abs().amax(dim=1)
    # experts' sums depend on which tokens share the pass
    assert gap[: W + R - 1].max() < 1e-4
    assert gap[W + R - 1] > 1e-2


@pytest.mark.parametrize("scorer", ["keydiff", "expected_attention"])
@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([1] * (2 * W + R + 2), id="one-by-one"),
        pytest.param([W + R, 1, W - 1, 1, W], id="at-the-borders"),
        pytest.param([7, 0, 100, 13, 1, 1, 29], id="odd"),
    ],
)
def test_pieces_give_the_same_state(model, scorer, pieces):
    tokens = random_tokens(sum(pieces), seed=3)
    whole, parts = run_of(model, scorer), run_of(model, scorer)
    expected = whole.extend(tokens)
    rest, logits = tokens, []
    for size in pieces:
        logits.append(parts.extend(rest[:size]))
        rest = rest[size:]
    assert parts.tokens == whole.tokens == tokens
    assert parts.kept == whole.kept
    # one row at a time and many rows at once round differently
    assert largest_gap(torch.cat(logits), expected) < 1e-4
    for key, scores in whole.scores.items():
        torch.testing.assert_close(parts.scores[key], scores, atol=1e-5, rtol=1e-5)


def test_greedy_goes_on_over_turns(model):
    run = run_of(model, "expected_attention")
    turns = [random_tokens(n, seed=n) for n in (W + 9, 5, 21)]
    answers = [run.greedy(turn, 20) for turn in turns]
    tokens = [t for turn, answer in zip(turns, answers, strict=True) for t in [*turn, *answer]]
    assert run.tokens == tokens

    again = run_of(model, "expected_attention")
    best = again.extend(tokens).argmax(dim=-1).tolist()
    assert again.kept == run.kept
    end = 0
    for turn, answer in zip(turns, answers, strict=True):
        start, end = end + len(turn), end + len(turn) + len(answer)
        assert best[start - 1 : end - 1] == answer


def test_per_layer_groups():
    model = tiny_llama()
    run = run_of(model, grouping="layer")
    run.extend(random_tokens(W + R + 1))
    plan = layout(model, grouping="layer")
    for (layer, head, _), kept in run.kept.items():
        assert len(kept) == plan.groups[plan.place[layer, head][0]].kept


def test_what_it_refuses():
    model = tiny_llama()
    with pytest.raises(ValueError, match="query_stats"):
        CompressedRun(model, layout(model), "expected_attention")
    with pytest.raises(ValueError, match="float32"):
        CompressedRun(tiny_llama().bfloat16(), layout(model), "keydiff")


@pytest.mark.parametrize(
    "make, architecture",
    [
        (tiny_llama, "LlamaForCausalLM"),
        (tiny_gemma3, "Gemma3ForCausalLM"),
        (tiny_gpt_oss, "GptOssForCausalLM"),
    ],
    ids=["llama", "gemma3", "gpt-oss"],
)
def test_saved_folder(make, architecture, tmp_path):
    model = make(seed=7)
    folder = save(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [architecture]
    assert (config["vocab_size"], config["max_position_embeddings"]) == (VOCAB, 4096)
    assert (config["bos_token_id"], config["eos_token_id"]) == (BOS, EOS)
    assert config["dtype"] == "float32"
    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens = random_tokens(30)
    assert torch.equal(hf_logits(loaded, tokens), hf_logits(model, tokens))
    assert torch.equal(hf_logits(make(seed=7), tokens), hf_logits(model, tokens))
    assert not torch.equal(hf_logits(make(seed=8), tokens), hf_logits(model, tokens))

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == VOCAB and tokenizer.eos_token_id == EOS
    assert tokenizer("w8 w255 w17").input_ids == [8, 255, 17]
    assert tokenizer.decode([8, 255, 17]) == "w8 w255 w17"
    chat = [{"role": "user", "content": "w9 w10"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer.convert_tokens_to_ids(
        ["<s>", "<|user|>", "w9", "w10", "<|end|>", "<|assistant|>"]
    )
