"""requirements/bootstrap.py: sets up once, and says what to do where it cannot."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def bootstrap(tmp_path, monkeypatch):
    path = ROOT / "requirements" / "bootstrap.py"
    spec = importlib.util.spec_from_file_location("bootstrap", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    monkeypatch.setattr(module, "VENV", venv)
    monkeypatch.setattr(module, "VENV_PYTHON", venv / "bin" / "python")
    monkeypatch.setattr(module, "STAMP", venv / "stamp")
    return module


@pytest.fixture
def made(bootstrap, monkeypatch):
    """Counts set-ups instead of making them."""
    calls = []

    def make_venv():
        bootstrap.VENV_PYTHON.parent.mkdir(parents=True, exist_ok=True)
        bootstrap.VENV_PYTHON.touch()

    monkeypatch.setattr(bootstrap, "make_venv", make_venv)
    monkeypatch.setattr(bootstrap, "install", lambda: calls.append("install"))
    return calls


def test_a_second_run_installs_nothing(bootstrap, made):
    assert [bootstrap.main(), bootstrap.main()] == [0, 0]
    assert made == ["install"]


def test_a_changed_requirement_file_is_installed(bootstrap, made, tmp_path, monkeypatch):
    requirements = tmp_path / "cpu.txt"
    monkeypatch.setattr(bootstrap, "INPUTS", (requirements,))
    for text in ("numpy==2.3.5", "numpy==2.3.4"):
        requirements.write_text(text)
        assert bootstrap.main() == 0
    assert len(made) == 2


def test_a_failed_install_leaves_no_stamp(bootstrap, made, monkeypatch, capsys):
    def fail():
        raise bootstrap.SetupError("pip failed")

    monkeypatch.setattr(bootstrap, "install", fail)
    assert bootstrap.main() == 1
    assert not bootstrap.STAMP.exists()
    assert capsys.readouterr().err == "error: pip failed\n"


def test_a_python_that_sglang_does_not_support_is_named(bootstrap, monkeypatch, capsys):
    monkeypatch.setattr(bootstrap, "version_of", lambda python: (3, 13))
    assert bootstrap.main() == 1
    err = capsys.readouterr().err
    assert "expected 3.11 or 3.12" in err and "make test PYTHON=" in err


@pytest.mark.parametrize("root", [True, False])
def test_a_python_without_venv_names_the_debian_package(bootstrap, monkeypatch, capsys, root):
    ran = []
    monkeypatch.setattr(bootstrap, "has_ensurepip", lambda python: False)
    monkeypatch.setattr(bootstrap, "run", lambda command, env=None: ran.append(command))
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert bootstrap.main() == 1
    package = "python{}.{}-venv".format(*sys.version_info[:2])
    assert f"apt-get install -y {package}" in capsys.readouterr().err
    installs = [command for command in ran if command[0] == "apt-get"]
    assert installs == ([["apt-get", "update"], ["apt-get", "install", "-y", package]] * root)


def test_every_requirement_is_pinned_to_one_version():
    for name in ("cpu", "torch", "no-deps"):
        lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
        wanted = [line.split("#")[0].strip() for line in lines]
        assert all("==" in line for line in wanted if line)


def test_the_stand_in_for_torchvision_can_be_imported_but_not_used():
    code = (
        "import torchvision.transforms.v2.functional as F, torchvision;"
        "from torchvision.transforms import InterpolationMode;"
        "InterpolationMode.BICUBIC\n"
        "try: F.resize()\n"
        "except RuntimeError as e: print(e)"
    )
    stub = ROOT / "requirements" / "torchvision_stub"
    # -S: the real one, if there is one, stays out of the way
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=stub, capture_output=True, text=True
    )
    assert "does no image work" in ran.stdout, ran.stderr
