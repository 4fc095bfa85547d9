"""Bad input and unsupported flags: one clear error each, before any weights are read."""

import json

import pytest
import torch

from tests.harness import Req, ScenarioFailed, run_scenario
from tests.plans import write_plan
from tests.reference.tiny import save, tiny_llama
from tests.serving import TINY_ENV

pytestmark = pytest.mark.server

# a way to ask for each refused flag, beside what the flag itself needs to get past SGLang's checks
FLAGS = [
    {"prefill_attention_backend": "torch_native"},
    {"decode_attention_backend": "torch_native"},
    {"decode_attention_backend": "tangram", "attention_backend": "torch_native"},
    {"page_size": 16},
    {"enable_mixed_chunk": True},
    {"speculative_algorithm": "NGRAM"},
    {"disaggregation_mode": "prefill"},
    {"enable_hierarchical_cache": True},
    {"hicache_storage_backend": "file"},
    {"radix_eviction_policy": "lfu"},
    {"kv_events_config": '{"publisher": "zmq"}'},
    {"swa_full_tokens_ratio": 0.5},
    {"swa_prefix_tails": 4},
    {"enable_lmcache": True},
    {"enable_streaming_session": True},
    {"enable_session_radix_cache": True},
    {"enable_return_routed_experts": True},
    {"tp_size": 2},
    {"pp_size": 2},
    {"dp_size": 2},
    {"enable_two_batch_overlap": True},
    {"kv_cache_dtype": "fp8_e4m3"},
    {"cuda_graph_backend_prefill": "full"},
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.set_num_threads(1)
    model = tiny_llama(seed=6)
    return model, save(model, tmp_path_factory.mktemp("refusals"))


def refused(folder, env=None, **args) -> str:
    """The message that start-up ends with."""
    with pytest.raises(ScenarioFailed) as failure:
        run_scenario(
            folder,
            [Req([9], 1)],
            server_args={"attention_backend": "tangram", **args},
            env=TINY_ENV if env is None else env,
        )
    assert failure.value.stage == "arguments", failure.value
    assert failure.value.error_type.endswith("TangramError"), failure.value
    return str(failure.value.error)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: "-".join(flag))
def test_an_unsupported_flag_is_refused_by_name(llama, flag):
    _, folder = llama
    name = "--" + next(iter(flag)).replace("_", "-")
    assert name in refused(folder, **flag)


SETTINGS = [
    ({"TANGRAM_RETENTION": "0"}, "TANGRAM_RETENTION=0.0"),
    ({"TANGRAM_RETENTION": "1.5"}, "TANGRAM_RETENTION=1.5"),
    ({"TANGRAM_RETENTION": "half"}, "TANGRAM_RETENTION=half"),
    ({"TANGRAM_WINDOW": "30"}, "no multiple of the page"),
    ({"TANGRAM_RECENT": "30"}, "30 recent tokens are no multiple of the page"),
    ({"TANGRAM_SCORER": "best"}, "unknown scorer 'best'; known: "),
    ({"TANGRAM_GROUPING": "all"}, "TANGRAM_GROUPING=all"),
    ({"TANGRAM_SPLITS": "even"}, "TANGRAM_SPLITS=even: expected map or equal"),
    ({"TANGRAM_RESERVE": "all"}, "TANGRAM_RESERVE=all: expected budget or uncompressed"),
    ({"TANGRAM_RETENTOIN": "0.5"}, "TANGRAM_RETENTOIN is not a setting"),
    ({"TANGRAM_PLAN": "/nowhere/plan.json"}, "/nowhere/plan.json cannot be read"),
    ({"TANGRAM_SINKS": "5"}, "5 sinks exceed the page of 4"),
    ({"TANGRAM_POOL_BYTES": "-1"}, "TANGRAM_POOL_BYTES=-1"),
    ({"TANGRAM_DRIFT": "2"}, "TANGRAM_DRIFT=2.0"),
    ({"TANGRAM_DRIFT": "0.1"}, "pass --enable-metrics"),
    (
        {
            "TANGRAM_RESERVE": "uncompressed",
            "TANGRAM_SCORER": "snapkv",
            "TANGRAM_RETENTION": "0.5",
        },
        "holds no queries, and scorer snapkv reads them; set TANGRAM_SCORER=keydiff",
    ),
]


@pytest.mark.parametrize(("env", "message"), SETTINGS, ids=lambda x: str(x)[:40])
def test_a_bad_setting_is_refused_and_named(llama, env, message):
    _, folder = llama
    assert message in refused(folder, env={**TINY_ENV, **env})


def test_a_plan_of_another_model_is_refused_naming_what_differs(llama, tmp_path):
    _, folder = llama
    other = tiny_llama(seed=6, layers=3)
    save(other, tmp_path / "other")
    path, _ = write_plan(other, tmp_path)
    message = refused(folder, env={**TINY_ENV, "TANGRAM_PLAN": str(path)})
    assert "num_hidden_layers is 3 in the plan and 2 in the model" in message


def test_a_plan_that_is_no_plan_is_refused(llama, tmp_path):
    model, folder = llama
    path, _ = write_plan(model, tmp_path)
    plan = json.loads(path.read_text())
    for change, message in (
        ({"format": "tangram-plan/9"}, "format is 'tangram-plan/9'"),
        ({"extra": 1}, "extra"),
        ({"budgets": [1.5] * 4}, "<= 1.0"),
        ({"budgets": [0.5] * 3, "spread": [0.0] * 3}, "length of budgets"),
        ({"layers": [0, 7]}, "layers is [0, 7]"),
    ):
        path.write_text(json.dumps({**plan, **change}))
        with pytest.raises(ScenarioFailed) as failure:
            run_scenario(
                folder,
                [Req([9], 1)],
                server_args={"attention_backend": "tangram"},
                env={**TINY_ENV, "TANGRAM_PLAN": str(path)},
            )
        assert message in str(failure.value.error)
    path.write_bytes(b"\x00not json")
    assert "is not a plan" in refused(folder, env={**TINY_ENV, "TANGRAM_PLAN": str(path)})


def test_expected_attention_without_statistics_is_refused_with_a_way_out(llama):
    _, folder = llama
    env = {**TINY_ENV, "TANGRAM_SCORER": "expected_attention", "TANGRAM_RETENTION": "0.5"}
    message = refused(folder, env=env)
    assert "there is no plan" in message
    assert "TANGRAM_SCORER=keydiff" in message


def test_a_pool_too_small_for_a_token_is_refused(llama):
    _, folder = llama
    with pytest.raises(ScenarioFailed) as failure:
        run_scenario(
            folder,
            [Req([9], 1)],
            server_args={"attention_backend": "tangram"},
            env={**TINY_ENV, "TANGRAM_POOL_BYTES": "100"},
        )
    assert "100 bytes hold no request" in str(failure.value.error)


def test_a_plan_for_another_rope_is_refused(tmp_path):
    model = tiny_llama(seed=6)
    save(model, tmp_path / "model")
    path, _ = write_plan(model, tmp_path)
    config = tmp_path / "model" / "config.json"
    text = json.loads(config.read_text())
    text["rope_parameters"] = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
    config.write_text(json.dumps(text))
    message = refused(tmp_path / "model", env={**TINY_ENV, "TANGRAM_PLAN": str(path)})
    assert "rope is" in message and "linear" in message
