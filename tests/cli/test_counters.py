"""What a request held is the difference of the server's counters around it."""

import pytest

from tangram_sglang.cli import counters
from tangram_sglang.cli.counters import Counters
from tangram_sglang.cli.server import ServerError

PAGE = """\
# HELP sglang:num_requests_total Number of requests.
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{model_name="m"} 9.0
# HELP tangram:finished_requests_total Finished requests.
# TYPE tangram:finished_requests_total counter
tangram:finished_requests_total{model_name="m",tp_rank="0"} 3.0
# TYPE tangram:finished_kv_tokens_total counter
tangram:finished_kv_tokens_total{model_name="m",tp_rank="0"} 3300.0
# TYPE tangram:finished_kv_entries_total counter
tangram:finished_kv_entries_total{model_name="m",tp_rank="0"} 1.5e+05
tangram:finished_kv_entries_total{model_name="m",tp_rank="1"} 2.5e+05
# TYPE tangram:finished_kv_bytes_total_total counter
tangram:finished_kv_bytes_total_total{model_name="m"} 2.048e+09
"""


def test_each_counter_is_summed_over_its_labels_and_an_absent_one_is_zero():
    assert counters.parse(PAGE) == Counters(
        requests=3, kv_tokens=3300, kv_entries=400_000, kv_bytes=2_048_000_000, kv_bytes_full=0
    )


def test_what_is_written_by_the_prometheus_client_is_read():
    from prometheus_client import CollectorRegistry, Counter, generate_latest

    registry = CollectorRegistry()
    for name, value in (("requests", 2), ("kv_bytes_full", 7_000_000_001)):
        name = f"tangram:finished_{name}_total"
        Counter(name, "help", ["model_name"], registry=registry).labels("m").inc(value)
    seen = counters.parse(generate_latest(registry).decode())
    assert seen == Counters(requests=2, kv_bytes_full=7_000_000_001)


@pytest.fixture
def pages(monkeypatch):
    """Makes `counters.read` see one list entry after the other, the last one for ever."""
    shown = []
    monkeypatch.setattr(counters, "read", lambda url: shown.pop(0) if shown[1:] else shown[0])
    monkeypatch.setattr(counters, "SETTLE_TIMEOUT_S", 0.3)
    return shown


def test_a_counter_that_comes_after_the_answer_is_waited_for(pages):
    pages += [Counters(4, kv_bytes=10), Counters(4, kv_bytes=10), Counters(5, kv_bytes=17)]
    assert counters.wait_for("", Counters(4, kv_bytes=10)) == Counters(1, kv_bytes=7)


def test_a_server_that_counts_nothing_is_an_error_that_names_the_flags(pages):
    pages += [Counters()]
    with pytest.raises(ServerError, match="--attention-backend tangram --enable-metrics"):
        counters.wait_for("", Counters())


def test_a_request_of_someone_else_is_an_error_not_a_wrong_figure(pages):
    pages += [Counters(2)]
    with pytest.raises(ServerError, match="something else uses this server"):
        counters.wait_for("", Counters())
