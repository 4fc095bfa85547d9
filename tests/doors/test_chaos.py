"""Clients that die, requests that are aborted, flushes at the wrong time: no page is ever lost."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.doors.client import ask, assert_all_but_a_page, assert_same, cached, flush, stored
from tests.http_client import metric, post
from tests.reference.tiny import random_tokens

pytestmark = pytest.mark.server

CLIENT = Path(__file__).with_name("killed_client.py")
IDLE_TIMEOUT_S = 180
DOCUMENT = random_tokens(200, seed=90)
REFERENCE = random_tokens(170, seed=91)


def prompt(i: int) -> list[int]:
    """Every other request asks about the same document; lengths are spread over several chunks."""
    chance = random.Random(i)
    own = random_tokens(chance.randint(5, 300), seed=1000 + i)
    return DOCUMENT + own[:40] if i % 2 else own


def load(server) -> dict:
    with urllib.request.urlopen(f"{server.url}/v1/loads", timeout=60) as answer:
        return json.load(answer)["loads"][0]


def wait_until_idle(server) -> dict:
    """The scheduler's own figures, taken after this call while nothing ran or waited."""
    start = time.time()
    while time.time() < start + IDLE_TIMEOUT_S:
        found = load(server)
        if found["timestamp"] > start and not found["num_running_reqs"] + found["num_waiting_reqs"]:
            return found
        time.sleep(0.1)
    pytest.fail(f"requests are left after {IDLE_TIMEOUT_S} s: {found}")


def wait_until_busy(server) -> None:
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while not load(server)["num_running_reqs"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pool(server) -> dict[str, float]:
    names = ("num_used_tokens", "kv_used_tokens", "kv_available_tokens", "kv_evictable_tokens")
    return {name: metric(server, f"sglang:{name}") for name in names}


def assert_the_pool_is_whole(server) -> None:
    """Nothing is in use, and free and evictable tokens make up the pool; by the server's gauges."""
    capacity = metric(server, "sglang:max_total_num_tokens")
    assert wait_until_idle(server)["num_used_tokens"] == 0
    # an idle scheduler writes its gauges again within 30 s
    deadline = time.monotonic() + 60
    while (gauges := pool(server))["num_used_tokens"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert gauges["num_used_tokens"] == gauges["kv_used_tokens"] == 0
    assert gauges["kv_available_tokens"] + gauges["kv_evictable_tokens"] == capacity


@pytest.fixture
def calm(server):
    """What must hold after the storm: same answers, all pages there, no complaint in the log."""
    flush(server)
    before = ask(server, REFERENCE)
    wait_until_idle(server)
    said = len(server.log.read_text())
    yield
    assert_the_pool_is_whole(server)
    assert ask(server, REFERENCE)["output_ids"] == before["output_ids"]
    # the longest request there can be needs every page of the pool: one that is lost would show
    capacity = int(metric(server, "sglang:max_total_num_tokens"))
    longest = random_tokens(capacity - 10, seed=92)
    assert len(ask(server, longest, 2)["output_ids"]) == 2
    flush(server)
    assert_same(before, ask(server, REFERENCE))
    server.check_alive()
    complaints = ("leak", "Traceback", "mismatch", "Scheduler hit an exception")
    log = server.log.read_text()[said:]
    assert not [line for line in log.splitlines() if any(word in line for word in complaints)]


def killed_in_mid_stream(server, i: int) -> None:
    params = {"temperature": 0, "max_new_tokens": 1000, "ignore_eos": True}
    body = {"input_ids": prompt(i), "sampling_params": params, "stream": True}
    command = [sys.executable, "-S", "-E", str(CLIENT), server.url.rsplit(":", 1)[1]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        client.stdin.write(json.dumps(body).encode())
        client.stdin.close()
        assert client.stdout.readline() == b"streaming\n"
        time.sleep(random.Random(i).uniform(0, 0.5))
        client.kill()
    assert client.returncode == -signal.SIGKILL


def test_a_client_killed_in_mid_stream_leaves_nothing_behind_50_times(server, calm):
    aborted = metric(server, "sglang:num_aborted_requests_total")
    for batch in range(5):
        with ThreadPoolExecutor(10) as clients:
            numbers = range(batch * 10, batch * 10 + 10)
            list(clients.map(partial(killed_in_mid_stream, server), numbers))
        assert_the_pool_is_whole(server)
    # SGLang aborts two seconds after it has lost the client; a fast machine may be done before
    assert metric(server, "sglang:num_aborted_requests_total") >= aborted + 25


def aborted_at_random(server, i: int) -> str:
    """Sends request ``i``, aborts it some time later; how it ended."""
    rid, answered = f"storm-{i:03d}-", threading.Event()

    def abort():
        answered.wait(random.Random(i).uniform(0, 1.5))
        # a request that the server has not seen yet cannot be aborted
        while not answered.is_set():
            post(server, "/abort_request", {"rid": rid})
            answered.wait(0.5)

    thread = threading.Thread(target=abort)
    thread.start()
    params = {"temperature": 0, "max_new_tokens": 1000, "ignore_eos": True}
    try:
        body = {"rid": rid, "input_ids": prompt(i), "sampling_params": params}
        return post(server, "/generate", body)["meta_info"]["finish_reason"]["type"]
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
    finally:
        answered.set()
        thread.join()


def test_200_aborts_and_flushes_while_busy_lose_nothing(server, calm):
    long = random_tokens(130, seed=93)
    alone = ask(server, long, 300)
    flush(server)
    refused = 0
    with ThreadPoolExecutor(25) as clients:
        bystander = clients.submit(ask, server, long, 300)
        endings = [clients.submit(aborted_at_random, server, i) for i in range(200)]
        wait_until_busy(server)
        while not bystander.done():
            try:
                flush(server, timeout_s=0)
            except urllib.error.HTTPError as error:
                assert error.code == 400
                assert "Flush cache failed" in error.read().decode()
                refused += 1
            time.sleep(0.3)
    assert refused
    assert [ending.result() for ending in endings] == ["abort"] * 200
    assert_same(bystander.result(), alone)


def test_a_refused_flush_keeps_what_is_cached(server):
    flush(server)
    first = ask(server, REFERENCE)
    with ThreadPoolExecutor(1) as client:
        other = client.submit(ask, server, random_tokens(20, seed=94), 300)
        wait_until_busy(server)
        with pytest.raises(urllib.error.HTTPError) as failure:
            flush(server, timeout_s=0)
        assert failure.value.code == 400
        more = REFERENCE + first["output_ids"] + random_tokens(10, seed=95)
        held = stored(len(REFERENCE), len(first["output_ids"]))
        assert_all_but_a_page(cached(ask(server, more)), held)
        assert len(other.result()["output_ids"]) == 300
