"""`tangram calibrate`: mistakes are one line before anything starts; else plan files come out.

The server here is a stand-in that observes made-up keys, so that the whole command runs at once;
test_calib_server.py has the real one.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from tangram_sglang.calib.observer import Observer
from tangram_sglang.calib.texts import calibration_prompts, corpus_hash
from tangram_sglang.cli import calibrate, main
from tangram_sglang.plan.file import check_model, load_plan
from tangram_sglang.plan.model_config import model_config
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.stats import load_query_stats
from tangram_sglang.plan.window import WindowRule
from tests.reference.tiny import save, tiny_llama

SHAPE = ModelShape(tuple(LayerShape(i, 4, 2, 16, None, 0.25) for i in range(2)))
RULE = WindowRule(64, 256, 16, 4)
FREQ = torch.logspace(0, -3, 8, dtype=torch.float64)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tiny_llama(seed=1), tmp_path_factory.mktemp("models") / "Tiny-Llama")


@pytest.fixture
def never_started(monkeypatch):
    def refuse(*args):
        raise AssertionError("a server was started")

    monkeypatch.setattr(calibrate, "Server", refuse)


class StandIn:
    """Takes the place of ``cli.server.Server``; head h of layer l gets the more the higher h."""

    command_line = "a stand-in"
    forgets = False

    def __init__(self, arguments, environment, log: Path):
        log.write_text("the log\n")
        self.arguments, self.environment = arguments, environment
        StandIn.last = self
        self.prompts = []
        self._observer = Observer(
            SHAPE, dict.fromkeys(range(2), FREQ), RULE, Path(environment["TANGRAM_OBSERVE"])
        )

    def __enter__(self):
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    owner.answer(body)
                    self.send_response(200)
                except ValueError:
                    self.send_response(400)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *args):
                pass

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc_info):
        self._http.shutdown()
        self._http.server_close()

    def wait_until_ready(self):
        pass

    def check_alive(self):
        pass

    def answer(self, body):
        prompt = body["input_ids"]
        assert body["sampling_params"]["max_new_tokens"] == 1
        self.prompts.append(prompt)
        generator = torch.Generator().manual_seed(len(prompt))
        # wider keys in higher heads: keydiff spreads more there
        width = torch.tensor([0.3, 1.0])[:, None, None]
        for layer in range(2):
            q = torch.randn(len(prompt), 4, 16, generator=generator)
            self._observer.queries(layer, q, torch.arange(len(prompt)))
            for j in range(RULE.sealed(len(prompt)) - self.forgets):
                k = 1 + width * torch.randn(2, 64, 16, generator=generator)
                self._observer.window(layer, j * 64, k, k)


def status_of(*argv):
    try:
        return main(["calibrate", *map(str, argv)])
    except SystemExit as end:
        return end.code


def run(model, out, *more):
    return status_of(
        *("--model", model, "--retention", "0.5,0.33", "--out", out),
        *("--window", 64, "--samples", 40),
        *more,
    )


def test_the_command_writes_a_plan_a_retention_and_one_statistics_file(
    model, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(calibrate, "Server", StandIn)
    monkeypatch.setenv("TANGRAM_PLAN", "/of/the/user")
    assert run(model, tmp_path / "new" / "plans") == 0
    printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in printed] == ["tiny-llama-rho0.5.json", "tiny-llama-rho0.33.json"]

    plans = [load_plan(path) for path in printed]
    tokenizer, config = calibrate._load(str(model))
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
    assert len(list(printed[0].parent.iterdir())) == 3

    environment = StandIn.last.environment
    assert environment["TANGRAM_RETENTION"] == "1.0"
    assert environment["TANGRAM_WINDOW"] == "64"
    assert "TANGRAM_PLAN" not in environment


def test_observations_are_kept_where_asked(model, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "Server", StandIn)
    kept = tmp_path / "kept"
    assert run(model, tmp_path, "--observations", kept) == 0
    assert (kept / "queries.npz").exists()
    assert run(model, tmp_path, "--observations", kept) == 2


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
        pytest.param(["--budgets-from", "snap"], "unknown scorer 'snap'", id="scorer"),
        pytest.param(
            ["--budgets-from", "keydiff,expected_attention"],
            "--budgets-from expected_attention: it needs query statistics",
            id="scorer with statistics",
        ),
        pytest.param(["--model", "/no/such/model"], "/no/such/model cannot be loaded", id="model"),
    ],
)
def test_mistakes_are_refused_before_a_server_starts(
    model, tmp_path, never_started, capsys, argv, message
):
    assert run(model, tmp_path, *argv) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
