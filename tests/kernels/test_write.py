"""The KV write of new tokens: each to its raw slot, and to no other."""

import pytest
import torch

from tangram_sglang.kernels.write import write_raw
from tests.kernels.ragged import DEVICE, RaggedBatch, assert_close


@pytest.mark.parametrize("dim", [16, 80])
def test_tokens_of_a_piece_go_to_their_raw_slots(dim):
    """Three requests and padding: tokens of sealed windows and of before the sliding window stay
    out, guard bytes between pages too."""
    lengths, guard = [0, 23, 70, 131], 32
    batch = RaggedBatch(
        lengths, [0.4, 0.6, 0.2], heads=3, dim=dim, sliding=(0, 21), guard=guard, seed=3
    )
    rows, seq_lens, n_win = batch.tensors()
    # the last tokens of each request, one token of the padding
    token_row, positions = [0], [0]
    for b, n in enumerate(lengths):
        count = min(n, 45)
        token_row += [b] * count
        positions += range(n - count, n)
    generator = torch.Generator().manual_seed(0)
    shape = (len(positions), 2 * batch.heads, dim)
    new = torch.randn(shape, generator=generator).to(batch.dtype).to(DEVICE)
    k, v = new[:, : batch.heads], new[:, batch.heads :]
    for layer in (0, 1):
        expected = batch.slab.clone()
        pool = expected[:, :-guard].unflatten(1, batch.pool.shape[1:])
        page, rule, layout = batch.rule.page, batch.rule, batch.layout
        for t, (b, p) in enumerate(zip(token_row, positions, strict=True)):
            for h in range(batch.heads):
                g, column = layout.place[3 * layer, h]
                start = layout.tail_start(layout.groups[g].sliding_window, lengths[b])
                if batch.rows[b] and p >= start:
                    slot = layout.ring_offset[g] + p // page % int(layout.ring_slots[g])
                    at = int(batch.table[batch.rows[b], int(slot)])
                    pool[at, column, 0, p % page] = k[t, h]
                    pool[at, column, 1, p % page] = v[t, h]
        assert rule.sealed(131) > 0
        write_raw(
            k,
            v,
            batch.pool,
            batch.table,
            torch.tensor(token_row, device=DEVICE),
            torch.tensor(positions, device=DEVICE),
            rows,
            seq_lens,
            n_win,
            batch.tables,
            layer,
        )
        assert torch.equal(batch.slab.nan_to_num(9.5), expected.nan_to_num(9.5))


def test_decode_sees_what_was_written():
    """The last two tokens but one are written anew before the newest one decodes."""
    lengths = [23, 70, 131]
    batch = RaggedBatch(lengths, [0.4, 0.6], heads=2)
    rows, _, n_win = batch.tensors()
    before = torch.tensor([n - 1 for n in lengths], device=DEVICE)
    k, v = (torch.randn(6, 2, batch.dim).to(DEVICE) for _ in "kv")
    token_row = [0, 0, 1, 1, 2, 2]
    back = [3, 2, 3, 2, 3, 2]
    for t, b in enumerate(token_row):
        for h in range(2):
            batch.k[0, b, h][-back[t]] = k[t, h]
            batch.v[0, b, h][-back[t]] = v[t, h]
    positions = [lengths[b] - i for b, i in zip(token_row, back, strict=True)]
    write_raw(
        k,
        v,
        batch.pool,
        batch.table,
        torch.tensor(token_row, device=DEVICE),
        torch.tensor(positions, device=DEVICE),
        rows,
        before,
        n_win,
        batch.tables,
        0,
    )
    assert_close(*batch.decode(programs=8))


def test_shapes_are_checked():
    batch = RaggedBatch([23], [0.4, 0.6], heads=2)
    rows, seq_lens, n_win = batch.tensors()
    k = torch.randn(1, 3, batch.dim, device=DEVICE)
    with pytest.raises(ValueError, match="KV write of 2 heads"):
        write_raw(k, k, batch.pool, batch.table, rows, rows, rows, seq_lens, n_win, batch.tables, 0)
