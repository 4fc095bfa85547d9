"""Decode attention compiled on a GPU: CUDA graphs, sizes beyond 2^31 elements, occupancy."""

import pytest
import torch

from tangram_sglang.kernels.decode import decode_attention
from tangram_sglang.kernels.decode_config import config_for
from tangram_sglang.kernels.dispatch import Dispatch, dispatch_step
from tangram_sglang.kernels.occupancy import resident_programs
from tangram_sglang.kernels.shared_prefix import most_readers
from tangram_sglang.kernels.workspace import Workspace
from tangram_sglang.plan.window import WindowRule
from tests.kernels.ragged import RaggedBatch, assert_close

pytestmark = pytest.mark.gpu

LLAMA = {
    "heads": 8,
    "ratio": 4,
    "dim": 128,
    "dtype": torch.bfloat16,
    "rule": WindowRule(512, 256, 16, 4),
}
BUDGETS = [0.06, 0.10, 0.14, 0.18, 0.22, 0.30, 0.42, 0.58]


def runner(batch, programs):
    """Static buffers and a function that decodes layer 0 from them."""
    size = len(batch.lengths)
    dispatch = Dispatch.build(batch.split_map(programs), "cuda", readers=most_readers(batch.ratio))
    sizes = size, batch.heads, batch.ratio, batch.dim, dispatch.readers
    workspace = Workspace.build(dispatch.grid[0], *sizes, "cuda")
    q, k_new, v_new = batch.inputs(0)
    out, step = torch.full_like(q, torch.nan), batch.tensors()

    def run():
        dispatch_step(dispatch, batch.tables, *step)
        decode_attention(
            q,
            k_new,
            v_new,
            batch.pool,
            batch.table,
            tables=batch.tables,
            dispatch=dispatch,
            workspace=workspace,
            layer=0,
            out=out,
            scaling=batch.scaling,
        )

    return run, q, k_new, v_new, out, step


def test_graph_replay_follows_lengths_and_padding():
    """E15, F1 (sparkinfer PR#715, sgl-project/sglang PR#1782): captured on padding, replayed on
    batches that grow and shrink, without a synchronisation."""
    batch = RaggedBatch([2000, 1, 700, 5000], BUDGETS, retention=0.3, **LLAMA)
    run, q, _, _, out, (rows, seq_lens, n_win) = runner(batch, 528)
    real = [x.clone() for x in (rows, seq_lens, n_win)]
    expected = batch.expected(q, 0)
    rows.zero_(), seq_lens.fill_(1), n_win.zero_()
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            run()
        for live in ([], [0], [0, 1, 2, 3], [2, 3], [1], [0, 1, 2, 3]):
            mask = torch.zeros(4, dtype=torch.bool)
            mask[live] = True
            mask = mask.to("cuda", non_blocking=True)
            rows.copy_(real[0] * mask)
            seq_lens.copy_(torch.where(mask, real[1], 1))
            n_win.copy_(real[2] * mask)
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.set_sync_debug_mode("default")
            assert_close(out, expected * mask[:, None, None])
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_pools_beyond_2_31_elements():
    """E1 (sgl-project/sglang#20389): pages whose offsets do not fit in 32 bits."""
    batch = RaggedBatch([3000, 900], BUDGETS, retention=0.3, **LLAMA)
    pages, *shape = batch.pool.shape
    size = batch.pool[0].numel()
    far = 2**31 // size + 5
    pool = torch.full((far + pages, *shape), torch.nan, dtype=batch.dtype, device="cuda")
    assert pool.numel() > 2**31
    pool[far:] = batch.pool
    batch.pool = pool
    batch.table = torch.where(batch.table > 0, batch.table + far, 0).int()
    out, expected = batch.decode(programs=264)
    assert_close(out, expected)


def test_float16_and_long_ragged_heads():
    arguments = LLAMA | {"dtype": torch.float16}
    batch = RaggedBatch([9000, 17, 4321], BUDGETS, retention=0.25, **arguments)
    for stretched in (True, False):
        assert_close(*batch.decode(programs=1056, stretched=stretched))


def test_windows_that_requests_read_together():
    """A leader behind two of its readers; a stranger and padding between them."""
    lengths = [8700, 9000, 0, 8800, 5000, 8650]
    batch = RaggedBatch(lengths, BUDGETS, retention=0.3, common={1: (16, [0, 3, 5])}, **LLAMA)
    for programs in (924, 11):
        assert_close(*batch.decode(programs=programs))


@pytest.mark.parametrize("batch", [1, 16, 33, 64, 130, 256])
def test_every_batch_size(batch):
    """Of any captured size, with padding; the dispatch compiles a kernel for each power of two."""
    lengths = [(37 * i) % 900 if i % 5 else 0 for i in range(1, batch + 1)]
    ragged = RaggedBatch(lengths, BUDGETS, retention=0.3, **LLAMA)
    assert_close(*ragged.decode(programs=924))


def test_programs_come_from_the_compiled_kernel():
    """What the driver grants for its registers and shared memory, on all multiprocessors."""
    batch = RaggedBatch([100], BUDGETS, retention=0.3, **LLAMA)
    resident = resident_programs(batch.tables, batch.pool, batch.ratio)
    properties = torch.cuda.get_device_properties(0)
    assert resident % properties.multi_processor_count == 0
    warps = config_for(batch.pool, batch.ratio).warps
    most = properties.max_threads_per_multi_processor // (32 * warps)
    assert 1 <= resident // properties.multi_processor_count <= most
