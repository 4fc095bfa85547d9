"""bench/quality: its engine is the design, its texts ask what they say, its table adds up."""

import math

import pytest
import torch

from bench import quality
from bench.quality import Plans, Unit, arguments, measure, units
from bench.quality_engine import Lane, compare, hidden_states, model_shape
from bench.quality_table import FULL, draw, summarise, table
from bench.quality_texts import FACTS, PEOPLE, Text, _fact_chat, documents
from tangram_sglang.calib.generated import NAMES
from tangram_sglang.errors import TangramError
from tests.reference import CompressedRun, layout_for
from tests.reference.tiny import random_gates, random_query_stats, random_tokens, tiny_llama

ROOM = {"window": 32, "recent": 16, "page": 4, "sinks": 4}


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return tiny_llama(seed=5, layers=2, q_heads=6, kv_heads=3)


@torch.no_grad()
def test_the_engine_is_the_reference_in_every_lane(model):
    """Scorers, budgets and retentions side by side, over many windows and a last odd piece."""
    ids, stats = random_tokens(211, seed=3), random_query_stats(model, seed=2)
    budgets = torch.rand(6, generator=torch.Generator().manual_seed(1)).tolist()
    cases = [
        ("keydiff", 0.5, budgets),
        ("expected_attention", 0.3, budgets),
        ("streaming", 0.4, None),
        ("random", 0.5, budgets),
        ("snapkv", 0.3, budgets),
        ("tova", 0.4, budgets),
        ("knorm", 0.5, None),
        ("expected_attention_local", 0.4, budgets),
        ("fastkvzip", 0.4, budgets),
        ("keydiff", 1.0, None),
    ]
    gates = random_gates(model, seed=4)
    layouts = [layout_for(model, retention=r, budgets=b, **ROOM) for _, r, b in cases]
    lanes = [
        Lane(
            layout,
            name,
            stats if name == "expected_attention" else None,
            gates.projected_in(torch.float32) if name == "fastkvzip" else None,
        )
        for layout, (name, _, _) in zip(layouts, cases, strict=True)
    ]
    positions = torch.tensor([*range(30, 120, 7), *range(180, 211)])
    found = hidden_states(model, ids, lanes, positions)
    for hidden, layout, (name, _, _) in zip(found, layouts, cases, strict=True):
        reference = CompressedRun(model, layout, name, stats, gates)
        logits = reference.extend(ids)[positions]
        torch.testing.assert_close(model.lm_head(hidden), logits, rtol=1e-4, atol=1e-4)
    # and the lanes are not all the same
    assert (found[0] - found[-1]).abs().max() > 0.01


@torch.no_grad()
def test_kl_and_agreement_are_those_of_the_distributions(model):
    full, other = torch.randn(2, 70, model.config.hidden_size)
    kl, agree = compare(model, full, other)
    p, q = (model.lm_head(x).double().softmax(dim=-1) for x in (full, other))
    torch.testing.assert_close(kl.double(), (p * (p / q).log()).sum(dim=-1), rtol=1e-3, atol=1e-5)
    assert agree.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()
    assert compare(model, full, full)[0].abs().max() < 1e-6


def test_a_model_that_the_engine_does_not_know_is_refused(model):
    model.config.model_type = "gemma3_text"
    try:
        with pytest.raises(ValueError, match="model type gemma3_text"):
            model_shape(model)
    finally:
        model.config.model_type = "llama"


class Uniform(Plans):
    """Plans without a calibration."""

    def __init__(self, model):
        self._model = model

    def layout(self, unit):
        return layout_for(self._model, retention=unit.retention, **ROOM)

    def lane(self, unit):
        return Lane(self.layout(unit), unit.scorer)


def test_every_turn_of_every_unit_is_a_row(model):
    text = Text("t", "prose", "kl", tuple(random_tokens(150)), ((60, 70), (120, 150)))
    wanted = [Unit("keydiff", "uniform", 0.5), Unit("random", "uniform", 0.25)]
    full, both = measure(model, text, wanted, Uniform(model), batch=4)
    assert [(x["scorer"], x["turn"], x["queries"]) for x in both] == [
        *(("keydiff", 1, 10), ("keydiff", 2, 30)),
        *(("random", 1, 10), ("random", 2, 30)),
    ]
    assert {x["scorer"] for x in full} == {FULL}
    assert all(float(x["kl"]) == pytest.approx(0, abs=1e-6) for x in full)
    assert all(float(x["kl"]) > 1e-4 for x in both)
    assert [float(x["held"]) for x in both] == [0.5, 0.5, 0.25, 0.25]


def test_facts_are_right_where_every_token_is(model):
    ids = random_tokens(100)
    alone = hidden_states(
        model, ids, [Lane(layout_for(model, retention=1.0, **ROOM), "keydiff")], torch.arange(100)
    )[0]
    said = model.lm_head(alone).argmax(dim=-1).tolist()
    right, wrong = tuple(said[40:43]), (*said[80:82], (said[82] + 1) % 256)
    text = Text("t", "facts", "facts", tuple(ids), ((40, 43), (80, 83)), (right, wrong))
    (rows,) = measure(model, text, [], Uniform(model), batch=4)
    assert [x["right"] for x in rows] == [1, 0]


class Characters:
    """A tokenizer of characters with ChatML."""

    def __call__(self, text, add_special_tokens=True):
        return type("Encoding", (), {"input_ids": [ord(x) for x in text]})

    def decode(self, ids):
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        said = "".join(f"<{m['role']}>{m['content']}</>\n" for m in messages)
        return said + "<assistant>" * add_generation_prompt


