"""`tangram calibrate`: mistakes are one line before anything starts; else plan files come out.

The server here is a stand-in that observes made-up keys, so that the whole command runs at once;
test_calib_server.py has the real one.
"""

from pathlib import Path

import numpy as np
import pytest

from tangram_sglang.calib.texts import calibration_prompts, corpus_hash
from tangram_sglang.cli import calibrate, main
from tangram_sglang.cli.hugging_face import load_config
from tangram_sglang.plan.file import check_model, load_plan
from tangram_sglang.plan.gates import save_gates
from tangram_sglang.plan.model_config import model_config
from tangram_sglang.plan.serving import serving_plan
from tangram_sglang.plan.stats import load_query_stats
from tangram_sglang.settings import Settings
from tests.calib_stand_in import RULE, SHAPE, StandIn
from tests.reference.tiny import random_gates, save, tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tiny_llama(seed=1), tmp_path_factory.mktemp("models") / "Tiny-Llama")


@pytest.fixture
def never_started(monkeypatch):
    def refuse(*args):
        raise AssertionError("a server was started")

    monkeypatch.setattr(calibrate, "Server", refuse)


def status_of(*argv):
    try:
        return main(["calibrate", *map(str, argv)])
    except SystemExit as end:
        return end.code


def run(model, out, *more):
    return status_of(
        *("--model", model, "--retention", "0.5,0.33", "--out", out),
        *("--window", 64, "--samples", 40),
        *(() if "--budgets-from" in more else ("--budgets-from", "keydiff")),
        *more,
    )


def test_the_command_writes_a_plan_a_retention_and_one_statistics_file(
    model, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(calibrate, "Server", StandIn)
    monkeypatch.setenv("TANGRAM_PLAN", "/of/the/user")
    assert run(model, tmp_path / "new" / "plans", "--server-args=--load-format dummy") == 0
    printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in printed] == ["tiny-llama-rho0.5.json", "tiny-llama-rho0.33.json"]

    plans = [load_plan(path) for path in printed]
    tokenizer, config = load_config(str(model))
    texts, prompts = calibration_prompts(tokenizer, RULE, 40)
    assert StandIn.last.prompts == prompts
    for plan, path, rho in zip(plans, printed, (0.5, 0.33), strict=True):
        check_model(plan, model_config(config), path)
        assert plan.model.id == "Tiny-Llama"
        assert plan.layers == [0, 1]
        assert plan.calibration.retention == rho
        assert plan.calibration.samples == sum(RULE.sealed(len(p)) for p in prompts) >= 40
        assert plan.calibration.corpus_hash == corpus_hash(texts)
        assert plan.budgets[1] > plan.budgets[0], "the head with unlike keys keeps more"
        mean = np.array(plan.budgets) - 2 * np.array(plan.spread)
        assert mean.mean() == pytest.approx(rho, abs=1e-2)
        stats = path.with_name(plan.selection.stats_file)
        load_query_stats(stats, plan.selection.stats_hash, SHAPE)
        # the profile is the one that drift is watched by
        assert plan.drift.scorer == "keydiff" and plan.drift.limits == plan.budgets
    files = {path.name for path in printed[0].parent.iterdir() if path.is_file()}
    assert files == {*(path.name for path in printed), "tiny-llama-query-stats.safetensors"}

    assert StandIn.last.arguments[-2:] == ["--load-format", "dummy"]
    environment = StandIn.last.environment
    assert environment["TANGRAM_RETENTION"] == "1.0"
    assert environment["TANGRAM_WINDOW"] == "64"
    assert "TANGRAM_PLAN" not in environment


