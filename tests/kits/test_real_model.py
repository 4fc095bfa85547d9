"""Kits that need a model which answers, and those of SGLang's time-outs, on SmolLM2-135M-Instruct.

One server for both: time-outs are set by the environment, and need answers that last a while.
"""

import time

import openai
import pytest
import requests

from tests.kits.case import OnWhole, lend
from tests.kits.conftest import kit_server
from tests.kits.wheel import (
    BasicDecodeCorrectnessMixin,
    BasicSchedulerStressMixin,
    JSONModeMixin,
    RunningTimeoutTwoWaveMixin,
    WaitingTimeoutMixin,
)

pytestmark = pytest.mark.server

RUNNING_AT_ONCE = 4
WAITING_S = 1.0
RUNNING_S = 16.0


@pytest.fixture(scope="module")
def real(smollm2, tmp_path_factory):
    settings = {
        "SGLANG_REQ_WAITING_TIMEOUT": str(WAITING_S),
        "SGLANG_REQ_RUNNING_TIMEOUT": str(RUNNING_S),
        "TANGRAM_RETENTION": "1.0",
    }
    log = tmp_path_factory.mktemp("real") / "log"
    limit = ("--max-running-requests", str(RUNNING_AT_ONCE))
    with kit_server(smollm2, log, settings, *limit, tokens=20_000) as server:
        server.wait_until_ready()
        yield server


class OnReal(OnWhole):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, request, real, smollm2):
        yield from lend(request.cls, real, smollm2)


class TestAnswers(BasicDecodeCorrectnessMixin, BasicSchedulerStressMixin, OnReal):
    # SmolLM2-135M does not know the answers
    test_basic_math = None
    test_concurrent_requests = None
    # in test_scheduler.py: 8,000 tokens take a minute here
    test_long_prompt = None


class TestJSONMode(JSONModeMixin, OnReal):
    @property
    def client(self):
        return openai.Client(api_key="none", base_url=self.base_url + "/v1")


class TestTimeouts(WaitingTimeoutMixin, RunningTimeoutTwoWaveMixin, OnReal):
    # one more than run at once, so that one waits
    waiting_timeout_num_requests = RUNNING_AT_ONCE + 1
    running_timeout_num_wave1 = 2
    running_timeout_num_wave2 = 2
    # ten minutes' worth, so that only the time-out ends them; the model's context is 8,192
    running_timeout_max_new_tokens = 8_000

    def setUp(self):
        """Answers that outlast the time to wait, and not the time to run, at this machine's pace."""
        tokens = 10
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"text": ["Today is "] * RUNNING_AT_ONCE, "sampling_params": sampling}
        start = time.monotonic()
        requests.post(self.base_url + "/generate", json=body, timeout=60).raise_for_status()
        pace = (time.monotonic() - start) / tokens
        self.waiting_timeout_max_new_tokens = round((WAITING_S * RUNNING_S) ** 0.5 / pace)

        self.start = time.monotonic()

    def tearDown(self):
        """A request after the time-outs is served. The first kit counts its 503s, the second not."""
        if "running" in self.id():
            assert time.monotonic() - self.start > RUNNING_S
        body = {"text": "Water boils at", "sampling_params": {"max_new_tokens": 2}}
        assert requests.post(self.base_url + "/generate", json=body, timeout=60).status_code == 200
