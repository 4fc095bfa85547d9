"""An installed plugin that is not selected changes nothing."""

import pytest
import torch

from tests.harness import Req, ScenarioFailed, run_scenario
from tests.reference.tiny import random_tokens, save, tiny_gpt_oss, tiny_llama

pytestmark = pytest.mark.server


def classes(scheduler):
    runner = scheduler.tp_worker.model_runner
    parts = [
        scheduler.tree_cache,
        scheduler.token_to_kv_pool_allocator,
        scheduler.req_to_token_pool,
        runner.token_to_kv_pool,
        runner.attn_backend,
        runner.kv_cache_configurator,
    ]
    sizes = (
        scheduler.max_total_num_tokens,
        scheduler.max_req_len,
        scheduler.req_to_token_pool.size,
    )
    return [f"{type(x).__module__}.{type(x).__qualname__}" for x in parts], sizes


def test_a_stock_server_is_the_same_with_and_without_us(tmp_path):
    torch.set_num_threads(1)
    folder = save(tiny_llama(seed=8), tmp_path / "model")
    requests = [
        Req(random_tokens(n, seed=n), 20, rid=f"r{n}-", logprobs=True) for n in (3, 90, 300)
    ]
    found = []
    for plugins in ("tangram,tangram_cpu", "tangram_cpu"):
        result = run_scenario(
            folder,
            requests,
            server_args={"attention_backend": "torch_native", "chunked_prefill_size": 64},
            env={"SGLANG_PLUGINS": plugins},
            collect=classes,
        )
        found.append(
            (result.tokens, [o.logprobs for o in result.outputs.values()], result.collected)
        )
    assert found[0] == found[1]
    assert not any("tangram" in name for name in found[0][2][0])


def test_what_sglang_refuses_to_other_backends_it_still_refuses(tmp_path):
    """We answer for tangram where SGLang asks for a backend with attention sinks."""
    folder = save(tiny_gpt_oss(), tmp_path / "model")
    with pytest.raises(ScenarioFailed, match="GptOssForCausalLM requires one of") as failure:
        run_scenario(folder, [Req([9], 1)], server_args={"attention_backend": "torch_native"})
    assert failure.value.stage == "arguments"