def test_several_profiles_are_measured_in_one_command(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "Server", StandIn)
    profiles = "keydiff,expected_attention,error"
    assert run(model, tmp_path, "--budgets-from", profiles, "--alpha", 0) == 0
    path = Path(capsys.readouterr().out.splitlines()[0])
    plan = load_plan(path)
    assert plan.calibration.scorers == profiles.split(",")
    assert np.mean(plan.budgets) == pytest.approx(0.5, abs=1e-3), "each profile meets the mean"
    # two passes over the same prompts: the second has the statistics of the first
    prompts = StandIn.last.prompts
    half = len(prompts) // 2
    assert prompts[:half] == prompts[half:]
    # the first windows are left out of expected_attention, those without followers out of error
    windows = [RULE.sealed(len(prompt)) for prompt in prompts[:half]]
    assert plan.calibration.samples < sum(windows)
    followed = [max(0, (len(prompt) - 256) // 64 - 1) for prompt in prompts[:half]]
    second = tmp_path / "tiny-llama-observations" / "second"
    assert len(list(second.glob("*-error-*"))) == sum(followed) > 20


def test_budgets_come_from_scorers_that_read_queries_too(model, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "Server", StandIn)
    assert run(model, tmp_path, "--budgets-from", "snapkv,error", "--select", "snapkv") == 0
    plan = load_plan(tmp_path / "tiny-llama-rho0.5.json")
    assert plan.selection.scorer == "snapkv" and len(set(plan.budgets)) == 4


def test_a_plan_that_names_its_gates_serves_without_a_setting(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "Server", StandIn)
    theirs = tmp_path / "trained.safetensors"
    llama, out = tiny_llama(seed=1), tmp_path / "plans"
    config = load_config(str(model))[1]

    def train(seed):
        about = {"layers": [0, 1], "model": "tiny", "hf_config": config}
        gates = random_gates(llama, seed=seed)
        save_gates(theirs, gates, **about, recipe={}, corpus_hash="0" * 64)

    train(1)
    asked = ("--select", "fastkvzip", "--gates", theirs, "--budgets-from", "error")
    assert run(model, out, *asked) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert len(paths) == 2
    for path in paths:
        found = serving_plan(Settings(plan=str(path)), config, SHAPE, 1024, "cpu")
        assert found.scorer_name == "fastkvzip"
        assert found.gates.path == out / "tiny-llama-gates.safetensors"
        assert found.gates.path.read_bytes() == theirs.read_bytes()
    # repeated it measures nothing, and reads what it copied
    monkeypatch.setattr(calibrate, "Server", None)
    assert run(model, out, *asked[:3], found.gates.path, *asked[4:]) == 0
    assert run(model, out, "--budgets-from", "error") == 2
    assert "its scorer is fastkvzip, here it is expected_attention" in capsys.readouterr().err
    train(2)
    assert run(model, out, *asked, "--retention", "0.4") == 2
    assert "belongs to other gates, which tiny-llama-gates.safetensors" in capsys.readouterr().err
    # gates that no plan names yet
    for path in paths:
        path.rename(path.with_suffix(".kept"))
    assert run(model, out, *asked) == 2
    assert "tiny-llama-gates.safetensors holds other gates" in capsys.readouterr().err
    assert found.gates.path.read_bytes() != theirs.read_bytes()
    assert run(model, out, *asked, "--overwrite") == 0
    assert load_plan(paths[0]).selection.gates_hash != found.gates.sha256


def test_windows_that_the_server_does_not_show_are_missed(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "Server", StandIn)
    monkeypatch.setattr(StandIn, "forgets", True)
    assert run(model, tmp_path) == 2
    assert "reuse no prefix" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.json"))


def test_a_server_that_dies_shows_its_log(model, tmp_path, monkeypatch, capsys):
    def die(self):
        raise calibrate.ServerError("it died")

    monkeypatch.setattr(calibrate, "Server", StandIn)
    monkeypatch.setattr(StandIn, "wait_until_ready", die)
    assert run(model, tmp_path) == 1
    assert capsys.readouterr().err.endswith("the log\ntangram calibrate: error: it died\n")


def test_a_prompt_without_an_answer_shows_the_log(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "Server", StandIn)
    monkeypatch.setattr(StandIn, "url", "http://127.0.0.1:1", raising=False)
    monkeypatch.setattr(StandIn, "__enter__", lambda self: self)
    monkeypatch.setattr(StandIn, "__exit__", lambda self, *exc_info: None)
    assert run(model, tmp_path) == 1
    assert "the log\ntangram calibrate: error: no answer for essay" in capsys.readouterr().err


def test_a_prompt_that_is_refused_says_why(model, tmp_path, monkeypatch, capsys):
    def refuse(self, body):
        raise ValueError("too long")

    monkeypatch.setattr(calibrate, "Server", StandIn)
    monkeypatch.setattr(StandIn, "answer", refuse)
    assert run(model, tmp_path) == 2
    assert "the server refused a prompt of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        pytest.param(["--retention", "0"], "is not a share of tokens to keep", id="retention 0"),
        pytest.param(["--retention", "0.5,x"], "'x' is not a share of tokens", id="retention x"),
        pytest.param(["--samples", 1], "a spread needs at least 2 windows", id="one sample"),
        pytest.param(["--samples", 90_000], "lower --samples or --window", id="many samples"),
        pytest.param(["--window", 40], "no multiple of the page of 16", id="window"),
        pytest.param(["--alpha", "-1"], "expected a number of at least 0", id="alpha"),
        pytest.param(["--scope", "head"], "invalid choice: 'head'", id="scope"),
        pytest.param(
            ["--budgets-from", "snap"],
            "--budgets-from snap: unknown profile; expected error",
            id="scorer",
        ),
        pytest.param(["--select", "fastkvzip"], "fastkvzip reads gates, name", id="no gates"),
        pytest.param(["--gates", "g"], "expected_attention reads none; drop it", id="gates unread"),
        pytest.param(
            ["--budgets-from", "fastkvzip"],
            "with: calibrate with another one",
            id="gates as profile",
        ),
        pytest.param(
            ["--select", "fastkvzip", "--gates", "/no/gates"], "/no/gates cannot be read", id="lost"
        ),
        pytest.param(["--select", "error"], "unknown scorer 'error'", id="error picks nothing"),
        pytest.param(
            ["--retention", "0.3,0.30000001"],
            "two of them would both be written to tiny-llama-rho0.3.json",
            id="retentions of one name",
        ),
        pytest.param(["--texts", "/no/such/folder"], "no such folder", id="no texts"),
        pytest.param(["--model", "/no/such/model"], "/no/such/model cannot be loaded", id="model"),
    ],
)
def test_mistakes_are_refused_before_a_server_starts(
    model, tmp_path, never_started, capsys, argv, message
):
    assert run(model, tmp_path, *argv) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["--out", "--observations", "--report"])
