"""The command line: a mistake is one clear line and status 2, before anything starts."""

import subprocess
import sys

import pytest

from tangram_sglang.cli import demo, main

BAD_RETENTIONS = ["0", "1.5", "abc", "-0.5", "nan", "inf", ""]


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def refuse(*args):
        raise AssertionError("a server was started")

    monkeypatch.setattr(demo, "Server", refuse)


def status_of(argv):
    try:
        return main(argv)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("text", BAD_RETENTIONS)
def test_a_retention_that_keeps_no_share_of_the_tokens_is_refused_in_one_line(text, capsys):
    assert status_of(["demo", f"--retention={text}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"{text!r} is not a share of tokens to keep" in err
    assert "expected a number above 0 and up to 1" in err


@pytest.mark.parametrize("text", BAD_RETENTIONS)
def test_the_makefile_checks_a_retention_without_any_package(text):
    # -S leaves site-packages out: this runs before there is a virtual environment
    command = [sys.executable, "-S", "-m", "tangram_sglang.cli.retention", text]
    root = demo.__file__.rsplit("/tangram_sglang/", 1)[0]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith("error: retention") and ran.stderr.count("\n") == 1


def test_a_missing_model_is_named_with_the_command_that_makes_it(tmp_path, capsys):
    assert status_of(["demo", "--model", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert str(tmp_path) in err and "make model" in err and err.count("\n") == 1


def test_an_unknown_command_is_answered_with_the_known_ones(capsys):
    assert status_of(["dmeo"]) == 2
    err = capsys.readouterr().err
    assert "demo" in err and err.count("\n") == 1


def test_the_plan_nearest_in_retention_is_chosen_by_name(tmp_path):
    for rho in ("0.5", "0.3"):
        (tmp_path / f"smollm2-135m-instruct-rho{rho}.json").touch()
    (tmp_path / "smollm2-135m-instruct-query-stats.safetensors").touch()
    chosen = {share: demo.nearest_plan(tmp_path, share).name for share in (1.0, 0.45, 0.35, 0.1)}
    assert chosen == {
        1.0: "smollm2-135m-instruct-rho0.5.json",
        0.45: "smollm2-135m-instruct-rho0.5.json",
        0.35: "smollm2-135m-instruct-rho0.3.json",
        0.1: "smollm2-135m-instruct-rho0.3.json",
    }


def test_plans_that_are_not_there_are_an_error_not_a_uniform_plan(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match="no plan for SmolLM2"):
            demo.nearest_plan(folder, 0.5)