def test_a_chat_asks_for_facts_that_its_document_states_twice():
    document = "\n".join(f"Line {i} of a document about nothing." for i in range(300))
    chat = _fact_chat(Characters(), "d", document, seed=7)
    said = Characters().decode(chat.ids)
    assert len(chat.answers) == len(chat.turns) == 4
    for number, ((begin, end), answer) in enumerate(zip(chat.turns, chat.answers, strict=True)):
        code = Characters().decode(answer)
        # the query before each token predicts it
        assert chat.ids[begin + 1 : end + 1] == answer
        who = next(x for x in PEOPLE if FACTS.format(who=x, code=code.strip()) in said)
        fact = FACTS.format(who=who, code=code.strip())
        assert said[: said.index("What is the locker")].count(fact) == 2
        assert said[: begin + 1].count("What is the locker") == number + 1
    assert not set(PEOPLE) & set(NAMES)


def test_documents_are_read_in_turns_and_are_no_calibration_texts():
    from tangram_sglang.calib.texts import corpus

    found = documents(Characters(), 12)
    assert len({text.digest for text in found}) == 12
    ours = {line for t in corpus() for _, c in t.messages for line in c.splitlines()}
    for text in found:
        assert text.turns[0] == (1536, 1792) and len(text.turns) >= 2
        assert text.turns[-1][1] == len(text.ids)
        lines = {line for line in Characters().decode(text.ids).splitlines() if len(line) > 50}
        assert not lines & ours, text.name


def row(text, turn, budgets, kl, **more):
    named = {"text": text, "tokens_sha256": text, "kind": "prose", "task": "kl", "right": ""}
    size = {"retention": 0.3, "scorer": "keydiff", "held": 0.3, "top1": 0.9, "queries": 256}
    return {**named, **size, "turn": turn, "budgets": budgets, "kl": kl, **more}


def test_the_summary_pairs_documents_and_keeps_turns_apart():
    rows = []
    for text, scale in (("a", 1.0), ("b", 4.0)):
        for turn, kl in ((1, 0.02), (2, 0.04), (3, 0.08)):
            rows.append(row(text, turn, "uniform", kl * scale))
            rows.append(row(text, turn, "error", kl * scale / (2 if text == "a" else 8)))
    for turn, right in ((1, 1), (1, 1), (2, 1), (2, 0)):
        chat = {"task": "facts", "right": right, "tokens_sha256": f"c{right}"}
        rows.append(row("c", turn, "error", 1.0, **chat))
    found = {(x["budgets"], x["turn"]): x for x in summarise(rows)}
    assert len(found) == 4
    first, later = found["error", "turn 1"], found["error", "later"]
    assert found["uniform", "turn 1"]["kl"] == pytest.approx(0.04)
    # later turns of a document are averaged first
    assert found["uniform", "later"]["kl"] == pytest.approx(0.12)
    assert first["texts"] == 2 and first["facts"] == 2 and first["right"] == 1.0
    assert later["right"] == 0.5 and later["right_error"] == pytest.approx(math.sqrt(0.125))
    for x in (first, later):
        assert x["ratio"] == pytest.approx(0.25) and x["better"] == "2/2"
        # two documents, ratios of 1/2 and 1/8: log ratios one log 2 to each side
        assert x["ratio_high"] == pytest.approx(0.25 * 2**12.71, rel=1e-3)
    assert found["uniform", "later"]["ratio"] == ""
    printed = table(list(found.values()))
    assert "2/2" in printed and "0.50 ± 0.35" in printed


def test_groupings_are_ways_of_their_own_beside_the_same_uniform_budgets():
    four, one = ({"grouping": "global", "group_heads": n} for n in ("4", "1"))
    rows = [
        *(row("a", 1, "uniform", 0.04, **four), row("a", 1, "error", 0.02, **four)),
        row("a", 1, "error", 0.01, **one),
    ]
    found = {(x["budgets"], x["group_heads"]): x["ratio"] for x in summarise(rows)}
    assert found == {
        ("uniform", "4"): "",
        ("error", "4"): pytest.approx(0.5),
        ("error", "1"): pytest.approx(0.25),
    }


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    draw(
        summarise([row("a", t, b, 0.1) for t in (1, 2) for b in ("uniform", "own")]),
        tmp_path / "x.png",
    )
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("count", ["3", "9", "1", "x"])
def test_a_number_of_windows_that_is_no_choice_is_refused(monkeypatch, count):
    """As many as there are would be a second name of the same budgets."""

    class Three:
        data = (0, 1, 2)

    monkeypatch.setattr(quality, "samples", lambda *given: Three())
    plans = Uniform(None)
    plans._folder, plans._scope = None, "global"
    with pytest.raises(TangramError, match=f"error@{count}: error has 3 windows"):
        plans.budgets(f"error@{count}", 0.3)


def test_units_are_named_once_and_own_needs_a_profile():
    size = arguments(
        ["--observations", "o", "--scorers", "keydiff,random", "--budgets", "uniform,own,keydiff"]
    )
    found = units(size, ["keydiff"])
    assert [(x.scorer, x.budgets) for x in found if x.retention == 0.3] == [
        *(("keydiff", "uniform"), ("keydiff", "keydiff")),
        *(("random", "uniform"), ("random", "keydiff")),
    ]
