"""Budgets from error curves: exact on convex ones, never past the mean, and each head's least kept."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tangram_sglang.calib.allocate import allocate
from tangram_sglang.calib.budgets import error_budgets, held, relative_errors

KEPT = [0.125, 0.25, 0.5, 0.75, 1.0]
CURVES = arrays(np.float64, (4, 5), elements=st.floats(0, 100))


def fall_to_zero(curves):
    return np.sort(curves, axis=1)[:, ::-1] - curves.min(axis=1, keepdims=True)


@given(CURVES, st.floats(0.125, 1.0))
def test_the_mean_is_the_retention_whatever_the_curves(curves, rho):
    for layers in (None, [1, 3]):
        found = allocate(fall_to_zero(curves), KEPT, rho, layers)
        assert found.mean() == pytest.approx(rho, abs=1e-9)
        assert (found >= KEPT[0] - 1e-12).all() and (found <= 1).all()
        if layers:
            assert found[0] == pytest.approx(rho, abs=1e-9)


@given(arrays(np.float64, (3, 4), elements=st.floats(0.01, 50)))
def test_no_other_choice_of_grid_points_has_less_error_on_convex_curves(drops):
    # drops that shrink make a curve convex; budgets end on grid points or between two of them
    drops = np.sort(drops, axis=1)[:, ::-1] * np.diff(KEPT)
    curves = np.concatenate([drops[:, ::-1].cumsum(axis=1)[:, ::-1], np.zeros((3, 1))], axis=1)
    found = allocate(curves, KEPT, 0.5, None)
    error = sum(np.interp(b, KEPT, c) for b, c in zip(found, curves, strict=True))
    for choice in itertools.product(range(5), repeat=3):
        if sum(KEPT[i] for i in choice) <= 1.5 + 1e-9:
            assert error <= sum(curves[h, i] for h, i in enumerate(choice)) + 1e-9


def test_room_goes_to_the_head_whose_error_falls_most():
    steep, flat = [9.0, 3.0, 1.0, 0.5, 0.0], [1.0, 0.9, 0.6, 0.3, 0.0]
    assert allocate(np.array([flat, steep]), KEPT, 0.375, None) == pytest.approx([0.125, 0.625])


def test_a_curve_that_falls_late_is_worth_its_whole_way():
    """The hull: nothing until all is kept, then everything."""
    late, slow = [8.0, 8.0, 8.0, 8.0, 0.0], [1.0, 0.75, 0.5, 0.25, 0.0]
    assert allocate(np.array([slow, late]), KEPT, 0.5625, None) == pytest.approx([0.125, 1.0])


def test_less_than_the_least_is_the_least():
    assert allocate(np.ones((3, 5)), KEPT, 0.01, None).tolist() == [0.125] * 3


def test_error_budgets_are_between_the_optimum_of_all_windows_and_each_ones():
    curves = np.random.default_rng(0).random((6, 4, 5)).cumsum(axis=2)[..., ::-1]
    shares = np.stack([allocate(c, KEPT, 0.4, None) for c in curves])
    found = error_budgets(curves, KEPT, 0.4, shares)
    best = allocate(curves.mean(axis=0), KEPT, 0.4, None)
    assert found.budgets == pytest.approx((best + shares.mean(axis=0)) / 2)
    assert found.spread == pytest.approx(shares.std(axis=0, ddof=1))
    assert found.samples == 6


@given(arrays(np.float64, 7, elements=st.floats(0.001, 1.0)), st.floats(0.05, 1.0))
def test_rescaled_budgets_meet_the_retention_in_the_same_order(budgets, rho):
    scaled = held(budgets, rho)
    assert scaled.mean() == pytest.approx(rho, abs=1e-6)
    order = np.argsort(budgets, kind="stable")
    assert (np.diff(scaled[order]) >= -1e-9).all()


def test_errors_count_relative_to_what_attention_added_up_to_the_layer():
    curves, power = np.ones((2, 3, 2)), np.array([[1.0, 2.0, 3.0], [2.0, 2.0, 4.0]])
    found = relative_errors(curves, power, [2, 1])
    assert found[..., 0].tolist() == [[1 / 3, 1 / 3, 1 / 6], [1 / 4, 1 / 4, 1 / 8]]
