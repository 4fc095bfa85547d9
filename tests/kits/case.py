"""What a kit's class needs: `base_url`, `model`, `process`, from a server that is there already."""

import unittest
from types import SimpleNamespace

import pytest
import requests


def flush_when_idle(server) -> None:
    """Empties the cache as the kits do, once the scheduler has noticed that all is done."""
    answer = requests.post(server.url + "/flush_cache", params={"timeout": 60}, timeout=90)
    answer.raise_for_status()


def assert_no_page_is_lost(server) -> None:
    """SGLang counts its tokens whenever it is idle and ends the scheduler if one is missing.

    Before the cache is emptied, which would hide it; the second request finds the scheduler alive
    that was idle after the first.
    """
    for _ in range(2):
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
        answer = requests.post(server.url + "/generate", json=body, timeout=120)
        assert answer.status_code == 200, server.log_tail()
    assert server.end is None, server.log_tail()


def lend(cls, server, model):
    """One class on `server`; afterwards it still serves and no page is lost."""
    cls.base_url = server.url
    cls.model = str(model)
    cls.process = SimpleNamespace(poll=lambda: server.end)
    cls.server = server
    yield
    assert_no_page_is_lost(server)


class OnWhole(unittest.TestCase):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, request, whole, tiny_folder):
        yield from lend(request.cls, whole, tiny_folder)


class OnThird(unittest.TestCase):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, request, third, tiny_folder):
        yield from lend(request.cls, third, tiny_folder)
