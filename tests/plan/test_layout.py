"""Closed forms of the layout against counting it out."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_sglang.errors import TangramError
from tangram_sglang.plan.grouping import group_heads
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.window import WindowRule


@st.composite
def layouts(draw):
    page = draw(st.sampled_from([1, 4, 8]))
    rule = WindowRule(
        window=page * draw(st.integers(1, 8)),
        recent=draw(st.integers(0, 40)),
        page=page,
        sinks=draw(st.integers(0, page)),
    )
    kv_heads = draw(st.integers(1, 3))
    sliding = draw(st.lists(st.sampled_from([None, None, 8, 21]), min_size=1, max_size=5))
    sliding.append(None)
    shape = ModelShape(
        tuple(LayerShape(i, kv_heads, kv_heads, 8, w, 1.0) for i, w in enumerate(sliding))
    )
    heads = len(shape.full_heads)
    layout = KVLayout.build(
        shape,
        rule,
        budgets=draw(st.lists(st.floats(0, 1), min_size=heads, max_size=heads)),
        retention=draw(st.floats(0.01, 1.0)),
        per_group=draw(st.integers(1, 5)),
        grouping=draw(st.sampled_from(["global", "layer"])),
        max_tokens=400,
    )
    tokens = draw(st.integers(0, rule.window))
    layout = layout.with_queries(shape, tokens) if tokens else layout
    return layout.with_scores() if draw(st.booleans()) else layout


def counted_pages(layout, n) -> int:
    """Pages by walking over every token, as the design words it."""
    rule, total = layout.rule, 0
    query = n - 1
    sealed = 0
    while n and query >= (sealed + 1) * rule.window + rule.recent:
        sealed += 1
    for group in layout.groups:
        if group.sliding_window is None:
            total += sealed * group.kept // rule.page
            raw = range(sealed * rule.window, n)
        else:
            # and for one token more the page that leaves
            raw = range(max(0, n - 1 - group.sliding_window), n)
        total += len({token // rule.page for token in raw})
    # queries of the last tokens of each window that is not sealed, in pages of their own
    queries = layout.queries
    held = {t // rule.window for t in range(sealed * rule.window, n) if _asks(t, layout)}
    assert len(held) <= queries.slots
    return total + len(held) * queries.pages


def _asks(token, layout) -> bool:
    return token % layout.rule.window >= layout.rule.window - layout.queries.tokens


@given(layouts(), st.integers(0, 400))
def test_pages_equal_a_count_over_tokens(layout, n):
    assert layout.pages(n) == counted_pages(layout, n)


@given(layouts(), st.integers(0, 200), st.integers(0, 200))
@settings(max_examples=50)
def test_peak_bounds_every_step_on_the_way_and_is_reached_but_for_sliding_pages(layout, a, b):
    start, n = sorted((a, b))
    most = max(layout.pages(i) for i in range(start, n + 1))
    # no page need have left yet; and where prefixes are shared, a window is left with the cache
    slack = sum(2 * layout.rule.pages(g.sliding_window) for g in layout.groups if g.sliding_window)
    assert most <= layout.peak_pages(n, start) <= most + slack


@given(layouts(), st.integers(1, 400))
def test_a_longer_request_never_reserves_less(layout, n):
    """Else a request could wait for ever beside an empty pool made for a longer one."""
    assert layout.peak_pages(n - 1) <= layout.peak_pages(n)


@given(layouts(), st.integers(1, 3000))
def test_capacity_is_the_longest_request_that_fits(layout, pages):
    n = layout.capacity(pages)
    assert n == 0 or layout.peak_pages(n) <= pages
    assert layout.peak_pages(n + 1) > pages


@given(layouts())
def test_every_head_has_one_place_and_groups_keep_whole_pages(layout):
    heads = [head for group in layout.groups for head in group.heads]
    assert len(heads) == len(set(heads)) == len(layout.place)
    assert all(len(group.heads) <= layout.per_group for group in layout.groups)
    for group in layout.groups[: layout.num_full - layout.score_groups]:
        assert layout.rule.page <= group.kept <= layout.rule.window
        assert group.kept % layout.rule.page == 0
    for group in layout.groups[layout.num_full - layout.score_groups : layout.num_full]:
        assert group.heads == () and group.kept == 0


SMOLLM2 = ModelShape(tuple(LayerShape(i, 9, 3, 64, None, 0.125) for i in range(30)))
RULE = WindowRule(512, 256, 16, 4)


def build(budgets, retention, per_group=4):
    return KVLayout.build(
        SMOLLM2,
        RULE,
        budgets=budgets,
        retention=retention,
        per_group=per_group,
        grouping="global",
        max_tokens=8192,
    )


@given(
    st.lists(st.floats(0, 1), min_size=90, max_size=90),
    st.floats(0.05, 0.99),
    st.sampled_from([1, 3, 4, 8]),
)
@settings(max_examples=60)
def test_retention_is_the_bytes_the_user_gets(budgets, retention, per_group):
    """Held bytes, padding columns included, reach what was asked and do not pass it."""
    layout = build(budgets, retention, per_group)
    groups = len(layout.groups)
    one_page = per_group * 16 / (512 * 90)
    if int(retention * 32 * 90 / per_group) >= groups:
        assert layout.retention_held <= retention + 1e-9
        assert layout.retention_held > retention - 2 * one_page


def test_scores_take_a_page_of_each_p_raw_tokens_and_none_of_sealed_windows():
    plain = build([0.5] * 90, 0.5)
    layout = plain.with_scores()
    # a page of 4 heads has room for 256 scores of a token, and there are 90
    assert (layout.score_groups, plain.score_groups) == (1, 0)
    assert layout.compresses and layout.window_pages == plain.window_pages
    assert layout.retention_held == plain.retention_held
    for n, pages in ((1, 1), (768, 48), (769, 17), (5000, 25)):
        assert layout.pages(n) == plain.pages(n) + pages
    assert not build([1.0] * 90, 1.0).with_scores().compresses
    # one head a page: 64 scores
    assert build([0.5] * 90, 0.5, per_group=1).with_scores().score_groups == 2


def test_queries_fill_the_fewest_pages():
    layout = build([0.5] * 90, 0.5).with_queries(SMOLLM2, 32)
    # 30 layers of 9 heads, 32 queries each; a page of 4 heads holds 128 vectors
    assert (layout.queries.pages, layout.queries.slots) == (68, 1)
    assert layout.pages(512 - 32) == 23 * 30
    assert layout.pages(512 - 31) == 23 * 31 + 68


def test_queries_of_uneven_heads_or_of_more_than_a_window_are_refused():
    uneven = ModelShape(tuple(LayerShape(i, 2 + 2 * i, 2, 64, None, 0.125) for i in range(2)))
    layout = build([0.5] * 90, 0.5)
    with pytest.raises(TangramError, match=r"\[1, 2\] query heads per KV head"):
        layout.with_queries(uneven, 32)
    for tokens in (0, 513):
        with pytest.raises(TangramError, match=f"reads {tokens} queries of a window of 512"):
            layout.with_queries(SMOLLM2, tokens)


def test_retention_1_keeps_every_token():
    layout = build([0.1] * 90, 1.0)
    assert not layout.compresses
    assert set(layout.kept) == {512}


def test_more_retention_never_keeps_less_of_any_head():
    budgets = [((i * 37) % 90) / 90 for i in range(90)]
    kept = [build(budgets, r / 20).kept for r in range(1, 21)]
    assert all((a <= b).all() for a, b in itertools.pairwise(kept))


def test_grouping_puts_like_budgets_together_across_layers():
    heads = [(layer, h) for layer in range(3) for h in range(2)]
    budgets = [0.9, 0.1, 0.8, 0.2, 0.1, 0.7]
    assert group_heads(heads, budgets, 3, "global") == [
        ((0, 0), (1, 0), (2, 1)),
        ((1, 1), (0, 1), (2, 0)),
    ]
    assert group_heads(heads, budgets, 3, "layer") == [
        ((0, 0), (0, 1)),
        ((1, 0), (1, 1)),
        ((2, 1), (2, 0)),
    ]


def test_a_window_that_is_no_multiple_of_the_page_is_refused():
    with pytest.raises(TangramError, match="no multiple of the page"):
        WindowRule(500, 256, 16, 4)
