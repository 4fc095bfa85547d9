"""Scorers that read queries or gate scores, on a GPU: graphs against eager steps, and rounding."""

import pytest
import torch

from tangram_sglang.score import Window, create_scorer
from tests.gpu.test_serving import ENV, TIE, assert_same_but_ties, llama, on_gpu, requests
from tests.gpu.watch import forbid_waits
from tests.harness import Req
from tests.reference.tiny import random_gates, random_tokens
from tests.test_gates import write_gates

__all__ = ["llama"]
pytestmark = pytest.mark.gpu


@pytest.mark.server
@pytest.mark.parametrize("scorer", ["snapkv", "fastkvzip"])
def test_graphs_equal_eager_steps(llama, tmp_path, scorer):
    """Prompts and decode steps in graphs, none of which waits for the device; a turn that goes on.

    Graphs are padded, and other sizes round differently, which may change what a window keeps.
    """
    model, folder = llama
    env = {**ENV, "TANGRAM_SCORER": scorer}
    if scorer == "fastkvzip":
        env["TANGRAM_GATES"] = write_gates(model, tmp_path / "g", random_gates(model, seed=1))
    more = {"logprobs": True, "top_logprobs": 2}
    turn = Req(random_tokens(25, seed=9), 40, rid="t-", after="r0-", continues=True, **more)
    reqs = [*requests(), turn]
    run = {"env": env, "chunked_prefill_size": 128}
    eager = on_gpu(folder, reqs, cuda_graph_backend_decode="disabled", **run)
    graphs = on_gpu(
        folder,
        reqs,
        on_step=forbid_waits,
        cuda_graph_max_bs_decode=8,
        disable_prefill_cuda_graph=False,
        **run,
    )
    assert graphs["t-"].cached_tokens > 64
    assert graphs.collected["decode_steps"] >= 60
    assert_same_but_ties(graphs, eager, tie=5 * TIE)


def test_gate_scores_are_rounded_as_on_a_cpu():
    """Ties of equal tokens depend on it."""
    gate = torch.rand(2, 4096, generator=torch.Generator().manual_seed(0))
    gate = gate.ldexp(-(torch.arange(4096) % 100))
    scorer = create_scorer("fastkvzip")

    def scores(device):
        return scorer.score(Window(gate, gate, 0, gate, 0, gate=gate.to(device))).cpu()

    assert torch.equal(scores("cuda"), scores("cpu"))
