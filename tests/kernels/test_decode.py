"""Decode attention: every head against a softmax over exactly what it holds.

Small enough for Triton's interpreter, and compiled where there is a GPU.
"""

import pytest
import torch

from tangram_sglang.errors import TangramError
from tangram_sglang.kernels.decode_config import uses_copy_engine
from tangram_sglang.kernels.dispatch_line import MERGE
from tangram_sglang.kernels.shared_prefix import most_readers
from tangram_sglang.kernels.workspace import Workspace
from tangram_sglang.plan.window import WindowRule
from tests.kernels.ragged import DEVICE, RaggedBatch, assert_close


@pytest.mark.parametrize(
    ("splits", "stretched"), [(1, True), (2, True), (3, True), (8, True), (3, False)]
)
def test_splits_merge_to_the_whole(splits, stretched):
    """E3 (sgl-project/sglang#2465): 1, 7, 63, 64 and 65 entries, H=3, HQ=21, D=80."""
    rule = WindowRule(128, 8, 4, 0)
    batch = RaggedBatch([1, 7, 63, 64, 65], [0.2, 0.5, 1], heads=3, ratio=7, dim=80, rule=rule)
    out, expected = batch.decode(splits=splits, stretched=stretched)
    assert_close(out, expected)


@pytest.mark.parametrize(("programs", "stretched"), [(1, True), (29, True), (29, False)])
def test_lengths_far_apart_share_the_programs(programs, stretched):
    """A long request beside a single token and two rows of padding, skewed heads."""
    batch = RaggedBatch([0, 1, 470, 0, 41, 90], [0.05, 0.9, 0.3], heads=3, ratio=2)
    out, expected = batch.decode(programs=programs, stretched=stretched)
    assert_close(out, expected)
    assert not out[0].any() and not out[3].any()


def test_more_requests_than_any_captured_graph():
    batch = RaggedBatch([1 + i % 23 for i in range(300)], [0.5], heads=1, ratio=1)
    assert_close(*batch.decode(programs=400))


