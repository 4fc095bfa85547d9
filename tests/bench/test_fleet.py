"""bench/fleet.py and bench/subject.py: servers differ in the backend only, and hold the same bytes."""

import argparse
import json
from pathlib import Path

import pytest

from bench.fleet import Entry, Fleet, Pool, groups, ours, stock
from bench.shapes import SHAPES, config_token_bytes
from bench.subject import subject
from tangram_sglang.cli.server import ServerError

POOL = Pool(tokens=1000, token_bytes=131072)


def test_a_token_of_the_8b_shape_takes_128_kib(tmp_path):
    (tmp_path / "config.json").write_text((SHAPES / "llama-3.1-8b.json").read_text())
    assert config_token_bytes(tmp_path, 2) == 32 * 2 * 8 * 128 * 2 == POOL.token_bytes


@pytest.mark.parametrize("retention", [1.0, 0.25])
def test_all_get_the_same_bytes_at_every_retention(retention):
    theirs, mine = stock("flashinfer", POOL), ours(retention, Path("x.json"), POOL)
    assert theirs.flags == ("--attention-backend", "flashinfer", "--max-total-tokens", "1000")
    assert (theirs.stock, theirs.settings, theirs.retention) == (True, {}, 1.0)
    assert mine.flags == ("--attention-backend", "tangram")
    assert (mine.stock, mine.retention) == (False, retention)
    assert mine.settings == {
        "TANGRAM_RETENTION": f"{retention:g}",
        "TANGRAM_POOL_BYTES": "131072000",
        "TANGRAM_PLAN": "x.json",
    }


def test_command_lines_differ_in_the_backends_flags_and_our_variables(tmp_path):
    entries = [
        stock("triton", POOL),
        ours(0.5, None, POOL),
        ours(0.5, None, POOL, "H1", group_heads=1),
    ]
    fleet = Fleet(entries, ["--model-path", "m", "--dtype", "bfloat16"], {"A": "1"}, tmp_path)
    shared = []
    for entry, server in fleet:
        command = list(server.command[:-2])  # the port
        assert server._environment == {"A": "1", **entry.settings}
        assert all(name.startswith("TANGRAM_") for name in entry.settings)
        for flag in entry.flags:
            command.remove(flag)
        shared.append(command)
    assert shared[0] == shared[1] == shared[2]
    assert entries[2].settings["TANGRAM_GROUP_HEADS"] == "1"
    assert len({server.log for _, server in fleet}) == 3


def test_a_server_that_dies_ends_the_fleet_and_shows_its_log(tmp_path, capsys):
    with (
        pytest.raises(ServerError, match="ended by itself"),
        # an interpreter without a library ends at once
        Fleet([Entry("x", (), {})], [], {"PYTHONHOME": "/nowhere"}, tmp_path) as fleet,
    ):
        fleet.wait_until_ready(60)
    shown = capsys.readouterr().err
    assert "x: last lines of its log" in shown
    assert "Fatal Python error" in shown


def test_groups_keep_the_order():
    entries = [Entry(str(i), (), {}) for i in range(5)]
    assert [[x.name for x in group] for group in groups(entries, 3)] == [
        ["0", "1", "2"],
        ["3", "4"],
    ]


def test_on_a_cpu_the_pool_is_the_entries_alone(tmp_path):
    config = json.loads((SHAPES / "qwen3-4b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = argparse.Namespace(model=str(tmp_path), plan=None, cpu=True, settings=[])
    found = subject(options)
    assert found.dummy
    assert "dummy" in found.flags
    assert not {"--attention-backend", "--max-total-tokens"} & set(found.flags)
    assert found.token_bytes == config_token_bytes(tmp_path, 4)
    assert found.vocabulary == config["vocab_size"]
    (tmp_path / "model.safetensors").touch()
    assert not subject(options).dummy
    assert "dummy" not in subject(options).flags


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "gpt"}, r"expected one of llama-3\.1-8b, qwen3-4b, or --cpu"),
        ({"model": "gpt", "cpu": True}, "--model gpt: --cpu expects a folder with a config"),
        ({"plan": "/no/plan.json"}, "--plan /no/plan.json: no such file"),
        ({"settings": ["WINDOW=64", "RECENT"]}, "--settings RECENT: expected NAME=VALUE"),
    ],
)
def test_what_is_not_there_is_refused_before_servers_start(given, message):
    asked = {"model": "qwen3-4b", "plan": None, "cpu": False, "profile": "fastkvzip"}
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        subject(argparse.Namespace(**{**asked, "settings": [], **given}))
