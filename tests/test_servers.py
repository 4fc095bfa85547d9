"""Real servers over HTTP: both launchers, equal bytes at two retentions, bad requests, a profile."""

import json
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from bench import profiled, trace
from tangram_sglang.cli.server import HOST, Server, cpu_arguments, cpu_environment
from tests.http_client import generate, metric, post, scrape
from tests.reference.tiny import random_tokens, save, tiny_llama

pytestmark = pytest.mark.server

CONTEXT = 40_000
# 26,000 tokens, uncompressed: 2 layers x 2 heads x (K and V) x 16 floats
POOL_BYTES = 26_000 * 2 * 2 * 2 * 16 * 4
PROMPT = 8_100


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = tiny_llama(seed=5, max_positions=CONTEXT)
    return save(model, tmp_path_factory.mktemp("servers"))


def start(folder, log, retention, launcher):
    settings = {"TANGRAM_RETENTION": str(retention), "TANGRAM_POOL_BYTES": str(POOL_BYTES)}
    arguments = cpu_arguments(folder, "tangram")
    arguments[arguments.index("--max-total-tokens") + 1] = "1000000"
    arguments += ["--max-running-requests", "32", "--decode-log-interval", "1", "--sleep-on-idle"]
    server = Server(arguments, cpu_environment(settings), log)
    address = ["--host", HOST, "--port", str(server.port)]
    server.command = [*launcher, *arguments, *address]
    return server


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """Retention 1.0, started as a module from the repository root (pytest's own folder)."""
    log = tmp_path_factory.mktemp("whole") / "log"
    launcher = [sys.executable, "-m", "sglang.launch_server"]
    with start(folder, log, 1.0, launcher) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="module")
def quarter(folder, tmp_path_factory):
    """Retention 0.25 in the same bytes, started by ``sglang serve``."""
    log = tmp_path_factory.mktemp("quarter") / "log"
    with start(
        folder, log, 0.25, [str(Path(sys.executable).with_name("sglang")), "serve"]
    ) as server:
        server.wait_until_ready()
        yield server


def most_running(server, requests: int) -> int:
    """Most requests of PROMPT tokens that ran at once, by SGLang's own gauge."""
    threads = [
        threading.Thread(target=generate, args=(server, random_tokens(PROMPT, seed=i), 60))
        for i in range(requests)
    ]
    for thread in threads:
        thread.start()
    most = 0.0
    while any(thread.is_alive() for thread in threads):
        most = max(most, metric(server, "sglang:num_running_reqs"))
        time.sleep(0.05)
    return int(most)


def test_the_start_up_line_says_what_is_in_force(whole, quarter):
    for server, asked in ((whole, "1.0000"), (quarter, "0.2500")):
        line = next(x for x in server.log.read_text().splitlines() if "tangram: plan=" in x)
        assert f"retention asked={asked} held={asked}" in line
        for word in ("scorer=", "groups=1x4", "capacity=", "true tokens", "bytes"):
            assert word in line


def test_the_same_bytes_hold_three_times_the_tokens(whole, quarter):
    held = {server: most_running(server, 12) * PROMPT for server in (whole, quarter)}
    assert held[whole] == 3 * PROMPT
    assert held[quarter] >= 3 * held[whole]
    total = "sglang:max_total_num_tokens"
    assert metric(quarter, total) >= 3 * metric(whole, total)


def test_a_prompt_longer_than_the_uncompressed_pool_is_accepted(whole, quarter):
    prompt = random_tokens(28_000, seed=1)
    assert metric(whole, "sglang:max_total_num_tokens") < len(prompt)
    answer = generate(quarter, prompt)
    assert answer["meta_info"]["prompt_tokens"] == 28_000
    assert len(answer["output_ids"]) == 4
    with pytest.raises(urllib.error.HTTPError) as failure:
        generate(whole, prompt)
    assert failure.value.code == 400


def test_a_bad_request_gets_a_400_and_the_server_goes_on(quarter):
    before = generate(quarter, random_tokens(50, seed=2))["output_ids"]
    for body in (
        {"input_ids": random_tokens(CONTEXT + 1, seed=3)},
        {"input_ids": [9], "sampling_params": {"max_new_tokens": -1}},
    ):
        with pytest.raises(urllib.error.HTTPError) as failure:
            post(quarter, "/generate", body)
        assert failure.value.code == 400
    assert generate(quarter, random_tokens(50, seed=2))["output_ids"] == before