@pytest.mark.parametrize("rows", [[0], [0, 0, 0], [0, 0, 1], [1, 0, 0]])
def test_rows_of_padding_have_no_work(rows):
    """F5 (sgl-project/sglang PR#7233): no pages, outputs 0, the grid is the batch size's."""
    batch = RaggedBatch([50 * r for r in rows], [0.5, 0.5], heads=2)
    before = batch.slab.clone()
    out, expected = batch.decode(programs=12)
    assert_close(out, expected)
    parts = batch.dispatch.merges[0].view(-1, 2, MERGE)[..., 6]
    for b, live in enumerate(rows):
        assert bool(out[b].any()) == bool(parts[b].any()) == bool(live)
    assert batch.dispatch.grid == (12,)
    if not any(rows):
        assert torch.equal(batch.slab.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(
    ("heads", "ratio", "dim"),
    [(2, 1, 64), (3, 5, 96), (2, 6, 128), (2, 3, 192), (1, 8, 256)],
    ids=["H2-HQ2-D64", "H3-HQ15-D96", "H2-HQ12-D128", "H2-HQ6-D192", "H1-HQ8-D256"],
)
def test_shapes_that_are_no_powers_of_two(heads, ratio, dim):
    """E7 (sgl-project/sglang#1159)."""
    batch = RaggedBatch([83, 130], [0.3, 0.8, 0.5][:heads], heads=heads, ratio=ratio, dim=dim)
    assert_close(*batch.decode(programs=11))


def test_a_head_reads_no_other_head():
    """E9 (vllm-project/vllm PR#40792): 24 query heads per KV head, NaN in all other heads."""
    batch = RaggedBatch([60, 21], [0.5, 0.6, 0.4], heads=3, ratio=24, dim=16, per_group=4)
    mine = torch.zeros_like(batch.pool, dtype=torch.bool)
    _, column = batch.layout.place[0, 1]
    mine[:, column] = True
    batch.pool[~mine] = torch.nan
    out, expected = batch.decode(programs=5)
    assert_close(out[:, 24:48], expected[:, 24:48])


@pytest.mark.parametrize("page", [4, 16, 32], ids=["gathered", "copied", "copied-32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, page):
    """Small pages are gathered, others come by the copy engine; lengths around page borders."""
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter multiplies bfloat16 as integers")
    rule = WindowRule(64, 16, page, 2)
    shape = {"heads": 2, "ratio": 4, "dim": 32, "dtype": dtype, "rule": rule}
    lengths = [150, 1, 64, 81]
    batch = RaggedBatch(lengths, [0.3, 0.6], sliding=(0, 45), guard=32, **shape)
    assert uses_copy_engine(batch.pool) == (page >= 16)
    for layer in (0, 1):
        assert_close(*batch.decode(layer, programs=20))


def test_pages_too_large_for_an_sm_are_gathered():
    pools = {page: torch.empty(2, 1, 2, page, 128, dtype=torch.float16) for page in (128, 256)}
    assert uses_copy_engine(pools[128]) and not uses_copy_engine(pools[256])


@pytest.mark.parametrize("splits", [1, 5])
def test_sinks_enter_once(splits):
    """G5 (kekzl/imp#1303): with and without splits; large sinks, so that none can be missed."""
    batch = RaggedBatch([37, 190], [0.3, 0.6], heads=2, ratio=4)
    sinks = torch.tensor([3.0, -2.0, 5.0, 0.0, 1.0, 4.0, 2.0, -30.0], device=DEVICE)
    out, expected = batch.decode(splits=splits, sinks=sinks)
    assert_close(out, expected)


@pytest.mark.parametrize(("window", "splits"), [(1, 1), (5, 4), (64, 2)])
def test_sliding_layers_see_their_window(window, splits):
    """Beside a full-attention layer, at lengths around page and window borders."""
    lengths = [1, 4, 63, 64, 65, 150]
    batch = RaggedBatch(lengths, [0.4, 0.6], heads=2, ratio=2, sliding=(0, window))
    sinks = torch.tensor([1.0, -1.0, 2.0, 0.0], device=DEVICE)
    for layer in (1, 0):
        out, expected = batch.decode(layer, splits=splits, sinks=sinks)
        assert_close(out, expected)


def test_the_newest_token_is_stored_and_nothing_else_is_touched():
    """E11 (vllm-project/vllm#49716): pages apart in a slab, the bytes between them unchanged."""
    batch = RaggedBatch([0, 1, 33, 90], [0.4, 0.6, 0.1], heads=3, ratio=2, guard=48)
    before = batch.slab.clone()
    out, expected = batch.decode(programs=17)
    assert_close(out, expected)
    changed = (batch.slab.nan_to_num(7.5) != before.nan_to_num(7.5)).nonzero()
    stored = torch.full_like(batch.slab, torch.nan)
    pool = stored[:, :-48].unflatten(1, batch.pool.shape[1:])
    for (i, b, h), (page, column, slot) in batch.newest.items():
        pool[page, column, 0, slot] = batch.k[i, b, h][-1]
        pool[page, column, 1, slot] = batch.v[i, b, h][-1]
    wanted = stored.isnan().logical_not()
    assert len(changed) == int(wanted.sum())
    assert torch.equal(batch.slab[wanted], stored[wanted])


def test_a_window_from_the_cache_counts_as_sealed():
    """A floor above what the length alone would seal."""
    batch = RaggedBatch([34, 70], [0.4, 0.6], heads=2, floors=[1, 2])
    assert batch.n_win == [1, 2]
    assert_close(*batch.decode(programs=7))


def test_results_do_not_depend_on_who_finishes_last():
    batch = RaggedBatch([120, 90], [0.4, 0.6], heads=2, ratio=3)
    torch.manual_seed(1)
    first, _ = batch.decode(programs=12)
    torch.manual_seed(1)
    second, _ = batch.decode(programs=12)
    assert torch.equal(first, second)


def test_workspace_follows_its_formula_and_has_a_cap():
    """E5 (sgl-project/sglang PR#24762): 256 requests on a Llama-8B shape."""
    programs, batch, heads, ratio, dim = 2112, 256, 8, 4, 128
    for readers, bound in ((1, 16), (4, 48)):
        sizes = batch, heads, ratio, dim, readers
        workspace = Workspace.build(programs, *sizes, "cpu")
        held = sum(x.nbytes for x in (workspace.mid, workspace.lse))
        assert held == Workspace.nbytes(programs, *sizes)
        pieces = 2048 if readers == 1 else 3072
        assert held == 4 * (2112 + pieces) * readers * 4 * 129
        assert held < bound << 20
        with pytest.raises(TangramError, match="lower --max-running-requests"):
            Workspace.build(1 << 20, *sizes, "cpu")


@pytest.mark.parametrize("programs", [1, 7, 61])
@pytest.mark.parametrize("ratio", [1, 3, 4, 7])
def test_windows_that_requests_read_together(programs, ratio):
    """Two leaders, readers on both sides of theirs, padding and strangers between; what they read
    alone differs in length, down to nothing but the newest page."""
    assert most_readers(ratio) == {1: 4, 3: 4, 4: 4, 7: 2}[ratio]
    lengths = [107, 203, 0, 107, 70, 333, 1, 142, 43]
    common = {3: (3, [1]), 7: (4, [5])} if ratio == 7 else {3: (3, [0, 1, 5]), 4: (1, [8, 7])}
    shape = {"heads": 3, "ratio": ratio, "sliding": (0, 41)}
    batch = RaggedBatch(lengths, [0.1, 0.9, 0.3], common=common, **shape)
    for layer in (0, 1):
        assert_close(*batch.decode(layer, programs=programs))
    # a leader's pages are read once for all: those of the others could be anything
    for b, lead in batch.leader.items():
        assert batch.n_win[b] >= common[lead][0]
    assert int(batch.dispatch.merges[0].view(-1, 3, MERGE)[1, :, 8].min()) > 0


def test_what_is_read_together_comes_from_the_leaders_row():
    """The others' table entries for it are not looked at, and theirs are all a reader needs else."""
    batch = RaggedBatch([200, 170], [0.2, 0.7], heads=2, ratio=4, common={0: (2, [1])})
    for g, _ in batch.layout.place.values():
        first = int(batch.layout.table_offset[g])
        same = batch.same_entries(1, g) // batch.rule.page
        batch.table[batch.rows[1], first : first + same] = 0
    assert_close(*batch.decode(programs=9))
