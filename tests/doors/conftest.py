"""One server for all tests of this folder: three groups of heads, retention 0.3, small windows."""

import pytest
import torch

from tangram_sglang.cli.server import Server, cpu_arguments, cpu_environment
from tests.plans import write_plan
from tests.reference.tiny import FIRST_WORD, save, tiny_llama
from tests.serving import TINY_ENV

CONTEXT = 16_384
# 2,400 tokens, uncompressed: 12 columns of 9 heads x (K and V) x 16 floats. Small, so that a few
# abandoned requests fill it
POOL_BYTES = 2_400 * 12 * 2 * 16 * 4


@pytest.fixture(scope="package")
def server(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("doors")
    model = tiny_llama(seed=11, layers=3, q_heads=6, kv_heads=3, max_positions=CONTEXT)
    # greedy text holds no special token, which a client would not see
    model.lm_head.weight.data[:FIRST_WORD] = 0
    save(model, folder / "model")
    plan, _ = write_plan(model, folder, retention=0.3)
    settings = {
        **TINY_ENV,
        "TANGRAM_PLAN": str(plan),
        "TANGRAM_RETENTION": "0.3",
        "TANGRAM_POOL_BYTES": str(POOL_BYTES),
    }
    arguments = cpu_arguments(folder / "model", "tangram")
    arguments[arguments.index("--max-total-tokens") + 1] = "1000000"
    arguments += ["--chunked-prefill-size", "128", "--max-running-requests", "16"]
    arguments += ["--decode-log-interval", "1", "--sleep-on-idle"]
    with Server(arguments, cpu_environment(settings), folder / "log") as running:
        running.wait_until_ready()
        yield running
