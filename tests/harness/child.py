"""The child's side of a scenario: environment, log, boot, event loop, self-check, answer.

Everything from the unpickling of the test's functions on happens under one try, so that whatever
goes wrong reaches the test as a traceback.
"""

import faulthandler
import multiprocessing.util
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback

from tests.harness.scenario import Result, Scenario

RUNNING = b"running"  # what a child sends when its event loop is about to start


def main(job: bytes, name: str, log_path: str, env: dict, writer) -> None:
    """Entry of the child process; sends ("ok", Result) or ("error", ...) and leaves at once."""
    _redirect_output(log_path)
    stage = ["functions"]
    try:
        _apply_env(env)
        answer = ("ok", _run(pickle.loads(job), stage, writer))
        stage[0] = "result"
        payload = pickle.dumps(answer)
    except BaseException as e:
        # SystemExit is argparse's; its message went to the log
        payload = pickle.dumps(
            ("error", stage[0], type(e).__name__, str(e), traceback.format_exc())
        )
    sys.stdout.flush()
    sys.stderr.flush()
    # semaphores are named system-wide; gloo, zmq and SGLang's threads need no teardown
    multiprocessing.util._run_finalizers()
    writer.send_bytes(payload)
    os._exit(0)


def report_preload(writer) -> None:
    """Entry of the first child: says whether the fork server has what the others need."""
    from tests.harness import preload

    writer.send(preload.ERROR)


def _redirect_output(log_path):
    fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    # the parent asks for the stacks with SIGUSR1 before it kills a child
    faulthandler.register(signal.SIGUSR1, file=fd, all_threads=True)


def _apply_env(env):
    for key, value in env.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


def _run(scenario: Scenario, stage: list[str], writer) -> Result:
    import torch

    from tests.harness import boot
    from tests.harness.driver import Driver

    # every child forks off with the same generator, and SGLang draws its port from it
    random.seed()
    tempfile.tempdir = scenario.scratch
    torch.set_num_threads(scenario.threads)
    started = time.monotonic()
    stage[0] = "arguments"
    args, ports = boot.resolve(
        scenario.model_path, scenario.server_args, scenario.name, scenario.gpu
    )
    stage[0] = "build"
    scheduler = boot.build_scheduler(args, ports)
    booted = time.monotonic()
    stage[0] = "run"
    writer.send_bytes(RUNNING)
    driver = Driver(
        scheduler,
        scenario.requests,
        scenario.on_step,
        scenario.script,
        scenario.max_steps,
        scenario.max_stall,
    )
    scheduler.run_event_loop()
    if scenario.idle_check:
        stage[0] = "idle check"
        idle_check(scheduler)
    stage[0] = "collect"
    collected = scenario.collect(scheduler) if scenario.collect else None
    return Result(
        outputs=driver.outputs,
        collected=collected,
        records=driver.records,
        batches=driver.batches,
        retractions=driver.retractions,
        replies=driver.replies,
        steps=driver.index + 1,
        boot_s=booted - started,
        run_s=time.monotonic() - booted,
    )


def idle_check(scheduler) -> None:
    """SGLang's own self-check, which raises on any leak of tokens or request rows."""
    from sglang.srt.environ import envs

    if not envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE.get():
        raise RuntimeError("SGLang's idle check must stay strict, it only warns in this scenario")
    if not scheduler.is_fully_idle():
        raise RuntimeError("the event loop ended before the scheduler was idle")
    scheduler.on_idle()
