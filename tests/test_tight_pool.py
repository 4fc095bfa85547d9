"""A pool that just holds a request, most of which the prefix cache holds already."""

import pytest
import torch

from tests.harness import Req
from tests.reference.tiny import random_tokens, save, tiny_llama
from tests.serving import TINY_ENV, serve

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return save(
        tiny_llama(seed=9, layers=2, q_heads=6, kv_heads=3), tmp_path_factory.mktemp("tight")
    )


@pytest.mark.parametrize("tokens", [128, 150, 176])
def test_a_request_that_fits_is_served_whatever_the_cache_holds_of_it(folder, tokens):
    """It starts from a cached raw tail, seals it away in decode and needs those very pages."""
    env = {**TINY_ENV, "TANGRAM_RETENTION": "0.3"}
    prompt = random_tokens(90, seed=1)
    requests = [
        Req(prompt, 30, rid="first"),
        Req(prompt + random_tokens(20, seed=7), 12, rid="second", after="first"),
        Req(prompt[:88] + random_tokens(2, seed=8), 36, rid="third", after="second"),
    ]
    for overlap in (False, True):
        result = serve(
            folder,
            requests,
            env=env,
            overlap=overlap,
            max_total_tokens=tokens,
            chunked_prefill_size=64,
        )
        for request in requests:
            assert result[request.rid].finish_reason["type"] == "length"
            assert len(result[request.rid].output_ids) == request.max_new_tokens
