"""Sessions of `/open_session`, whose turns send only what is new.

The wheel's one kit for them is for streaming sessions, which SGLang ties to its own prefix cache.
"""

import pytest
import requests

from tests.kits.case import assert_no_page_is_lost, flush_when_idle
from tests.reference.tiny import random_tokens

pytestmark = pytest.mark.server

NEW = 40


class Talk:
    """One session on a server; every turn is greedy and has NEW tokens."""

    def __init__(self, server):
        self.url = server.url
        opened = self.post("/open_session", {"capacity_of_str_len": 100_000})
        opened.raise_for_status()
        self.id = opened.json()

    def post(self, path, body):
        return requests.post(self.url + path, json=body, timeout=300)

    def raw(self, ids, **session):
        sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling}
        if session:
            body["session_params"] = {"id": self.id, **session}
        return self.post("/generate", body)

    def turn(self, ids, **session):
        """(output ids, cached tokens, prompt tokens, the request's id)"""
        answer = self.raw(ids, **({"rid": None} | session))
        assert answer.status_code == 200, answer.text
        meta = answer.json()["meta_info"]
        return answer.json()["output_ids"], meta["cached_tokens"], meta["prompt_tokens"], meta["id"]

    def cold(self, server, ids):
        """What the whole history gives without a session and without a cache."""
        flush_when_idle(server)
        answer = self.raw(ids)
        assert answer.json()["meta_info"]["cached_tokens"] == 0
        return answer.json()["output_ids"]

    def close(self):
        return self.post("/close_session", {"session_id": self.id})


def test_a_sessions_turns_branches_and_rewrites_equal_cold_requests(either):
    flush_when_idle(either)
    talk = Talk(either)
    first, second, other, third = (random_tokens(n, seed=n) for n in (300, 110, 90, 70))

    out1, cached, prompt, rid1 = talk.turn(first)
    assert (cached, prompt) == (0, 300)

    history = first + out1 + second
    out2, cached, prompt, rid2 = talk.turn(second, rid=rid1)
    assert (cached, prompt) == (300 + NEW - 1, len(history))

    # a second child of the first turn
    branch = first + out1 + other
    out3, cached, prompt, _ = talk.turn(other, rid=rid1)
    assert (cached, prompt) == (300 + NEW - 1, len(branch))

    # the answer before last is asked for again: the prompt is still there to its end
    dropped = first + third
    out4, cached, prompt, _ = talk.turn(third, rid=rid1, drop_previous_output=True)
    assert (cached, prompt) == (300, len(dropped))

    # cut within the second turn's raw tail, which the cache has to the token
    offset = len(history) - 5
    cut = history[:offset] + third
    out5, cached, prompt, gone = talk.turn(third, rid=rid2, offset=offset)
    assert (cached, prompt) == (offset, len(cut))

    # in place of all that followed the second turn
    out6, cached, prompt, last = talk.turn(third, rid=rid2, replace=True)
    replaced = history + out2 + third
    assert (cached, prompt) == (len(history) + NEW - 1, len(replaced))

    for ids, out in (
        (first, out1),
        (history, out2),
        (branch, out3),
        (dropped, out4),
        (cut, out5),
        (replaced, out6),
    ):
        assert out == talk.cold(either, ids)

    # a turn that was replaced is gone, and so is the session once it is closed; `replace` without a
    # turn's id is not tried: SGLang 0.5.23 ends its scheduler on it, whatever the backend
    assert talk.raw(third, rid=gone).status_code == 400
    assert talk.raw(third, rid=last).status_code == 200
    assert talk.close().status_code == 200
    assert talk.raw(third, rid=last).status_code == 400
    assert_no_page_is_lost(either)


def test_a_session_goes_on_after_its_pages_are_evicted(third):
    flush_when_idle(third)
    talk = Talk(third)
    first, second = random_tokens(300, seed=1), random_tokens(60, seed=2)
    out1, _, _, rid = talk.turn(first)
    flush_when_idle(third)
    out2, cached, prompt, _ = talk.turn(second, rid=rid)
    assert (cached, prompt) == (0, 300 + NEW + 60)
    assert out2 == talk.cold(third, first + out1 + second)
    talk.close()


def test_streaming_sessions_are_refused_by_name(whole):
    """SGLang refuses them at run time and names its flag, which we refuse (tests/test_refusals.py)."""
    answer = Talk(whole).post("/open_session", {"capacity_of_str_len": 9, "streaming": True})
    assert answer.status_code == 400
    assert "--enable-streaming-session" in answer.text
