"""Budget-aware clustering: which heads share a page table (paper 4.2.2, across layers)."""

from collections.abc import Sequence

Head = tuple[int, int]


def group_heads(
    heads: Sequence[Head], budgets: Sequence[float], per_group: int, scope: str
) -> list[tuple[Head, ...]]:
    """Cut heads, sorted by budget, into groups of ``per_group``.

    Args:
        heads: (layer_id, kv head), in global head order.
        budgets: share kept by each head.
        per_group: H_p; the last group of a cut may hold fewer heads.
        scope: ``global`` sorts all heads together, ``layer`` each layer by itself.

    Returns:
        Groups in descending order of budget, so that the padding of the last group falls on the
        smallest one. Equal budgets keep head order, on every rank alike.
    """
    order = sorted(range(len(heads)), key=lambda i: (-budgets[i], i))
    if scope == "layer":
        by_layer: dict[int, list[int]] = {}
        for i in order:
            by_layer.setdefault(heads[i][0], []).append(i)
        cuts = list(by_layer.values())
    else:
        cuts = [order]
    groups = [cut[i : i + per_group] for cut in cuts for i in range(0, len(cut), per_group)]
    groups.sort(key=lambda group: (-budgets[group[0]], group[0]))
    return [tuple(heads[i] for i in group) for group in groups]
