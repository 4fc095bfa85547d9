"""The fork server and the children: started with a known environment, waited for, always ended."""

import contextlib
import functools
import multiprocessing
import os
import signal
import time
from multiprocessing import connection
from pathlib import Path

from tests.harness import child
from tests.harness.scenario import ScenarioDied, ScenarioError, ScenarioTimeout

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
# what keeps SGLang off a GPU
CPU_ONLY = ("TANGRAM_CPU_PLATFORM", "CUDA_VISIBLE_DEVICES")
# loading SGLang in the fork server; arguments, model and scheduler of one child
LOAD_TIMEOUT_S, BOOT_TIMEOUT_S = 300, 180
# what an error message shows of the child's log
LOG_TAIL, LOG_LINE = 40, 300


@functools.cache
def load_sglang() -> float:
    """Start the fork server and wait until it has SGLang; returns the seconds (10 to 40).

    Once per test session, and no part of the time or the time limit of a scenario.
    """
    started = time.monotonic()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness.preload"])
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=child.report_preload, args=(writer,), daemon=True)
    try:
        with _start_environment():
            process.start()
        writer.close()
        error = reader.recv() if reader.poll(LOAD_TIMEOUT_S) else "no answer in time"
        process.join(60)
    except (EOFError, OSError) as e:
        error = f"it ended with no answer: {e!r}"
    if error:
        raise ScenarioError(f"the fork server could not load SGLang:\n{error}")
    seconds = time.monotonic() - started
    print(f"fork server has loaded SGLang in {seconds:.1f} s")
    return seconds


def base_env(gpu: bool) -> dict[str, str]:
    return {k: v for k, v in BASE_ENV.items() if not (gpu and k in CPU_ONLY)}


def child_env(env, gpu=False):
    """Over the environment of the fork server, which holds nothing of TANGRAM_* and SGLANG_*."""
    ours = {k: v for k, v in os.environ.items() if k.startswith(("TANGRAM_", "SGLANG_"))}
    if gpu:
        ours.pop("TANGRAM_CPU_PLATFORM", None)
    return {**base_env(gpu), **ours, **(env or {})}


def run_child(job, name, log_path, env, timeout_s, fresh, gpu=False) -> bytes:
    context = multiprocessing.get_context("spawn" if fresh else "forkserver")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(
        target=child.main, args=(job, name, log_path, env, writer), name=name, daemon=True
    )
    with _start_environment(gpu):
        process.start()
    writer.close()
    try:
        # first that it runs, then the answer: a busy machine may take its time to get there
        for limit, what in ((BOOT_TIMEOUT_S, "starting"), (timeout_s, "running")):
            if not connection.wait([reader, process.sentinel], limit):
                raise _timeout(
                    process, log_path, f"scenario was killed after {limit:g} s of {what}"
                )
            try:
                message = reader.recv_bytes()
            except EOFError:
                process.join(60)
                raise _died(process, log_path) from None
            if message != child.RUNNING:
                return message
        raise RuntimeError("a scenario child said twice that it runs")
    finally:
        process.kill()
        process.join(10)
        reader.close()


def _timeout(process, log_path, message):
    os.kill(process.pid, signal.SIGUSR1)  # the child writes the stacks of its threads
    time.sleep(0.5)
    log = _read(log_path)
    return ScenarioTimeout(message + log_tail(log), log)


def _died(process, log_path):
    log = _read(log_path)
    message = f"scenario child ended with exit code {process.exitcode} and no answer"
    return ScenarioDied(message + log_tail(log), log)


@contextlib.contextmanager
def _start_environment(gpu=False):
    """What the fork server, or a fresh interpreter, inherits; this process's own is put back."""
    before = dict(os.environ)
    paths = [str(ROOT), *filter(None, before.get("PYTHONPATH", "").split(os.pathsep))]
    for key in [k for k in before if k.startswith(("TANGRAM_", "SGLANG_"))]:
        del os.environ[key]
    os.environ.update(base_env(gpu), PYTHONPATH=os.pathsep.join(dict.fromkeys(paths)))
    os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _read(log_path):
    return Path(log_path).read_text(errors="replace") if os.path.exists(log_path) else ""


def log_tail(log):
    # SGLang logs its arguments in one line of 20,000 characters
    lines = [line[:LOG_LINE] for line in log.splitlines()[-LOG_TAIL:]]
    return "\n".join(["", "--- end of the child's log ---", *lines]) if lines else ""
