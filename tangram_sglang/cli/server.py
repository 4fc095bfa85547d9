"""A SGLang server process, from its command line to the end of everything it started."""

import contextlib
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HOST = "127.0.0.1"
# an idle two-core machine takes 30 s; shared ones were seen to take 100
READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 15.0
PR_SET_PDEATHSIG = 1

# a proxy for the outside world cannot reach the loopback interface
LOOPBACK = {"NO_PROXY": f"{HOST},localhost", "no_proxy": f"{HOST},localhost"}


class ServerError(RuntimeError):
    """The server died or did not answer in time."""


def cpu_arguments(model: Path, backend: str) -> list[str]:
    """Arguments with which SGLang serves a small model on a CPU; greedy output is exact in float32.

    The server's memory is bounded by tokens, since a share of a shared machine's memory is not a
    fact one can rely on.
    """
    return [
        *("--model-path", str(model)),
        *("--attention-backend", backend),
        *("--device", "cpu"),
        *("--dtype", "float32"),
        *("--max-total-tokens", "16384"),
        *("--mem-fraction-static", "0.3"),
        *("--grammar-backend", "none"),
        "--cuda-graph-backend-decode=disabled",
        "--cuda-graph-backend-prefill=disabled",
        "--skip-server-warmup",
        # an idle scheduler would spin; two of them starve a third on a machine of two cores
        "--sleep-on-idle",
        "--enable-metrics",
        "--enable-cache-report",
    ]


def cpu_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with our CPU platform and `settings` (TANGRAM_* variables)."""
    return {
        # threads that spin at each barrier make a server several times slower on a busy machine
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        **LOOPBACK,
        # SGLang has no platform for a CPU without Intel's kernels; ours steps aside for CUDA
        "TANGRAM_CPU_PLATFORM": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # /health would otherwise run a request of its own, which the counters would count
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        **settings,
    }


def reserve_port() -> socket.socket:
    """A socket bound to a free port of the loopback interface; the port is ours until it is closed.

    A server binds its port half a minute after it was chosen. A port that was only looked up may by
    then belong to any process, be it as the near end of a connection. Linux gives the port of a
    bound socket to nobody who asks for any port, yet lets a server that names it listen there:
    both sides set SO_REUSEADDR and this one never listens.
    """
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((HOST, 0))
    return reservation


class Server:
    """Context manager: starts on entry, and on exit ends the whole process group.

    Entering does not wait: call `wait_until_ready`. The log file takes both output streams.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path):
        self._reservation = reserve_port()
        self.port = self._reservation.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}"
        self.log = log
        self.command = [
            *(sys.executable, "-m", "sglang.launch_server"),
            *arguments,
            *("--host", HOST, "--port", str(self.port)),
        ]
        self._environment = dict(environment)
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "Server":
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        return self

    def __exit__(self, *exc_info) -> None:
        self.stop()

    @property
    def command_line(self) -> str:
        return shlex.join(self.command)

    def wait_until_ready(self, timeout_s: float = READY_TIMEOUT_S) -> float:
        """Returns the seconds it took until the server accepts requests."""
        start = time.monotonic()
        while not self._healthy():
            self.check_alive()
            if time.monotonic() - start > timeout_s:
                raise self._error(
                    f"the server was not ready within {timeout_s:.0f} s: see {self.log}"
                )
            time.sleep(0.5)
        return time.monotonic() - start

    def check_alive(self) -> None:
        if self.end:
            raise self._error(self.end)

    @property
    def end(self) -> str | None:
        """How the server ended by itself, or None while it runs."""
        status = self._process.poll()
        return None if status is None else f"the server ended by itself with status {status}"

    @contextlib.contextmanager
    def deadline(self, timeout_s: float) -> Iterator[None]:
        """Ends the server when the block takes longer, which fails whatever waits for an answer.

        Needed for clients that know no time-out of their own, as SGLang's frontend.
        """
        expired = threading.Event()

        def expire():
            expired.set()
            self._signal(signal.SIGKILL)

        timer = threading.Timer(timeout_s, expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        except Exception as error:
            if not expired.is_set():
                raise
            raise self._error(f"no answer within {timeout_s:.0f} s: see {self.log}") from error
        finally:
            timer.cancel()

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def ask_to_stop(self) -> None:
        """Does not wait: several servers that are asked one after the other end together."""
        if self._process is not None:
            self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """Asks the process group to end, then ends it; safe to call twice."""
        self._reservation.close()
        if self._process is None:
            return
        try:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        finally:
            # also when a second Ctrl-C cuts the wait short, and for children that outlive the first
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _error(self, message: str) -> ServerError:
        error = ServerError(message)
        # shown under a traceback alone: whoever prints the message shows the log in its own way
        error.add_note(f"--- last lines of {self.log}\n{self.log_tail()}\n---")
        return error

    def _signal(self, number: int) -> None:
        # the process leads a session of its own, so its id is the group's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _healthy(self) -> bool:
        # 503 until the model is loaded
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False


def _end_with_parent() -> None:
    """In the child, before exec: the kernel ends the server if this process is killed outright.

    SGLang's other processes end with the server in the same way. SIGTERM would let it finish its
    requests first.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
