"""Kernels run compiled where there is a GPU and in Triton's interpreter elsewhere.

The interpreter must be chosen before Triton is first imported. With a GPU, ``-m gpu`` takes every
test of this folder.
"""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.gpu)
