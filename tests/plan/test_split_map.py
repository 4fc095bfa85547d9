"""The split map: Algorithm 1 of the paper and its dispatch table."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_sglang.plan.split_map import equal_splits, plan_splits, split_counts

SHARES = st.lists(st.integers(1, 64), min_size=1, max_size=12)


def test_splits_are_those_of_the_paper():
    """tau = sum of B / N_CTA; S = max(1, round(B / tau))."""
    budgets = np.array([0.06, 0.10, 0.14, 0.18, 0.22, 0.30, 0.42, 0.58])
    tau = budgets.sum() / 66
    assert split_counts(budgets, 66).tolist() == [max(1, round(b / tau)) for b in budgets]
    assert split_counts(budgets, 66).tolist() == [2, 3, 5, 6, 7, 10, 14, 19]
    assert split_counts(budgets, 2).tolist() == [1] * 7 + [1]
    assert split_counts(np.zeros(3), 66).tolist() == [1, 1, 1]


@settings(max_examples=60, deadline=None)
@given(shares=SHARES, programs=st.integers(1, 2000), batch=st.integers(1, 256))
def test_every_program_has_a_split_and_every_head_a_program(shares, programs, batch):
    split_map = plan_splits(np.array([shares, shares[::-1]]), programs, batch)
    assert (split_map.splits >= 1).all()
    for layer, grid in enumerate(split_map.grid):
        slots = split_map.slots(layer)
        assert grid == batch * len(slots)
        # each program another split, all splits of each head there
        assert [tuple(x) for x in slots.tolist()] == [
            (h, s, n) for h, n in enumerate(split_map.splits[layer]) for s in range(n)
        ]
    # rounding moves the grid by half a program per head at most, the least of one aside
    extra = split_map.splits.sum(axis=1) - programs / batch
    assert (extra <= len(shares)).all() and (extra >= -len(shares) / 2 - 1e-9).all()


@settings(max_examples=60, deadline=None)
@given(shares=SHARES, programs=st.integers(1, 2000))
def test_larger_shares_never_get_fewer_splits_and_maps_repeat(shares, programs):
    splits = split_counts(np.array(shares), programs)
    order = np.argsort(shares, kind="stable")
    assert (np.diff(splits[order]) >= 0).all()
    assert splits.tolist() == split_counts(np.array(shares), programs).tolist()
    assert splits.tolist() == split_counts(np.array(shares) * 0.25, programs).tolist()


def test_work_of_programs_is_even():
    """E15 (sparkinfer PR#715): the map is fixed by budgets, and even at any length."""
    kept = np.array([[32, 48, 80, 96, 112, 160, 208, 288]])
    split_map = plan_splits(kept, 924, 8)
    work = kept[0] / split_map.splits[0]
    assert work.max() <= 1.3 * (kept.sum() / split_map.splits.sum())


def test_equal_splits_know_no_budgets():
    assert equal_splits((2, 4), 64, 2).splits.tolist() == [[8] * 4] * 2


@pytest.mark.parametrize(("shares", "programs"), [([], 4), ([1, -1], 4), ([1, 1], 0)])
def test_nonsense_is_refused(shares, programs):
    with pytest.raises(ValueError, match="split map"):
        split_counts(np.array(shares), programs)
