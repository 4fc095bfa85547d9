"""The ledger: every page free or owned once."""

import numpy as np
import pytest

from tangram_sglang.pool.ledger import Ledger


def test_pages_are_handed_out_once_and_page_0_never():
    ledger = Ledger(8)
    pages = np.concatenate([ledger.take(3, 1), ledger.take(5, 2)])
    assert sorted(pages) == list(range(1, 9))
    ledger.check()


def test_taking_more_than_is_free_changes_nothing():
    """A5 (sgl-project/sglang#4602): what is free is counted in whole pages."""
    ledger = Ledger(8)
    ledger.take(6, 1)
    with pytest.raises(RuntimeError, match="takes 3 pages but 2 are free"):
        ledger.take(3, 2)
    assert ledger.free == 2
    ledger.check()


def test_giving_back_what_another_row_owns_is_refused():
    ledger = Ledger(4)
    mine, other = ledger.take(2, 1), ledger.take(2, 2)
    with pytest.raises(RuntimeError, match="does not own"):
        ledger.give(other, 1)
    with pytest.raises(RuntimeError, match="twice"):
        ledger.give(np.array([mine[0], mine[0]]), 1)
    ledger.give(mine, 1)
    with pytest.raises(RuntimeError, match="does not own"):
        ledger.give(mine, 1)
    ledger.check()


@pytest.mark.parametrize("damage", ["owned page on the free list", "page lost"])
def test_check_sees_damaged_books(damage):
    ledger = Ledger(4)
    ledger.take(1, 1)
    if damage == "page lost":
        ledger.free -= 1
    else:
        ledger._owner[ledger._stack[0]] = 7
    with pytest.raises(RuntimeError):
        ledger.check()
