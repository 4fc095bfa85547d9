"""What finished requests held at their end, from the server's Prometheus page.

The backend exports running totals, so a request's own figures are the difference around it; that
needs requests one at a time.
"""

import time
import urllib.request
from dataclasses import astuple, dataclass

from tangram_sglang.cli.server import ServerError

# a counter appears on the page a moment after its request was answered
SETTLE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals over finished requests, each as it stood when it finished.

    Attributes:
        requests: how many finished.
        kv_tokens: true tokens.
        kv_entries: K/V pairs held, summed over layers and heads.
        kv_bytes: bytes of the pages they held.
        kv_bytes_full: bytes an uncompressed cache would hold for the same tokens.
    """

    requests: int = 0
    kv_tokens: int = 0
    kv_entries: int = 0
    kv_bytes: int = 0
    kv_bytes_full: int = 0

    def __add__(self, more: "Counters") -> "Counters":
        return Counters(*(a + b for a, b in zip(astuple(self), astuple(more), strict=True)))

    def __sub__(self, before: "Counters") -> "Counters":
        return Counters(*(a - b for a, b in zip(astuple(self), astuple(before), strict=True)))


def parse(page: str) -> Counters:
    """Sums each counter over its label sets; one that is not on the page has counted nothing."""
    from prometheus_client.parser import text_string_to_metric_families

    totals = dict.fromkeys(Counters.__dataclass_fields__, 0)
    # SGLang's multiprocess mode may append the suffix once more
    names = {f"tangram:finished_{field}{'_total' * n}": field for field in totals for n in (1, 2)}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if field := names.get(sample.name):
                totals[field] += int(sample.value)
    return Counters(**totals)


def read(url: str) -> Counters:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return parse(answer.read().decode())


def wait_for(url: str, before: Counters, requests: int = 1) -> Counters:
    """What `requests` requests, answered since `before` was read, held together."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while (seen := read(url) - before).requests < requests:
        if time.monotonic() > deadline:
            raise ServerError(
                f"{url}/metrics counts {seen.requests} finished requests, expected {requests}: does "
                "the server run with --attention-backend tangram --enable-metrics?"
            )
        time.sleep(0.1)
    if seen.requests > requests:
        raise ServerError(
            f"{url}/metrics counts {seen.requests} finished requests, expected {requests}: "
            "something else uses this server, and its figures cannot be told apart"
        )
    return seen
