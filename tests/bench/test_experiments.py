"""bench/: loads, figures, medians, rows and curves of the experiments."""

import csv
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench import (
    ablation,
    arrival,
    client,
    host_time,
    multi_turn,
    offline,
    reclaim,
    server_decode,
    shared_document,
)
from bench.experiment import Bench, Experiment, stock_and_ours
from bench.fleet import Entry, Pool, ours, stock
from bench.gate import Verdict
from bench.gauge import read
from bench.plots import Curve, bars, compared, draw, draw_bars, lines, title
from bench.record import append_csv
from bench.report import Report, medians
from bench.shapes import profile_plan
from bench.subject import Subject
from bench.words import word_tokenizer
from tangram_sglang.backend.build import spare_pages
from tangram_sglang.plan.described import plan_layout
from tangram_sglang.plan.file import load_plan
from tangram_sglang.plan.reclaim import ReclaimRule
from tangram_sglang.settings import Settings

POOL = Pool(100, 8)
THEIRS, OURS = stock("triton", POOL), ours(0.25, None, POOL)


def flag(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


def test_loads_say_what_is_asked():
    unrelated = client.random_load(7, 1000, 50)
    assert flag(unrelated, "--num-prompts") == "7"
    assert flag(unrelated, "--random-range-ratio") == "1"
    assert "--tokenize-prompt" in unrelated
    talk = client.conversation_load(12, first=32768, more=1024, turns=5, answer=128)
    # the first prompt is the client's system prompt and its first question
    assert int(flag(talk, "--gsp-system-prompt-len")) + 1024 == 32768
    assert flag(talk, "--gsp-num-groups") == "12"
    assert flag(talk, "--backend") == "sglang-oai-chat"
    users = client.shared_load(128, 65536, 256, 128)
    assert (flag(users, "--gsp-num-groups"), flag(users, "--gsp-prompts-per-group")) == ("1", "128")
    assert "--gsp-send-routing-key" in users


def test_a_load_that_was_not_carried_gives_no_figures(monkeypatch, tmp_path):
    class Client:
        written = '{"errors": ["", "boom"], "ttfts": [0.1, 0.0]}\n'

        def cli_main(self):
            (tmp_path / "client.jsonl").write_text(self.written)

    monkeypatch.setattr(client, "load", Client)
    with pytest.raises(
        RuntimeError, match="1 of 2 requests failed or had no text; the first: boom"
    ):
        client.run("http://x", tmp_path, [], tmp_path)
    Client.written = '{"errors": ["", ""], "ttfts": [0.1, 0.0]}\n'
    with pytest.raises(RuntimeError, match="1 of 2 requests failed or had no text"):
        client.run("http://x", tmp_path, [], tmp_path)
    Client.written = '{"errors": ["", ""], "ttfts": [0.1, 0.2]}\n'
    assert client.run("http://x", tmp_path, [], tmp_path)["ttfts"] == [0.1, 0.2]


def test_every_token_has_a_text_and_a_message_is_as_long_as_its_words():
    tokenizer = word_tokenizer(50)
    ids = [7, 49, 4, 20]
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    talk = [
        {"role": "user", "content": "w7 w9"},
        {"role": "assistant", "content": "w4"},
        {"role": "user", "content": "w5"},
    ]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode(text) == [7, 9, 4, 5]


RESULT = {
    **{"duration": 2.0, "completed": 4, "ttfts": [3.0, 0.5, 5.0, 0.7]},
    **{"input_lens": [100, 120, 100, 120], "output_lens": [10] * 4},
    **{"cached_tokens": [0, 110, 0, 55]},
    **{
        "median_itl_ms": 8.0,
        "mean_ttft_ms": 2300.0,
        "median_ttft_ms": 1850.0,
        "p99_ttft_ms": 5000.0,
    },
}


def test_offline_counts_prompts_and_answers():
    found = offline.figures(RESULT, peak=3.0)
    assert found["tokens_per_s"] == (440 + 40) / 2
    assert found["hit_rate"] == 165 / 440
    assert found["peak_running"] == 3


def test_multi_turn_looks_at_later_turns():
    found = multi_turn.figures(RESULT, turns=2, peak=3.0)
    assert found["tokens_per_s"] == 240
    assert found["ttft_later_s"] == pytest.approx(0.6)
    assert found["ttft_first_s"] == 4.0
    assert found["hit_rate"] == 165 / 240
    assert multi_turn.conversation_tokens(100, 10, 4, turns=3) == 100 + 20 + 12


def test_documents_and_arrivals():
    assert shared_document.figures(RESULT, 3.0)["answers_per_s"] == 2
    assert arrival.figures(RESULT)["mean_ttft_s"] == 2.3


def test_medians_are_of_each_figure():
    runs = [{"a": 1.0, "b": 9.0}, {"a": 5.0, "b": 1.0}, {"a": 2.0, "b": 2.0}]
    assert medians(runs) == {"a": 2.0, "b": 2.0}


def report(tmp_path, passed: bool) -> Report:
    found = Report(tmp_path / "x.csv", {"model": "m"}, {"gpu": "none"})
    found.verdict = Verdict(passed, "passed" if passed else "failed")
    return found


def test_ratios_are_to_the_best_stock_backend_of_the_same_case(tmp_path):
    rows = report(tmp_path, passed=True)
    for entry, case, value in (
        (THEIRS, "a", 10.0),
        (stock("flashinfer", POOL), "a", 20.0),
        (OURS, "a", 50.0),
        (OURS, "b", 50.0),
    ):
        rows.add(entry, case, {"n": 1}, [{"other": 1.0, "speed": value}] * 3, main="speed")
    assert [row["times_stock"] for row in rows.rows] == [1.0, 1.0, 2.5, ""]
    with (tmp_path / "x.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["server"] for row in written] == ["triton", "flashinfer", *["tangram 0.25"] * 2]
    assert written[2] == {
        **{"model": "m", "case": "a", "server": "tangram 0.25", "retention": "0.25", "n": "1"},
        **{"other": "1.0", "speed": "50.0", "times_stock": "2.5", "of": "speed", "runs": "3"},
        **{"gate": "passed", "gpu": "none"},
    }
    assert "gate: passed" in rows.table()


def test_less_is_better_of_times(tmp_path):
    rows = report(tmp_path, passed=True)
    for entry, value in ((THEIRS, 20.0), (stock("x", POOL), 30.0), (OURS, 4.0)):
        rows.add(entry, "a", {}, [{"ttft": value}], "ttft", lower_is_better=True)
    assert rows.rows[-1]["times_stock"] == 5.0


def test_a_multiple_of_stock_is_given_where_asked_for(tmp_path):
    rows = report(tmp_path, passed=True)
    for entry, value in ((THEIRS, 20.0), (stock("x", POOL), 25.0), (OURS, 21.0)):
        rows.add(entry, "a", {}, [{"ms": value}], "ms", lower_is_better=True, over_stock=True)
    assert [row["over_best_stock"] for row in rows.rows] == [1.0, 1.25, 1.05]
    assert rows.rows[-1]["times_stock"] == 0.95238
    unknown = report(tmp_path / "none", passed=False)
    unknown.add(THEIRS, "a", {}, [{"ms": 20.0}], "ms", lower_is_better=True, over_stock=True)
    assert unknown.rows[0]["over_best_stock"] == ""


def test_no_ratio_behind_a_gate_that_did_not_pass(tmp_path):
    rows = report(tmp_path, passed=False)
    for entry, value in ((THEIRS, 10.0), (OURS, 50.0)):
        rows.add(entry, "a", {}, [{"speed": value}], "speed")
    assert [row["times_stock"] for row in rows.rows] == ["", ""]
    rows.add(OURS, "a", {}, [], "speed")
    assert len(rows.rows) == 2
    assert "times_stock" not in rows.table()


def test_gauges_are_summed_over_labels():
    page = '# HELP a:x\na:x{m="1"} 3.0\na:x{m="2 b"} 4.0\na:xx 9.0\na:y 5.0\n'
    assert read(page, "a:x") == 7
    assert read(page, "a:y") == 5
    assert read(page, "a:z") == 0


def test_curves_go_from_left_to_right_and_the_last_measurement_counts():
    rows = [
        {"model": "m", "server": "s", "rate": rate, "ttft": ttft}
        for rate, ttft in (("2", "8"), ("1", "3"), ("2", "9"))
    ]
    found = lines([*rows, {**rows[1], "model": "l"}], Curve("rate", "ttft", "", ""))
    assert found == {"l": {"s": [(1.0, 3.0)]}, "m": {"s": [(1.0, 3.0), (2.0, 9.0)]}}
    some = [{**row, "case": row["rate"]} for row in rows]
    assert lines(some, Curve("rate", "ttft", "", "", ("1",))) == {"m": {"s": [(1.0, 3.0)]}}


def ratio(case: str, server: str, times_stock: str, **more: str) -> dict[str, str]:
    common = {"model": "m", "gpu": "H200", "git": "b", "input_len": "16384", "tokens_per_s": "7"}
    return {**common, "case": case, "server": server, "times_stock": times_stock, **more}


TABLES = {
    "server_decode": [ratio("batch 8", "tangram 1", "0.8"), ratio("batch 8", "triton", "0.9")],
    "offline": [
        *(ratio("short", "flashinfer", "1.0"), ratio("short", "tangram 0.25", "1.2")),
        # no gate was passed, and a case that has no bar
        *(ratio("long", "tangram 1", ""), ratio("other", "tangram 1", "2")),
        *(
            ratio("short", "tangram 0.25", "1.5", git="a"),
            ratio("mid", "tangram 1", "3", model="l"),
        ),
    ],
}


def test_bars_are_ours_over_stock_and_the_last_measurement_counts():
    rows = compared(TABLES)
    assert [label for label, _ in rows] == [
        *["tokens/s, prompts of 16K"] * 2,
        *("tokens/s, prompts of 48K", "decode steps, batch 8"),
    ]
    found = bars(rows)
    assert list(found) == ["l", "m"]
    assert found["l"] == {"tokens/s, prompts of 48K": {"tangram 1": 3.0}}
    assert found["m"] == {
        "tokens/s, prompts of 16K": {"tangram 0.25": 1.5},
        "decode steps, batch 8": {"tangram 1": 0.8},
    }
    assert title(row for _, row in rows) == "H200, commit a, b"


def test_what_is_drawn_is_the_same_from_the_same_rows(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "offline.csv"
    append_csv(path, TABLES["offline"])
    for name in ("first.png", "second.png"):
        assert draw_bars(TABLES, tmp_path / name).stat().st_size > 5000
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()
    assert draw(path) == tmp_path / "offline.png"
    assert (tmp_path / "offline.png").stat().st_size > 5000


def test_host_time_leaves_out_the_pass_the_waits_and_the_harness():
    steps = [
        {"loop": 0.010, "forward": 0.006, "harness": 0.001, "wait": 0.001, "n": n} for n in range(9)
    ]
    found = host_time.figures([{"loop": 99.0}] * 4 + steps + [{"loop": 99.0}] * 4)
    assert found["host_ms"] == pytest.approx(2)
    assert found["forward_ms"] == pytest.approx(6)
    assert found["step_ms"] == pytest.approx(8)
    assert found["steps"] == 9
    with pytest.raises(RuntimeError, match="ask for more tokens"):
        host_time.figures(steps[:8])


def opened(tmp_path, experiment: Experiment, *arguments: str, started: float = 0.0) -> Bench:
    options = experiment.parser().parse_args(["--model", "m", *arguments])
    model = Subject("m", tmp_path, 8, ("--model-path", "m"), {}, tmp_path / "plan.json", False)
    return Bench(options, model, POOL, report(tmp_path, False), tmp_path, started)


def test_an_ablation_starts_with_what_the_gate_needs_and_changes_one_thing_a_step(tmp_path):
    names = ("--steps", "uniform", "layer", "global", "map", "--heads", "1", "16")
    now = opened(tmp_path, ablation.EXPERIMENT, "--settings", "WINDOW=64", *names)
    found = ablation.steps(now)
    assert [x.name for x in found] == [
        *("flashinfer", "tangram 1", "uniform", "layer", "global", "map", "H1", "H16"),
    ]
    assert {x.settings["TANGRAM_WINDOW"] for x in found[1:]} == {"64"}
    assert {x.settings["TANGRAM_POOL_BYTES"] for x in found[1:]} == {str(POOL.bytes)}
    own = [
        {k: v for k, v in x.settings.items() if k not in ("TANGRAM_WINDOW", "TANGRAM_POOL_BYTES")}
        for x in found
    ]
    quarter, plan = {"TANGRAM_RETENTION": "0.25"}, {"TANGRAM_PLAN": str(tmp_path / "plan.json")}
    equal = {"TANGRAM_SPLITS": "equal"}
    assert own[1:] == [
        {"TANGRAM_RETENTION": "1", **plan},
        {**quarter, **equal},
        {**quarter, **plan, **equal, "TANGRAM_GROUPING": "layer"},
        {**quarter, **plan, **equal, "TANGRAM_GROUPING": "global"},
        {**quarter, **plan, "TANGRAM_GROUPING": "global", "TANGRAM_SPLITS": "map"},
        {**quarter, **plan, "TANGRAM_GROUP_HEADS": "1"},
        {**quarter, **plan, "TANGRAM_GROUP_HEADS": "16"},
    ]


def test_reservation_and_reclaim_differ_in_one_setting_and_get_the_same_pages(tmp_path):
    now = opened(tmp_path, reclaim.EXPERIMENT, "--cpu")
    found = reclaim.servers(now)
    assert [x.name for x in found] == ["flashinfer", "tangram 1", "reserve", "reclaim"]
    assert found[3].settings == {**found[2].settings, "TANGRAM_RESERVE": "uncompressed"}
    # spare pages on a GPU: the books count what is left of the bytes
    plan = profile_plan("qwen3-4b")
    for window in ("", "1024"):
        env = {"TANGRAM_PLAN": str(plan), "TANGRAM_RETENTION": "0.25", "TANGRAM_WINDOW": window}
        layout = plan_layout(load_plan(plan), Settings.from_env(env), 9000)
        rule = layout.rule
        whole = ReclaimRule(rule.window, rule.recent, rule.page, rule.sinks, longest=9000)
        more = spare_pages(replace(layout, rule=whole), "cuda") - spare_pages(layout, "cuda")
        assert reclaim.spare_bytes(Entry("x", (), env), 9000) == more * layout.page_bytes(2) > 0


def test_prefill_ends_with_the_last_first_token():
    assert reclaim.figures(RESULT, 3.0, together=True)["prefill_s"] == 5
    alone = reclaim.figures(RESULT, 1.0, together=False)
    assert alone["prefill_tokens_per_s"] == 440 / 9.2
    assert alone["mean_ttft_s"] == 2.3


def test_what_reservation_saved_is_a_share_of_reclaims_time():
    rows = [
        {"server": "reserve", "case": "alone", "prefill_s": 6.0},
        {"server": "tangram 1", "case": "alone", "prefill_s": 99.0},
        {"server": "reserve", "case": "together", "duration_s": 1.0},
    ]
    runs = [{"prefill_s": 8.0, "duration_s": 9.0}]
    assert reclaim.saved(rows, "alone", runs) == 0.25
    assert reclaim.saved(rows[1:], "alone", runs) == ""
    assert reclaim.saved(rows, "alone", []) == ""


def test_lengths_are_scaled_and_graphs_reach_as_far_as_requests(tmp_path):
    now = opened(tmp_path, offline.EXPERIMENT, "--scale", "0.01", "--max-running", "24")
    assert [now.length(x) for x in (32768, 128, 10)] == [328, 1, 1]
    flags = now.shared_flags()
    assert (
        flag(flags, "--max-running-requests") == flag(flags, "--cuda-graph-max-bs-decode") == "24"
    )
    assert (
        "--cuda-graph-max-bs-decode"
        not in opened(tmp_path, offline.EXPERIMENT, "--cpu").shared_flags()
    )


def test_no_run_starts_when_time_is_up(tmp_path):
    assert opened(tmp_path, offline.EXPERIMENT, "--repeats", "3").runs(
        lambda seed: {"a": seed}
    ) == [
        *({"a": 1}, {"a": 2}, {"a": 3}),
    ]
    assert (
        opened(tmp_path, offline.EXPERIMENT, "--limit-s", "1", started=-1e9).runs(
            lambda seed: {"a": seed}
        )
        == []
    )


def test_every_experiment_measures_stock_and_ours_but_those_with_servers_of_their_own(tmp_path):
    now = opened(tmp_path, offline.EXPERIMENT)
    assert [x.name for x in stock_and_ours(now)] == ["flashinfer", "tangram 1", "tangram 0.25"]
    modules = (arrival, multi_turn, offline, server_decode, shared_document, ablation, reclaim)
    assert [x.EXPERIMENT.has_own_servers for x in modules] == [False] * 5 + [True] * 2


def test_decode_steps_are_of_batches_that_run_at_once_after_one_that_does_not_count(
    tmp_path, monkeypatch
):
    asked = []

    class Client:
        @staticmethod
        def run_one_case(url, **given):
            asked.append((given["batch_size"], given["input_len"], given["output_len"]))
            speed = given["batch_size"] * 1000 / len(asked)
            return SimpleNamespace(output_throughput=speed, last_ttft=0.5, latency=2.0)

    monkeypatch.setattr(server_decode, "load_client", Client)
    monkeypatch.setattr(server_decode, "tokenizer", lambda folder: None)
    small = ("--scale", "0.01", "--input-len", "1500", "--output-len", "500")
    now = opened(tmp_path, server_decode.EXPERIMENT, *small, "--batch-sizes", "1", "4")
    server_decode.check(now)
    server_decode.on_server(now, THEIRS, SimpleNamespace(url="x"))
    assert asked == [(1, 15, 5)] * 4 + [(4, 15, 5)] * 4
    found = [(x["case"], x["batch"], x["step_ms"], x["of"]) for x in now.report.rows]
    assert found == [("batch 1", 1, 3.0, "step_ms"), ("batch 4", 4, 7.0, "step_ms")]
    # 100 tokens are too few for five such requests and whole pages
    now = opened(tmp_path, server_decode.EXPERIMENT, *small, "--batch-sizes", "5", "2")
    with pytest.raises(SystemExit, match="a batch of 5 needs a pool of 106 tokens, it has 100"):
        server_decode.check(now)
    now = opened(tmp_path, server_decode.EXPERIMENT, *small, "--max-running", "7")
    with pytest.raises(SystemExit, match="a batch of 32 needs --max-running 32 or more, it is 7"):
        server_decode.check(now)
