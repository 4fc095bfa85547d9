"""With a GPU, ``-m gpu`` takes every test of this folder, compiled (tests/conftest.py)."""

from pathlib import Path

import pytest
import torch

from tangram_sglang.backend import split_dispatch
from tests.kernels.sides import GPU, make_sides


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture
def sides(monkeypatch):
    """Makes a CPU and a GPU backend (``sides.make_sides``)."""
    if GPU == "cpu":
        # the occupancy of a kernel is a GPU's
        monkeypatch.setattr(split_dispatch, "resident_programs", lambda *a, **k: 6)
    return make_sides
