"""``run_scenario``: makes the child's job, and a Result or an exception of its answer."""

import os
import pickle
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness.processes import child_env, load_sglang, log_tail, run_child
from tests.harness.scenario import Req, Result, Scenario, ScenarioFailed


def run_scenario(
    model_path: str | Path,
    requests: Sequence[Req] = (),
    *,
    server_args: Mapping[str, Any] | None = None,
    env: Mapping[str, str | None] | None = None,
    overlap: bool = False,
    on_step: Callable | None = None,
    script: Callable | None = None,
    collect: Callable | None = None,
    timeout_s: float = 120,
    max_steps: int = 20_000,
    max_stall: int = 500,
    idle_check: bool = True,
    threads: int = 1,
    fresh: bool = False,
    gpu: bool = False,
) -> Result:
    """Run ``requests`` through a Scheduler of its own and return what it sent.

    server_args: ServerArgs fields over boot.CPU_ARGS or, with gpu, GPU_ARGS. env: over this process's TANGRAM_* and
    SGLANG_* and BASE_ENV; None removes one. on_step(control): before every loop iteration.
    script(control): a generator, advanced before every iteration; the loop goes on until it ends.
    collect(scheduler): after the last iteration; its value comes back as ``Result.collected``.
    The three are module-level functions of a module that imports by name (or partials of them).
    timeout_s: for the event loop and collect; starting has a limit of its own.
    threads: of torch; on a shared machine 2 are 20 times slower than 1 for a tiny model.
    fresh: a new interpreter instead of a fork, for what SGLang reads while it is imported; +12 s.
    gpu: on the GPU, always in a new interpreter: CUDA does not survive a fork.
    Raises ScenarioFailed, ScenarioDied or ScenarioTimeout.
    """
    fresh = fresh or gpu
    if not fresh:
        load_sglang()
    started = time.monotonic()
    name = f"tg{uuid.uuid4().hex[:10]}"
    scratch = tempfile.mkdtemp(prefix=f"{name}-", dir="/tmp")  # short: it holds socket names
    scenario = Scenario(
        name=name,
        model_path=str(model_path),
        requests=list(requests),
        server_args={"disable_overlap_schedule": not overlap, **(server_args or {})},
        on_step=on_step,
        script=script,
        collect=collect,
        max_steps=max_steps,
        max_stall=max_stall,
        idle_check=idle_check,
        threads=threads,
        scratch=scratch,
        gpu=gpu,
    )
    log_path = os.path.join(scratch, "log")
    try:
        payload = run_child(
            pickle.dumps(scenario), name, log_path, child_env(env, gpu), timeout_s, fresh, gpu
        )
        log = Path(log_path).read_text(errors="replace")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        for snapshot in Path("/dev/shm").glob(f"sglang_loads_{name}_*"):
            snapshot.unlink(missing_ok=True)
    answer = pickle.loads(payload)
    if answer[0] == "error":
        _, stage, error_type, error, trace = answer
        message = f"scenario failed in stage {stage!r}: {trace}{log_tail(log)}"
        raise ScenarioFailed(message, log, stage, error_type, error)
    result = answer[1]
    result.log = log
    result.total_s = time.monotonic() - started
    print(
        f"scenario {name}: {result.total_s:.1f} s (boot {result.boot_s:.1f}, run "
        f"{result.run_s:.1f}), {result.steps} iterations, {len(result.batches)} batches"
    )
    return result
