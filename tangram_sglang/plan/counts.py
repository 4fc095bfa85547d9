"""From budgets to K[g]: entries that each head of a group keeps of every window."""

from collections.abc import Sequence

import numpy as np

from tangram_sglang.plan.window import WindowRule


def kept_counts(
    group_budgets: Sequence[float], rule: WindowRule, retention: float, heads: int, per_group: int
) -> np.ndarray:
    """Whole pages for every group whose bytes sum to ``retention`` of an uncompressed cache.

    Budgets give the shape only. They are scaled by one factor, capped at 1 and rounded up to
    pages; what one factor cannot reach (equal budgets jump together) goes page by page to the
    groups next in line. The columns that pad a group count as held bytes.

    Args:
        group_budgets: largest budget of each group, [G].
        rule: window and page.
        retention: share of bytes asked, (0, 1]; 1 keeps every token.
        heads: KV heads in all groups together, padding not counted.
        per_group: H_p.

    Returns:
        K, [G] int64, multiples of the page. Each group keeps at least a page, so very small
        retentions hold more than asked.
    """
    budgets = np.asarray(group_budgets, dtype=np.float64)
    pages_per_window = rule.window // rule.page
    if retention >= 1.0 or not len(budgets):
        return np.full(len(budgets), rule.window, dtype=np.int64)
    # total pages of one window over all groups that the bytes asked for pay for
    target = int(retention * pages_per_window * heads / per_group + 1e-9)

    def pages(scale: float) -> np.ndarray:
        wanted = np.ceil(np.minimum(1.0, scale * budgets) * pages_per_window - 1e-9)
        return np.clip(wanted, 1, pages_per_window).astype(np.int64)

    low, high = 0.0, 1.0 / max(budgets.min(), 1e-6)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if pages(middle).sum() <= target else (low, middle)
    counts = pages(low)
    # the group nearest to its next page comes first; several rounds only where budgets are 0
    remainder = low * budgets * pages_per_window - counts
    order = sorted(range(len(counts)), key=lambda g: (-remainder[g], g))
    while (missing := target - int(counts.sum())) > 0:
        room = [g for g in order if counts[g] < pages_per_window]
        counts[room[:missing]] += 1
    return counts * rule.page