def test_a_file_where_a_folder_is_to_be_is_refused_before_a_server_starts(
    model, tmp_path, never_started, capsys, name
):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "plans"):
        assert run(model, tmp_path / "out", name, path) == 2
        assert (
            f"{name} {path}: {tmp_path / 'file'} is a file, expected a folder"
            in capsys.readouterr().err
        )
    assert [x.name for x in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, "no file *.txt with anything in it", id="empty"),
        pytest.param(b" \n", "no file *.txt with anything in it", id="blank"),
        pytest.param(b"caf\xe9 au lait", "a.txt is not UTF-8 (byte 3)", id="latin-1"),
        pytest.param(b"w8 w9 w10 " * 20, "the calibration texts give 0 windows", id="short"),
    ],
)
def test_texts_of_the_user_that_do_not_do_are_refused(
    model, tmp_path, never_started, capsys, content, message
):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "notes.md").write_text("w8 " * 9000)
    if content is not None:
        (texts / "a.txt").write_bytes(content)
    assert run(model, tmp_path / "out", "--texts", texts) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_texts_of_the_user_are_calibrated_on(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "Server", StandIn)
    texts = tmp_path / "texts" / "poems"
    texts.mkdir(parents=True)
    for name in ("b", "a"):
        (texts / f"{name}.txt").write_text(f"w{ord(name)} " * 700, encoding="utf-8")
    assert run(model, tmp_path, "--texts", texts.parent, "--samples", 10) == 0
    assert [set(prompt) for prompt in StandIn.last.prompts] == [{ord("a")}, {ord("b")}]
    report = tmp_path / "tiny-llama-report" / "regularity.csv"
    assert ",poems," in report.read_text()
