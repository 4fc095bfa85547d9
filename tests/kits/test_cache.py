"""SGLang's cache kits: hits to the token, and the same log-probs with hits as without.

The bounds are on the kits' estimate of the KL divergence between the log-probs of what was generated
from cached pages and those of the same tokens in one cold prefill. A wrong kept set, or a hit that is
not exact, is far above both: see `test_the_bounds_would_notice_other_kept_tokens`.
"""

import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.kits.case import OnThird, OnWhole, assert_no_page_is_lost, flush_when_idle
from tests.kits.wheel import (
    KLDivergenceMixin,
    UnifiedRadixTreeTestMixin,
    cache_hit_kit,
    default_decode_cache_assert,
    kl_test_utils,
    radix_cache_server_kit,
)

pytestmark = pytest.mark.server

# float32 rounding; measured 1e-12
KL_WHOLE = 1e-8
# the same, and a token that scores within rounding of another may take its place
KL_THIRD = 1e-5
TEXT = (Path(__file__).parents[2] / "calib" / "corpus" / "persuasion.txt").read_text()
# the kit's tree of 400 prompts takes more than a minute here
NODES = 40


@pytest.fixture(scope="module")
def prompts(tiny_folder):
    """48 parts of a text, as many as the kits ask for; of 600 to 647 tokens, starting apart."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(tiny_folder)(TEXT).input_ids
    return [ids[40 * i : 41 * i + 600] for i in range(48)]


class MultiTurn(UnifiedRadixTreeTestMixin):
    num_groups = 2
    branches_per_group = 2
    prefix_len = 300
    max_new_tokens = 32
    decode_cache_assert = staticmethod(default_decode_cache_assert)
    # downloads a data set, and asks for a model that can do sums
    test_gsm8k = None

    @pytest.fixture(autouse=True)
    def _prompts(self, prompts):
        self.input_ids = prompts


class TestMultiTurnWhole(MultiTurn, OnWhole):
    kl_threshold = KL_WHOLE


class TestMultiTurnThird(MultiTurn, OnThird):
    kl_threshold = KL_THIRD


class Divergence(KLDivergenceMixin):
    kl_div_max_samples = 4
    kl_div_prefill_max_new_tokens = 64
    kl_div_decode_max_new_tokens = 64

    @pytest.fixture(autouse=True)
    def _local_prompts(self, prompts, tmp_path, monkeypatch):
        """The kit reads its prompts from its own cache before it would download them."""
        name = str(self.model).replace("/", "_")
        tokens, samples = kl_test_utils.DEFAULT_PROMPT_TOKENS, kl_test_utils.DEFAULT_NUM_SAMPLES
        (tmp_path / f"input_ids_{name}_{tokens}_{samples}.json").write_text(json.dumps(prompts))
        monkeypatch.setattr(kl_test_utils, "CACHE_DIR", str(tmp_path))


class TestDivergenceWhole(Divergence, OnWhole):
    kl_div_thres = KL_WHOLE


class TestDivergenceThird(Divergence, OnThird):
    kl_div_thres = KL_THIRD


def test_the_bounds_would_notice_other_kept_tokens(whole, third, prompts):
    """The two retentions give the same tokens log-probs that are much further apart."""
    logprobs = []
    for server in (whole, third):
        flush_when_idle(server)
        answers = kl_test_utils._generate(
            server.url, prompts[:4], 0, return_logprob=True, logprob_start_len=300
        )
        logprobs.append(
            np.array(
                [[x[0] for x in a["meta_info"]["input_token_logprobs"][1:300]] for a in answers]
            )
        )
    ratio = logprobs[0] - logprobs[1]
    divergence = float((np.exp(ratio) - 1 - ratio).mean())
    assert divergence > 100 * KL_THIRD


def test_a_conversation_hits_all_but_its_last_token(either, tiny_folder, tmp_path):
    texts = [TEXT[i : i + 1500] for i in range(0, 12_000, 1500)]
    dataset = tmp_path / "conversations.json"
    dataset.write_text(
        json.dumps([{"conversations": [{"value": text}, {"value": "yes"}]} for text in texts])
    )
    found = cache_hit_kit.run_multiturn_cache_hit_test(
        either.url, str(tiny_folder), num_clients=4, num_rounds=3, dataset_path=str(dataset)
    )
    assert found["rounds"]["round_0"]["total_cached_tokens"] == 0
    # all of the turn before, which is 288 of 544 and 576 of 832 tokens
    assert found["rounds"]["round_1"]["total_cached_tokens"] == 4 * 287
    assert found["rounds"]["round_2"]["total_cached_tokens"] == 4 * 575


def test_a_random_tree_of_prompts_is_answered(either, monkeypatch):
    generate = partial(radix_cache_server_kit.gen_radix_tree, num_nodes=NODES)
    monkeypatch.setattr(radix_cache_server_kit, "gen_radix_tree", generate)
    random.seed(0)
    radix_cache_server_kit.run_radix_attention_test(either.url)
    assert_no_page_is_lost(either)
