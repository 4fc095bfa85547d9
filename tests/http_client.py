"""Requests to a real server, and its Prometheus page: standard library only."""

import json
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

REQUEST_TIMEOUT_S = 600


def post(server, path, body):
    """The JSON that ``path`` answers; HTTPError for any other status than 2xx."""
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
        return json.loads(answer.read() or "null")


def generate(server, ids, n=4, **sampling):
    params = {"temperature": 0, "max_new_tokens": n, "ignore_eos": True, **sampling}
    return post(server, "/generate", {"input_ids": ids, "sampling_params": params})


def scrape(server) -> dict[str, float]:
    """Samples of /metrics by name; of several, the largest."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as page:
        families = text_string_to_metric_families(page.read().decode())
    return dict(sorted((s.name, s.value) for f in families for s in f.samples))


def metric(server, name) -> float:
    # a gauge is not on the page before its first value
    return scrape(server).get(name, 0.0)
