"""Fixtures of all tests.

- `smollm2`: folder of the real model, SmolLM2-135M-Instruct (SMOLLM2_MODEL names another folder).
"""

import importlib
import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Without a GPU the Triton kernels run in Triton's interpreter, which Triton's own library must
# know when it is first imported and our kernels when they are. Child processes (servers) get the
# environment as it was: SGLang must not run interpreted.
KERNELS = ("decode", "decode_spans", "dispatch", "gate_pages", "merge", "prefill", "query_pages")
KERNELS += (
    "raw_write",
    "score_expected_attention",
    "score_keydiff",
    "seal_write",
    "select",
    "table",
)
KERNELS += ("tails",)
if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"
    for name in ("triton.experimental.gluon", *(f"tangram_sglang.kernels.{x}" for x in KERNELS)):
        importlib.import_module(name)
    del os.environ["TRITON_INTERPRET"]

# the same examples in every run, so that a change is what breaks a test; a search for new ones is
# `HYPOTHESIS_PROFILE=search make test`
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# SGLang picks its platform when it is first imported, by whichever test that is
os.environ.setdefault("TANGRAM_CPU_PLATFORM", "1")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct as `make model` builds it; built now if it is missing."""
    if named := os.environ.get("SMOLLM2_MODEL"):
        return Path(named)
    from bench.smollm2 import build

    return build()


def pytest_collection_modifyitems(items):
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
