"""Statistics of queries: what is stored of a covariance, and the way to a plan and back."""

import numpy as np
import pytest
import torch

from tangram_sglang.calib.observations import Queries
from tangram_sglang.calib.query_stats import low_rank, query_statistics, save_query_stats
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.stats import load_query_stats

L, HQ, H, D, N = 2, 6, 3, 8, 500
SHAPE = ModelShape(tuple(LayerShape(i, HQ, H, D, None, 0.35) for i in range(L)))


@pytest.fixture
def samples():
    generator = torch.Generator().manual_seed(3)
    mix = torch.randn(L, HQ, D, D, generator=generator, dtype=torch.float64)
    base = torch.randn(L, HQ, N, D, generator=generator, dtype=torch.float64)
    return base @ mix + torch.arange(D)


@pytest.fixture
def queries(samples):
    inv_freq = np.array([[1.0, 0.1, 0.01]] * L)
    square = samples.transpose(-1, -2) @ samples
    return Queries(SHAPE, inv_freq, N, samples.sum(dim=-2).numpy(), square.numpy())


def test_full_rank_is_the_covariance_of_the_samples(samples, queries):
    found = query_statistics(queries, rank=D)
    covariance = found["factor"] @ found["factor"].mT + torch.diag_embed(found["diagonal"])
    for layer in range(L):
        for head in range(HQ):
            own = samples[layer, head]
            place = (layer * H + head // 2, head % 2)
            torch.testing.assert_close(found["mean"][place], own.mean(dim=0))
            torch.testing.assert_close(covariance[place], torch.cov(own.mT, correction=0))


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_any_rank_keeps_the_variance_of_every_dimension(queries, rank):
    whole = query_statistics(queries, rank=D)
    found = query_statistics(queries, rank=rank)
    assert found["factor"].shape[-1] == rank

    def variances(x):
        return x["factor"].square().sum(-1) + x["diagonal"]

    # a diagonal is never below zero, even where the factor alone already says more than there is
    free = found["diagonal"] > 0
    assert free.double().mean() > 0.5
    torch.testing.assert_close(variances(found)[free], variances(whole)[free])
    assert (variances(found) >= variances(whole) - 1e-9).all()


def test_a_factor_and_a_diagonal_are_told_apart():
    factor = torch.linspace(1, 2, 12, dtype=torch.float64).reshape(6, 2).cos()
    diagonal = torch.linspace(0.1, 0.6, 6, dtype=torch.float64)
    covariance = factor @ factor.T + diagonal.diag()
    exact = low_rank(covariance, 6)
    near = low_rank(covariance, 2)
    for found, tolerance in ((exact, 1e-9), (near, 0.05)):
        rebuilt = found[0] @ found[0].T + found[1].diag()
        assert (rebuilt - covariance).norm() <= tolerance * covariance.norm()


@pytest.mark.parametrize("rank", [0, 4])
def test_a_saved_file_loads_as_a_plan_reads_it(queries, tmp_path, rank):
    path = tmp_path / "stats.safetensors"
    sha256 = save_query_stats(queries, rank, path)
    found = load_query_stats(path, sha256, SHAPE)
    want = query_statistics(queries, rank)
    assert found.factor.shape == (L * H, HQ // H, D, rank)
    assert found.inv_freq.dtype == torch.float64
    assert found.inv_freq.tolist() == [[1.0, 0.1, 0.01]] * (L * H)
    assert found.scaling.tolist() == pytest.approx([0.35] * (L * H))
    torch.testing.assert_close(found.mean, want["mean"].float(), rtol=1e-3, atol=1e-3)


def test_values_beyond_half_precision_are_stored_in_bfloat16(queries, tmp_path):
    queries.square[:] *= 1e6
    path = tmp_path / "stats.safetensors"
    found = load_query_stats(path, save_query_stats(queries, 0, path), SHAPE)
    assert found.diagonal.isfinite().all()
    assert found.diagonal.max() > 65504


def test_statistics_need_queries():
    none = Queries(SHAPE, np.ones((L, 3)), 0, np.zeros((L, HQ, D)), np.zeros((L, HQ, D, D)))
    with pytest.raises(TangramError, match="0 queries were observed"):
        query_statistics(none, rank=2)
