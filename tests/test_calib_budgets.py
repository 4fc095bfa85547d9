"""Shares of a window, and the budgets that follow from samples of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tangram_sglang.calib.budgets import average, share_budgets
from tangram_sglang.calib.shares import window_shares

LAYERS = [2, 1, 3]
SCORES = arrays(np.float32, (6, 20), elements=st.floats(-9, 9, width=32))


@given(SCORES, st.floats(0.0, 1.0))
def test_every_scope_hands_out_exactly_the_tokens_asked_for(scores, rho):
    shares = window_shares(scores, [rho], LAYERS)
    assert shares["global"].sum() * 20 == pytest.approx(round(rho * 120))
    for first, end in ((0, 2), (2, 3), (3, 6)):
        layer = shares["layer"][0, first:end]
        assert layer.sum() * 20 == pytest.approx(round(rho * 20 * (end - first)))


@given(SCORES)
def test_a_head_never_gets_less_at_a_higher_retention(scores):
    for shares in window_shares(scores, [0.1, 0.4, 0.7], LAYERS).values():
        assert (np.diff(shares, axis=0) >= 0).all()


def test_the_global_scope_compares_heads_and_the_layer_scope_does_not():
    scores = np.array([[5, 6, 7, 8], [1, 2, 3, 4]], dtype=np.float32)
    shares = window_shares(scores, [0.5], [1, 1])
    assert shares["global"].tolist() == [[1.0, 0.0]]
    assert shares["layer"].tolist() == [[0.5, 0.5]]


def test_ties_go_to_the_head_that_comes_first():
    shares = window_shares(np.zeros((2, 4), dtype=np.float32), [0.5], [2])
    assert shares["global"].tolist() == [[1.0, 0.0]]


def test_budgets_are_mean_plus_alpha_spreads_up_to_one():
    shares = np.array([[0.2, 0.9], [0.4, 1.0], [0.3, 0.8]])
    found = share_budgets(shares, alpha=2.0)
    assert found.budgets == pytest.approx([0.3 + 2 * 0.1, 1.0])
    assert found.spread == pytest.approx([0.1, 0.1])
    assert found.samples == 3


def test_several_profiles_are_averaged_after_their_own_spread():
    calm, noisy = np.full((4, 1), 0.2), np.array([[0.4], [0.6]])
    found = average([share_budgets(shares, alpha=1.0) for shares in (calm, noisy)])
    assert found.budgets == pytest.approx([(0.2 + 0.5 + 0.2 / np.sqrt(2)) / 2])
    assert found.samples == 2


@given(arrays(np.float64, (5, 3), elements=st.floats(0, 1)), st.floats(0, 3), st.floats(0, 3))
def test_budgets_are_shares_and_grow_with_alpha(shares, a, b):
    low, high = (share_budgets(shares, alpha).budgets for alpha in sorted((a, b)))
    assert ((low >= 0) & (low <= high + 1e-12) & (high <= 1)).all()


def test_one_sample_has_no_spread():
    assert share_budgets(np.array([[0.25]]), alpha=2.0).budgets.tolist() == [0.25]
