"""A server and everything it started ends with its context, whatever happens inside."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tangram_sglang.cli import server as server_module
from tangram_sglang.cli.server import Server, ServerError, cpu_environment, reserve_port

FAKE = Path(__file__).with_name("fake_server.py")


@pytest.fixture
def make_server(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "STOP_TIMEOUT_S", 0.5)

    def make(*options):
        server = Server([], os.environ, tmp_path / "server.log")
        server.command = [sys.executable, str(FAKE), str(server.port), *options]
        return server

    return make


def processes(server) -> list[int]:
    """The server's own process and its child, which the fake server's log names."""
    word, child = server.log.read_text().split()[:2]
    assert word == "child"
    return [server._process.pid, int(child)]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def assert_gone(pids):
    # the grandchild is reaped by init, a moment later
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if alive(pid)] == []


def test_a_reserved_port_goes_to_the_server_that_names_it_and_to_nobody_else():
    with reserve_port() as reservation, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(reservation.getsockname())
        with socket.create_server(reservation.getsockname()) as server:
            socket.create_connection(server.getsockname()).close()


def test_a_port_is_reserved_while_its_server_starts_and_runs_and_no_longer(make_server):
    with make_server() as server, socket.socket() as other:
        address = ("127.0.0.1", server.port)
        with pytest.raises(OSError, match="in use"):
            other.bind(address)
        server.wait_until_ready(20)
        server.stop()
        # not at once without this: what the clients left waits for a minute
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(address)
        other.listen()


@pytest.mark.parametrize("options", [(), ("--deaf",)], ids=["obedient", "deaf-to-SIGTERM"])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt, SystemExit, RuntimeError])
def test_the_whole_process_group_ends_with_the_context(make_server, options, error):
    server = make_server(*options)
    try:
        with server:
            server.wait_until_ready(20)
            pids = processes(server)
            assert all(map(alive, pids))
            if error:
                raise error
    except BaseException as raised:
        assert type(raised) is error
    assert_gone(pids)


def test_a_server_that_ends_by_itself_is_an_error_with_its_status(make_server):
    with make_server("--no-such-flag") as server:
        with pytest.raises(ServerError, match="ended by itself with status 2") as raised:
            server.wait_until_ready(20)
        # in the traceback, where a test's report would otherwise not say what went wrong
        assert "--no-such-flag" in raised.value.__notes__[0]


def test_a_server_that_never_gets_ready_is_given_up(make_server):
    with (
        make_server("--never-ready") as server,
        pytest.raises(ServerError, match=r"not ready within 1 s: see .*server\.log"),
    ):
        server.wait_until_ready(1)


def test_a_client_without_a_time_out_is_freed_by_the_deadline(make_server):
    with make_server("--hang") as server:
        server.wait_until_ready(20)
        with pytest.raises(ServerError, match="no answer within 1 s"), server.deadline(1):
            urllib.request.urlopen(f"{server.url}/generate", data=b"{}")


def test_a_deadline_that_is_kept_changes_nothing(make_server):
    with make_server() as server:
        server.wait_until_ready(20)
        with pytest.raises(ZeroDivisionError), server.deadline(60):
            _ = 1 / 0
        assert server.end is None


def test_stopping_twice_is_harmless(make_server):
    with make_server() as server:
        server.stop()
    server.stop()


def test_the_server_runs_on_our_cpu_platform_with_the_callers_settings(monkeypatch):
    monkeypatch.setenv("TANGRAM_WINDOW", "256")
    monkeypatch.setenv("TANGRAM_RETENTION", "0.9")
    environment = cpu_environment({"TANGRAM_RETENTION": "0.5"})
    wanted = {"TANGRAM_CPU_PLATFORM": "1", "TANGRAM_WINDOW": "256", "TANGRAM_RETENTION": "0.5"}
    assert wanted.items() <= environment.items()


def test_a_server_does_not_outlive_a_parent_that_is_killed_outright(tmp_path):
    code = """if True:
        import os, pathlib, sys, time
        from tangram_sglang.cli.server import Server
        server = Server([], os.environ, pathlib.Path(sys.argv[1]))
        deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
        server.command = [sys.executable, "-c", deaf]
        with server:
            print(server._process.pid, flush=True)
            time.sleep(600)
    """
    command = [sys.executable, "-c", code, str(tmp_path / "server.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    assert_gone([pid])
