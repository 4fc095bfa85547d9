"""The calibration corpus: what it holds, that it never changes unnoticed, and the shipped plans."""

import re
from collections import Counter
from importlib import resources

import pytest

from tangram_sglang.calib.texts import (
    CORPUS,
    Text,
    calibration_prompts,
    corpus,
    corpus_hash,
)
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.file import load_plan
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.stats import load_query_stats
from tangram_sglang.plan.window import WindowRule

RULE = WindowRule(512, 256, 16, 4)
PLANS = resources.files("tangram_sglang") / "plans"
SMOLLM2 = ModelShape(tuple(LayerShape(i, 9, 3, 64, None, 0.125) for i in range(30)))


class Words:
    """A tokenizer of words and marks, with or without a chat format."""

    def __init__(self, chat_template=None):
        self.chat_template = chat_template

    def __call__(self, text, add_special_tokens=True):
        ids = [hash(word) for word in re.findall(r"\w+|[^\w\s]", text)]
        return type("Encoding", (), {"input_ids": ids})

    def apply_chat_template(self, chat, tokenize):
        return "".join(f"<{turn['role']}> {turn['content']} </>" for turn in chat)


def test_the_corpus_is_mixed_from_its_beginning():
    texts = corpus()
    assert len({text.name for text in texts}) == len(texts)
    assert len({text.kind for text in texts[:5]}) == 5
    assert min(Counter(text.kind for text in texts).values()) >= 2


def test_the_corpus_is_the_one_that_the_shipped_plans_were_made_from():
    # a change of any text or generator shows here: calibrate again, or add a text instead
    for rho in ("0.5", "0.3", "0.2"):
        plan = load_plan(PLANS / f"smollm2-135m-instruct-rho{rho}.json")
        assert plan.calibration.corpus_hash == corpus_hash(corpus())


def test_the_corpus_shares_no_paragraph_with_the_demo():
    demo = (resources.files("tangram_sglang.cli") / "texts" / "jargon_file.txt").read_text()
    theirs = {line for line in demo.splitlines() if len(line) > 40}
    ours = {
        line for text in corpus() for _, content in text.messages for line in content.split("\n")
    }
    assert theirs
    assert not theirs & ours


def test_the_corpus_is_small_and_plain():
    files = [path for path in CORPUS.iterdir() if path.name.endswith(".txt")]
    assert sum(len(path.read_bytes()) for path in files) <= 250_000
    readme = (CORPUS / "README.md").read_text()
    for path in files:
        assert path.read_text(encoding="ascii").isprintable() is False
        assert f"`{path.name}`" in readme, "each text needs its origin and terms"


@pytest.mark.parametrize("tokenizer", [Words(), Words("a template")], ids=["plain", "chat"])
def test_prompts_end_where_their_last_window_is_sealed(tokenizer):
    texts, prompts = calibration_prompts(tokenizer, RULE, 20)
    windows = [RULE.sealed(len(prompt)) for prompt in prompts]
    assert sum(windows) >= 20 > sum(windows[:-1])
    assert len(texts) == len(prompts)
    for prompt, sealed in zip(prompts, windows, strict=True):
        assert RULE.sealed(len(prompt) - 1) == sealed - 1


@pytest.mark.parametrize("words", [3000, 3327, 3328, 9000])
def test_a_followed_text_goes_on_for_a_window_and_seals_no_more(words):
    text = Text("prose", "t", (("text", "w " * words),))
    (short,), (long,) = (
        calibration_prompts(Words(), RULE, 4, [text], followed=x)[1] for x in (False, True)
    )
    assert RULE.sealed(len(long)) == RULE.sealed(len(short)) == 5
    assert len(short) == 5 * 512 + 256 + 1
    assert len(long) == min(words, 6 * 512 + 256)


def test_samples_are_windows_that_every_profile_can_use():
    """Five windows a text; the last one lacks what follows it in the first of two."""
    texts = [Text("prose", str(n), (("text", "w " * n),)) for n in (3327, 3328, 3328)]

    def chosen(samples, **kwargs):
        return len(calibration_prompts(Words(), RULE, samples, texts, **kwargs)[0])

    assert [chosen(n) for n in (5, 6, 10, 11)] == [1, 2, 2, 3]
    assert [chosen(n, followed=True) for n in (4, 5, 9, 10)] == [1, 2, 2, 3]
    assert [chosen(n, behind=True) for n in (4, 5, 8, 9)] == [1, 2, 2, 3]
    assert [chosen(n, followed=True, behind=True) for n in (4, 5, 8, 9)] == [1, 2, 2, 3]
    with pytest.raises(TangramError, match="give 14 windows of 512 tokens"):
        chosen(15, followed=True)


def test_the_real_models_tokens_are_enough_for_a_hundred_samples(smollm2):
    from transformers import AutoTokenizer

    _, prompts = calibration_prompts(AutoTokenizer.from_pretrained(smollm2), RULE, 100)
    assert sum(RULE.sealed(len(prompt)) for prompt in prompts) >= 100


def test_more_samples_than_the_texts_give_are_refused():
    with pytest.raises(TangramError, match="10000 were asked for; lower --samples"):
        calibration_prompts(Words(), RULE, 10_000)


@pytest.mark.parametrize("rho", [0.5, 0.3, 0.2])
def test_the_shipped_plans_load_with_their_statistics(rho):
    plan = load_plan(PLANS / f"smollm2-135m-instruct-rho{rho}.json")
    assert plan.calibration.retention == rho
    assert plan.calibration.samples >= 50
    assert len(plan.budgets) == 90
    # budgets from errors share out just what there is
    assert plan.calibration.scorers == ["error"]
    assert sum(plan.budgets) / 90 == pytest.approx(rho, abs=1e-4)
    assert plan.drift.scorer == "keydiff" and len(plan.drift.limits) == 90
    path = PLANS / plan.selection.stats_file
    stats = load_query_stats(path, plan.selection.stats_hash, SMOLLM2)
    assert stats.mean.isfinite().all()
    assert stats.factor.isfinite().all()
    assert (stats.diagonal >= 0).all()
    assert path.stat().st_size < 1_000_000
