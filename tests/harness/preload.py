"""Imported once, in the fork server, so that no child imports anything.

Imports only: no hook is applied, no plugin loaded (a child does that, as the launcher does), nothing
computed, so that no OpenMP thread exists which a fork would lose. The one exception is SGLang's
platform, which its modules ask for while they are imported: it is fixed by the fork server's own
environment. A failure is kept for the children to report: the fork server swallows it.
"""

import contextlib
import gc
import importlib
import os
import traceback

MODULES = (
    "pytest",
    "sglang.srt.managers.scheduler",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.tp_worker",
    # imported late by the launcher and the scheduler, half a second together
    "sglang.srt.arg_groups.pipeline",
    "sglang.srt.arg_groups.resolution_hooks",
    "sglang.srt.distributed.device_communicators.custom_all_reduce",
    "sglang.srt.dllm.algorithm",
    "sglang.srt.rust_extensions",
    "sglang.srt.models.registry",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.test.scripted_runtime.context.queries",
    "transformers.models.llama.modeling_llama",
    "tests.harness.child",
)
ERROR: str | None = None


@contextlib.contextmanager
def _quiet():
    """SGLang says on import, in 20 lines, what a CPU lacks."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


try:
    with _quiet():
        for name in MODULES:
            importlib.import_module(name)
    gc.freeze()
except BaseException:
    ERROR = traceback.format_exc()
