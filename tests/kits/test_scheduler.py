"""SGLang's kits for requests that are aborted, paused, concurrent or long, at both retentions."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from sglang.test.kits import basic_scheduler_stress_kit as stress_kit

from tests.kits.case import OnThird, OnWhole, assert_no_page_is_lost, flush_when_idle
from tests.kits.wheel import (
    AbortAllMixin,
    BasicAPIContractMixin,
    BasicSchedulerStressMixin,
    PauseResumeInPlaceMixin,
)

pytestmark = pytest.mark.server


class Scheduling(
    AbortAllMixin, PauseResumeInPlaceMixin, BasicAPIContractMixin, BasicSchedulerStressMixin
):
    abort_all_sleep = 1
    pause_num_requests = 8
    pause_max_new_tokens = 200
    pause_duration = 1
    pause_ignore_eos = True
    # both want a model that knows capitals: test_real_model.py has the first
    test_streaming_response = None
    test_concurrent_requests = None


class TestSchedulingWhole(Scheduling, OnWhole):
    pass


class TestSchedulingThird(Scheduling, OnThird):
    pass


def test_concurrent_requests_get_the_answers_they_get_alone(either):
    """The kit's claim, no mixing of requests with a common prefix, for a model that knows nothing."""
    # longer than a window, so that the common prefix is sealed
    prefix = stress_kit._CONCURRENT_PREFIX * 12
    prompts = [prefix + question for question, _ in stress_kit._CONCURRENT_QA]

    def answer(prompt):
        sampling = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
        body = {"text": prompt, "sampling_params": sampling}
        answer = requests.post(either.url + "/generate", json=body, timeout=300)
        answer.raise_for_status()
        return answer.json()["output_ids"]

    alone = []
    for prompt in prompts:
        flush_when_idle(either)
        alone.append(answer(prompt))
    assert len({tuple(ids) for ids in alone}) > 1
    flush_when_idle(either)
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(answer, prompts)) == alone


def test_an_abort_of_all_returns_every_page(either):
    """Once more with prompts of several windows, some still waiting when all are aborted."""

    def generate(i):
        sampling = {"temperature": 0, "max_new_tokens": 10_000, "ignore_eos": True}
        body = {"input_ids": [i + 5] * 500, "sampling_params": sampling}
        return requests.post(either.url + "/generate", json=body, timeout=300).json()

    with ThreadPoolExecutor(40) as pool:
        answers = [pool.submit(generate, i) for i in range(40)]
        # an abort reaches those that have arrived: again until none is left
        while not all(answer.done() for answer in answers):
            requests.post(either.url + "/abort_request", json={"abort_all": True}, timeout=60)
            time.sleep(0.3)
    reasons = [answer.result()["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert reasons == ["abort"] * 40
    assert_no_page_is_lost(either)
