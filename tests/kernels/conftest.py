"""With a GPU, ``-m gpu`` takes every test of this folder, compiled (tests/conftest.py)."""

from pathlib import Path

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.gpu)
