"""What an installation contains: the package with its linked folders, and nothing beside it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("kernels", "patches", "calib")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # setuptools leaves a build/ and an egg-info folder behind: here, not in the repository
    ignored = (".git", ".venv", "build", "shared")
    source = folder / "source"
    source.mkdir()
    for entry in ROOT.iterdir():
        if entry.name not in ignored:
            subprocess.run(["cp", "-a", str(entry), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", str(folder), str(source)], check=True)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_has_every_file_of_the_package_and_of_the_linked_folders(wheel):
    expected = set()
    for folder, _, files in os.walk(ROOT / "tangram_sglang", followlinks=True):
        if "__pycache__" not in folder:
            expected |= {str(Path(folder, name).relative_to(ROOT)) for name in files}
    assert {name.split("/")[1] for name in expected} >= set(LINKED)
    assert expected - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_nothing_is_installed_beside_the_package(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tangram_sglang"}


def test_the_wheel_announces_its_plugins_and_its_command(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
    text = archive.read(name).decode()
    for line in (
        "[sglang.srt.plugins]\ntangram = tangram_sglang.backend.plugin:register",
        "[sglang.srt.platforms]\ntangram_cpu = tangram_sglang.cpu_platform:activate",
        "[console_scripts]\ntangram = tangram_sglang.cli:main",
    ):
        assert line in text


@pytest.mark.parametrize("folder", LINKED)
def test_a_linked_folder_shadows_no_package_of_the_same_name(folder):
    """An __init__.py in kernels/ would hide the PyPI package `kernels` from a server that is
    started in the repository root."""
    assert not (ROOT / folder / "__init__.py").exists()
    assert (ROOT / "tangram_sglang" / folder).readlink() == Path("..", folder)
