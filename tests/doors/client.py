"""What a client of the test server asks and what it may expect of the prefix cache."""

import urllib.request

from tests.http_client import REQUEST_TIMEOUT_S, post
from tests.serving import TINY_ENV

PAGE, WINDOW, RECENT = (int(TINY_ENV[f"TANGRAM_{x}"]) for x in ("PAGE", "WINDOW", "RECENT"))
# rounding: a warm turn computes in other chunks than a cold one
LOGPROB_GAP = 1e-4


def flush(server, timeout_s=120) -> None:
    """Empties the cache; SGLang waits so long for an idle scheduler."""
    url = f"{server.url}/flush_cache?timeout={timeout_s}"
    with urllib.request.urlopen(url, data=b"", timeout=REQUEST_TIMEOUT_S):
        pass


def ask(server, ids=None, n=24, *, text=None, session=None, **sampling):
    """One greedy request of ``/generate`` with the log-probabilities of its answer."""
    params = {"temperature": 0, "max_new_tokens": n, "ignore_eos": True, **sampling}
    body = {"input_ids": ids} if text is None else {"text": text}
    if session is not None:
        body["session_params"] = session
    return post(server, "/generate", {**body, "sampling_params": params, "return_logprob": True})


def logprobs(answer) -> list[float]:
    return [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]


def cached(answer) -> int:
    return answer["meta_info"]["cached_tokens"]


def stored(prompt: int, answer: int) -> int:
    """Tokens in the cache after a request: the last token of an answer is never computed."""
    return prompt + answer - 1


def assert_all_but_a_page(found: int, held: int) -> None:
    assert held - PAGE < found <= held


def assert_same(warm, cold) -> None:
    """The same tokens with the same log-probabilities, and the cold one reused nothing."""
    assert cached(cold) == 0
    assert warm["output_ids"] == cold["output_ids"]
    assert_close(logprobs(warm), logprobs(cold))


def assert_close(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected) > 0
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < LOGPROB_GAP
