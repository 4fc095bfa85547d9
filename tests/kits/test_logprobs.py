"""SGLang's log-prob kits. They come with its speculative decoding and ask for none of it."""

import pytest

from tests.kits.case import OnThird, OnWhole
from tests.kits.wheel import SpecLogprobKit, SpecSamplingMaskKit

pytestmark = pytest.mark.server


class Logprobs(SpecLogprobKit, SpecSamplingMaskKit):
    # decode against prefill of the same tokens: rounding in float32, 5e-6 measured
    logprob_match_delta = 1e-3


class TestLogprobsWhole(Logprobs, OnWhole):
    pass


class TestLogprobsThird(Logprobs, OnThird):
    # counts entries of 112 answers, which does not depend on what is kept, in 30 s
    test_logprob_mixed = None
