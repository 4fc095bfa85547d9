"""Requests to a server on this machine, past any proxy."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

TIMEOUT_S = 900


def get(url: str, timeout: float = TIMEOUT_S) -> str:
    return _read(urllib.request.Request(url), timeout)


def post(url: str, body: Mapping[str, Any], timeout: float = TIMEOUT_S) -> Any:
    """The JSON that comes back; an error carries the server's message."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return json.loads(_read(request, timeout))


def _read(request: urllib.request.Request, timeout: float) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:2000]
        raise RuntimeError(f"{request.full_url}: {error.code} {said}") from error