def test_chat_completions_report_cached_tokens_in_true_tokens(quarter):
    words = " ".join(f"w{t}" for t in random_tokens(900, seed=6))
    for cached in (0, 880):
        answer = post(
            quarter,
            "/v1/chat/completions",
            {
                "model": "m",
                "messages": [{"role": "user", "content": words}],
                "max_tokens": 5,
                "temperature": 0,
            },
        )
        usage = answer["usage"]
        details = usage.get("prompt_tokens_details") or {}
        assert usage["prompt_tokens"] > 900
        assert (details.get("cached_tokens") or 0) >= cached
    assert details["cached_tokens"] < usage["prompt_tokens"]


def test_flush_cache_leaves_a_serving_pool(quarter):
    before = generate(quarter, random_tokens(900, seed=4))["output_ids"]
    # SGLang refuses to flush until it has noticed that the last request is done
    for _ in range(60):
        try:
            with urllib.request.urlopen(quarter.url + "/flush_cache", data=b"", timeout=60):
                break
        except urllib.error.HTTPError as error:
            assert error.code == 400
            time.sleep(0.5)
    else:
        pytest.fail("the idle server never flushed")
    assert generate(quarter, random_tokens(900, seed=4))["output_ids"] == before


def settled(server, admissions: int) -> dict[str, float]:
    """The page once that many requests came in and their pages are free or cached."""
    for _ in range(600):
        page = scrape(server)
        if page["tangram:admissions_total"] >= admissions and not page["tangram:pages_private"]:
            return page
        time.sleep(0.1)
    pytest.fail(f"the pool never settled: {page}")


def test_metrics_count_what_happened(quarter):
    """Two users of one document; the second leaves it in mid window, before any raw tail."""
    before = settled(quarter, 1)
    document, first, second = (random_tokens(n, seed=n) for n in (2_000, 1_500, 100))
    for prompt in (document + first, document + second):
        answer = generate(quarter, prompt)
    cached = answer["meta_info"]["cached_tokens"]
    page = settled(quarter, int(before["tangram:admissions_total"]) + 2)
    more = {k: page[k] - before.get(k, 0) for k in page if k.startswith("tangram:")}

    window, recent, heads = 512, 256, 2 * 2
    assert cached == (2_000 // window - 1) * window
    assert more["tangram:admissions_total"] == 2
    assert more["tangram:prefix_hits_total"] == more["tangram:prefix_branches_total"] == 1
    assert more["tangram:prefix_hit_tokens_total"] == cached
    assert more["tangram:prefix_given_up_tokens_total"] == window
    # the last of the four answered tokens is never stored
    stored = (3_500 + 3, 2_100 + 3)
    windows = [(n - 1 - recent) // window for n in stored]
    windows[1] -= cached // window
    assert more["tangram:windows_sealed_total"] == sum(windows)
    assert more["tangram:entries_kept_total"] == sum(windows) * heads * window // 4
    assert more["tangram:entries_dropped_total"] == sum(windows) * heads * window * 3 // 4
    assert more["tangram:compression_seconds_total"] > 0
    assert more["tangram:finished_requests_total"] == 2
    assert more["tangram:finished_kv_tokens_total"] == sum(stored)

    states = ("free", "private", "cached_locked", "cached_evictable")
    total = page["tangram:pages_total"]
    assert total == sum(page[f"tangram:pages_{state}"] for state in states)
    assert page["tangram:pages_reserved"] == page["tangram:pages_cached_locked"] == 0
    assert page["tangram:pages_cached_evictable"] > 0


def test_every_metric_is_documented_and_no_other_is(quarter):
    text = (Path(__file__).resolve().parents[1] / "docs" / "metrics.md").read_text()
    # those of TANGRAM_DRIFT carry their own condition: test_drift.py
    documented = set(re.findall(r"^\| `(tangram:(?!drift)\w+)`", text, re.MULTILINE))
    exported = {name for name in scrape(quarter) if name.startswith("tangram:")}
    assert exported == documented


def ask(server, path, body):
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.status


def test_a_cpu_server_can_be_profiled_and_has_no_kernels_to_show(whole, tmp_path):
    """SGLang asks an out-of-tree platform for its activity; without an answer the server ended."""
    light = {"activities": ["CPU"], "with_stack": False, "record_shapes": False}
    assert ask(whole, "/start_profile", {"output_dir": str(tmp_path), **light}) == 200
    generate(whole, random_tokens(50, seed=3))
    assert ask(whole, "/stop_profile", {}) == 200
    path = profiled.trace_file(tmp_path)
    with pytest.raises(trace.NoKernels, match=rf"no GPU kernel in {path} \(events: \d+ cpu_op"):
        trace.breakdown(trace.read(path), path)
