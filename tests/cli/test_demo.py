"""The demo against a stand-in for the server: what it prints, and what it does when things fail."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import pytest

from tangram_sglang.cli import demo, main
from tangram_sglang.cli.server import Server

HERE = Path(__file__).parent
TURN_KEYS = [
    *("prompt_tokens", "cached_tokens", "entries_held", "bytes_held", "bytes_full"),
    *("latency_s", "answer"),
]
RUN_KEYS = ["retention_asked", "retention_held", "turns", "second_user"]


class FakeServer(Server):
    options: tuple[str, ...] = ()

    def __init__(self, arguments, environment, log):
        super().__init__(arguments, environment, log)
        fake = str(HERE / "fake_server.py")
        self.command = [sys.executable, fake, str(self.port), *self.options]
        self.asked = arguments, environment
        started.append(self)


started: list[FakeServer] = []


@pytest.fixture(autouse=True)
def fake_server(monkeypatch, tmp_path):
    started.clear()
    (tmp_path / "config.json").touch()
    (tmp_path / "plan.json").touch()
    monkeypatch.setattr(demo, "Server", FakeServer)
    monkeypatch.setattr(demo.tempfile, "tempdir", str(tmp_path))
    # the demo sets both for its whole process
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))


def run_demo(tmp_path, *more):
    return main(["demo", "--model", str(tmp_path), "--plan", str(tmp_path / "plan.json"), *more])


def test_the_last_line_is_json_with_the_five_turns_and_second_user_of_both_runs(tmp_path, capsys):
    assert run_demo(tmp_path, "--retention", "0.3") == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    result = json.loads(out)
    assert list(result) == [*RUN_KEYS, "uncompressed"]
    assert list(result["uncompressed"]) == RUN_KEYS
    for run, asked in ((result, 0.3), (result["uncompressed"], 1.0)):
        assert run["retention_asked"] == asked
        assert [list(turn) for turn in run["turns"]] == [TURN_KEYS] * 5
        last = run["turns"][-1]
        assert run["retention_held"] == last["bytes_held"] / last["bytes_full"] == 0.5
        # the eighth request, after two of the frontend program and five of the chat
        assert run["second_user"].pop("latency_s") > 0
        assert run["second_user"] == {"prompt_tokens": 8000, "cached_tokens": 128}
    # two requests of the frontend program came first, and a turn's figures are that turn's alone
    for number, turn in enumerate(result["turns"], 3):
        assert turn.pop("latency_s") > 0
        assert turn == {
            "prompt_tokens": 1000 * number,
            "cached_tokens": 16 * number,
            "entries_held": 9000 * number,
            "bytes_held": 3_000_000 * number,
            "bytes_full": 6_000_000 * number,
            "answer": f"answer {number}",
        }
    # the reader sees the program's answers too, and how to start the server by hand
    assert all(f"A: answer {n}\n" in err for n in range(1, 9))
    assert all(server.command_line in err for server in started)
    # and, for each run as it goes and below the table, what the second user found
    assert err.count("8,000 prompt tokens, 128 of them cached, ") == 4
    below = err[err.index("uncompressed  latency") :]
    assert "second user of the document: 8,000 prompt tokens, 128 of them cached, " in below
    assert "  uncompressed: 8,000 prompt tokens, 128 of them cached, " in below


def test_the_server_is_asked_for_the_tangram_backend_at_each_retention(tmp_path):
    assert run_demo(tmp_path) == 0
    assert [server.asked[1]["TANGRAM_RETENTION"] for server in started] == ["0.5", "1.0"]
    for arguments, environment in (server.asked for server in started):
        assert arguments[arguments.index("--attention-backend") + 1] == "tangram"
        assert environment["TANGRAM_PLAN"] == str(tmp_path / "plan.json")


# SGLang's frontend warns with the traceback of what failed
@pytest.mark.filterwarnings("ignore:Error in stream_executor")
@pytest.mark.parametrize("request_number", [2, 4], ids=["frontend-program", "openai-chat"])
def test_a_server_that_dies_fails_the_demo_and_shows_its_log(
    tmp_path, capsys, monkeypatch, request_number
):
    monkeypatch.setattr(FakeServer, "options", ("--die-at-request", str(request_number)))
    assert run_demo(tmp_path) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "the dog ate the page table" in err
    assert len(started) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_server(tmp_path, number):
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import test_demo as t;"
        "t.demo.Server = t.FakeServer; t.FakeServer.options = ('--never-ready',);"
        "sys.exit(t.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, str(HERE), "demo", "--model", str(tmp_path)]
    with subprocess.Popen(
        [*command, "--plan", str(tmp_path / "plan.json")],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as ran:
        while "starting" not in ran.stderr.readline():
            pass
        deadline = time.monotonic() + 20
        while not (logs := [p for p in tmp_path.rglob("server-0.log") if "child" in p.read_text()]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child = int(logs[0].read_text().split()[1])
        ran.send_signal(number)
        assert ran.wait(20) == 128 + number
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


def test_the_document_ships_as_plain_english_of_3000_tokens_that_fits_the_context(smollm2):
    from transformers import AutoTokenizer

    document = (resources.files(demo.TEXTS) / demo.DOCUMENT).read_text(encoding="ascii")
    length = len(AutoTokenizer.from_pretrained(smollm2)(document).input_ids)
    assert 3000 < length < 4000
    assert (resources.files(demo.TEXTS) / "jargon_file.md").read_text().count("public domain")
