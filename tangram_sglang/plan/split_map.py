"""The split map: how many programs of the decode kernel work on each KV head (paper 4.3).

Fixed before the first request from what each head keeps and from how many programs the GPU holds
at once. All heads of a request grow together, so the shares do not depend on its length; the
batch size only says how many programs one request gets.
"""

from dataclasses import dataclass

import numpy as np


def split_counts(shares: np.ndarray, programs: float) -> np.ndarray:
    """Algorithm 1 for the heads of one layer.

    Args:
        shares: [H], what each head keeps, in any unit; none negative.
        programs: N_CTA, programs for one request.

    Returns:
        S, [H] int64: ``max(1, round(share / (sum of shares / N_CTA)))``.
    """
    shares = np.asarray(shares, dtype=np.float64)
    if shares.ndim != 1 or not len(shares) or (shares < 0).any() or not programs > 0:
        raise ValueError(
            f"split map of shares {shares} over {programs} programs, expected one share or more, none "
            "below 0, and programs above 0"
        )
    total = shares.sum()
    if total == 0:
        return np.ones(len(shares), dtype=np.int64)
    # halves go up; np.round would send them to the even neighbour
    return np.maximum(1, np.floor(shares / total * programs + 0.5)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class SplitMap:
    """Splits of every head for one captured batch size.

    Attributes:
        batch: requests in flight.
        programs: N_CTA, for the whole batch.
        splits: S, [L, H] int64.
    """

    batch: int
    programs: int
    splits: np.ndarray

    @property
    def grid(self) -> np.ndarray:
        """Programs of each layer's launch, a split of a request each, [L] int64.

        Rounding makes them more than N_CTA, or fewer: 1,024 instead of 924 for 32 requests of 8 equal
        heads. Those that do not fit at once start when others have ended.
        """
        return self.batch * self.splits.sum(axis=1)

    def slots(self, layer: int) -> np.ndarray:
        """What each program of a request does: (head, split, splits), [sum of S, 3] int32."""
        splits = self.splits[layer]
        head = np.repeat(np.arange(len(splits)), splits)
        first = np.cumsum(splits) - splits
        return np.stack([head, np.arange(len(head)) - first[head], splits[head]], 1).astype(
            np.int32
        )


def plan_splits(shares: np.ndarray, programs: int, batch: int) -> SplitMap:
    """The split map of all layers.

    Args:
        shares: [L, H], what each head keeps; budgets or kept counts.
        programs: N_CTA, programs that the GPU holds at once, for the whole batch.
        batch: requests in flight.
    """
    splits = np.stack([split_counts(layer, programs / batch) for layer in shares])
    return SplitMap(batch, programs, splits)


def equal_splits(heads: tuple[int, int], programs: int, batch: int) -> SplitMap:
    """The map that knows no budgets: every head of [L, H] gets as many splits as fit at once."""
    splits = max(1, programs // (batch * heads[1]))
    return SplitMap(batch, programs, np.full(heads, splits, dtype=np.int64))
