"""The test's side: starts the fork server once, one child a scenario, waits, and reads the answer."""

import contextlib
import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.harness import child
from tests.harness.scenario import (
    Req,
    Result,
    Scenario,
    ScenarioDied,
    ScenarioError,
    ScenarioFailed,
    ScenarioTimeout,
)

ROOT = Path(__file__).resolve().parents[2]
# The fork server's, and with it every child's: what is read while SGLang is imported.
BASE_ENV = {
    "TANGRAM_CPU_PLATFORM": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # threads that wait must not spin: the test process and other jobs want the cores
    "OMP_WAIT_POLICY": "passive",
}
LOAD_TIMEOUT_S = 300
# what an error message shows of the child's log
LOG_TAIL, LOG_LINE = 40, 300


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
) -> Result:
    """Run ``requests`` through a Scheduler of its own and return what it sent.

    server_args: ServerArgs fields over boot.CPU_ARGS. env: over this process's TANGRAM_* and
    SGLANG_* and BASE_ENV; None removes one. on_step(control): before every loop iteration.
    script(control): a generator, advanced before every iteration; the loop goes on until it ends.
    collect(scheduler): after the last iteration; its value comes back as ``Result.collected``.
    The three are module-level functions of a module that imports by name (or partials of them).
    threads: of torch; on a shared machine 2 are 20 times slower than 1 for a tiny model.
    fresh: a new interpreter instead of a fork, for what SGLang reads while it is imported; +12 s.
    Raises ScenarioFailed, ScenarioDied or ScenarioTimeout.
    """
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
    )
    log_path = os.path.join(scratch, "log")
    try:
        payload = _run_child(
            pickle.dumps(scenario), name, log_path, _child_env(env), timeout_s, fresh
        )
        log = Path(log_path).read_text(errors="replace")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        for snapshot in Path("/dev/shm").glob(f"sglang_loads_{name}_*"):
            snapshot.unlink(missing_ok=True)
    answer = pickle.loads(payload)
    if answer[0] == "error":
        _, stage, error_type, error, trace = answer
        message = f"scenario failed in stage {stage!r}: {trace}{_tail(log)}"
        raise ScenarioFailed(message, log, stage, error_type, error)
    result = answer[1]
    result.log = log
    result.total_s = time.monotonic() - started
    print(
        f"scenario {name}: {result.total_s:.1f} s (boot {result.boot_s:.1f}, run "
        f"{result.run_s:.1f}), {result.steps} iterations, {len(result.batches)} batches"
    )
    return result


@functools.cache
def load_sglang() -> float:
    """Start the fork server and wait until it has SGLang; returns the seconds (10 to 40).

    Once per test session, and no part of the time or the time limit of a scenario.
    """
    started = time.monotonic()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness.preload"])
    reader, writer = context.Pipe(duplex=False)
    with _start_environment():
        process = context.Process(target=child.report_preload, args=(writer,), daemon=True)
        process.start()
    writer.close()
    # whatever happens to the fork server closes the pipe
    error = reader.recv() if reader.poll(LOAD_TIMEOUT_S) else "no answer in time"
    process.join(10)
    if error:
        raise ScenarioError(f"the fork server could not load SGLang:\n{error}")
    seconds = time.monotonic() - started
    print(f"fork server has loaded SGLang in {seconds:.1f} s")
    return seconds


def _child_env(env):
    """Over the environment of the fork server, which holds nothing of TANGRAM_* and SGLANG_*."""
    ours = {k: v for k, v in os.environ.items() if k.startswith(("TANGRAM_", "SGLANG_"))}
    return {**BASE_ENV, **ours, **(env or {})}


def _run_child(job, name, log_path, env, timeout_s, fresh) -> bytes:
    context = multiprocessing.get_context("spawn" if fresh else "forkserver")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(
        target=child.main, args=(job, name, log_path, env, writer), name=name, daemon=True
    )
    with _start_environment():
        process.start()
    writer.close()
    try:
        ready = connection.wait([reader, process.sentinel], timeout_s)
        # a child that has sent its answer is gone right after: read first
        if reader.poll():
            with contextlib.suppress(EOFError):
                return reader.recv_bytes()
        log = _read(log_path)
        if ready:
            process.join(10)
            raise ScenarioDied(
                f"scenario child ended with exit code {process.exitcode} and no answer{_tail(log)}",
                log,
            )
        state = _read(f"/proc/{process.pid}/status")[:60].split()
        os.kill(process.pid, signal.SIGUSR1)  # write the stacks
        time.sleep(0.5)
        log = _read(log_path)
        raise ScenarioTimeout(f"scenario was killed after {timeout_s:g} s {state} {_read(f'/proc/{process.pid}/wchan')}{_tail(log)}", log)
    finally:
        process.kill()
        process.join(10)
        reader.close()


@contextlib.contextmanager
def _start_environment():
    """What the fork server, or a fresh interpreter, inherits; this process's own is put back."""
    before = dict(os.environ)
    paths = [str(ROOT), *filter(None, before.get("PYTHONPATH", "").split(os.pathsep))]
    for key in [k for k in before if k.startswith(("TANGRAM_", "SGLANG_"))]:
        del os.environ[key]
    os.environ.update(BASE_ENV, PYTHONPATH=os.pathsep.join(dict.fromkeys(paths)))
    os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _read(log_path):
    return Path(log_path).read_text(errors="replace") if os.path.exists(log_path) else ""


def _tail(log):
    # SGLang logs its arguments in one line of 20,000 characters
    lines = [line[:LOG_LINE] for line in log.splitlines()[-LOG_TAIL:]]
    return "\n".join(["", "--- end of the child's log ---", *lines]) if lines else ""
