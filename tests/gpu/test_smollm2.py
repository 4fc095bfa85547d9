"""SmolLM2 in bfloat16 on a GPU keeps what the float32 reference on the CPU keeps, ties aside."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tangram_sglang.plan.file import load_plan
from tangram_sglang.plan.stats import load_query_stats
from tests.gpu.watch import collect, watch
from tests.harness import Req
from tests.reference.layout import layout_for, model_shape
from tests.reference.run import CompressedRun
from tests.serving import serve
from tests.test_smollm2 import PLANS

# The same model in bfloat16 on a CPU differs from float32 in 0.9 % of the positions, which lie up to
# 3.9 times the rounding noise of their window's scores (root mean square) apart.
MOST, WIDEST = 0.02, 8.0

pytestmark = [pytest.mark.gpu, pytest.mark.server]


@torch.no_grad()
def test_kept_positions_equal_the_cpu_reference_but_for_rounding(smollm2):
    """Three windows, the last of which completes while decoding."""
    path = PLANS / "smollm2-135m-instruct-rho0.3.json"
    plan = load_plan(path)
    text = (PLANS.parents[1] / "LICENSE").read_text()
    prompt = AutoTokenizer.from_pretrained(smollm2)(text).input_ids[10:1710]
    found = serve(
        smollm2,
        [Req(prompt, 96, rid="long")],
        env={"TANGRAM_PLAN": str(path)},
        on_step=watch,
        collect=collect,
        gpu=True,
        chunked_prefill_size=257,
    )
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    shape = model_shape(model)
    stats = load_query_stats(
        path.parent / plan.selection.stats_file, plan.selection.stats_hash, shape
    )
    layout = layout_for(model, retention=plan.calibration.retention, budgets=plan.budgets)
    reference = CompressedRun(model, layout, plan.selection.scorer, stats)
    reference.extend(prompt + found["long"].output_ids)
    kept, scores = found.collected["kept"]["long"], found.collected["scores"]["long"]
    assert len(kept) == 90 * 3
    total = differing = 0
    worst = 0.0
    for key, positions in kept.items():
        expected, exact = set(reference.kept[key]), reference.scores[key].double()
        assert len(positions) == len(expected)
        total += len(expected)
        swapped = expected ^ set(positions)
        differing += len(swapped) // 2
        noise = (torch.from_numpy(scores[key]).double() - exact).square().mean().sqrt()
        if swapped:
            values = exact[[p - key[2] * layout.rule.window for p in swapped]]
            worst = max(worst, float((values.max() - values.min()) / noise))
    print(
        f"{differing} of {total} positions differ; widest gap {worst:.1f} times the rounding noise"
    )
    assert differing < MOST * total
    assert worst < WIDEST
