"""What calibration measures on a GPU is what it measures on a CPU."""

import numpy as np
import pytest
import torch

from tangram_sglang.calib.observations import Request, read_queries, write_request
from tangram_sglang.calib.observer import Observer
from tangram_sglang.calib.query_stats import save_query_stats
from tests.test_calib_error import FREQ, HQ, RULE, SHAPE, D, H, R, W

pytestmark = pytest.mark.gpu
EARLY = ["keydiff", "snapkv", "tova", "expected_attention_local", "knorm"]
TOKENS = 3 * W + R
# a score that rounds the other way moves an entry from one head to another
ENTRIES = 1


def show(observer, tensors, device):
    """One prompt in two passes, all its windows in each layer."""
    q, k, v = (x.to(device) for x in tensors)
    positions = torch.arange(TOKENS, device=device)
    for part in (slice(0, 70), slice(70, TOKENS)):
        ends = [e for e in range(W, TOKENS + 1, W) if part.start < e <= part.stop]
        for layer in range(2):
            observer.queries(layer, q[part], positions[part])
            observer.context(layer, k[part], v[part])
            for end in ends:
                window = slice(end - W, end)
                kv = k[window].transpose(0, 1), v[window].transpose(0, 1)
                observer.window(layer, end - W, *kv)


def measure(folder, tensors, projection, device) -> dict[str, np.ndarray]:
    """Both stages of a calibration, by file and name."""
    found = {}
    requests = {"first": Request(profiles=EARLY)}
    for stage in ("first", "second"):
        out = folder / stage
        out.mkdir(parents=True)
        if stage == "second":
            stats = folder / "stats.safetensors"
            sha256 = save_query_stats(read_queries(folder / "first"), 4, stats)
            requests[stage] = Request(
                profiles=["expected_attention"],
                moments=False,
                stats_file=str(stats),
                stats_hash=sha256,
                error="expected_attention",
            )
        write_request(out, requests[stage])
        projections = {i: projection.to(device) * (i + 1) for i in range(2)}
        observer = Observer(SHAPE, FREQ, RULE, out, None, lambda p=projections: p, device)
        show(observer, tensors, device)
        for path in sorted(out.glob("*-*.npz")):
            with np.load(path) as file:
                found |= {f"{stage}/{path.name}/{name}": file[name] for name in file.files}
    return found


def test_a_gpu_measures_what_a_cpu_does(tmp_path):
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(TOKENS, n, D, generator=generator) for n in (HQ, H, H)]
    projection = torch.randn(40, HQ * D, generator=generator)
    expected = measure(tmp_path / "cpu", tensors, projection, "cpu")
    assert {x.split("/")[2] for x in expected if "error-" in x} >= {"curves", "power"}
    found = measure(tmp_path / "gpu", tensors, projection, "cuda")
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        atol = 1e-4 if "error-" in name else ENTRIES / W
        np.testing.assert_allclose(found[name], want, rtol=1e-3, atol=atol, err_msg=name)
