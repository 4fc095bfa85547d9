"""How many programs of the real decode kernel a GPU holds at once: N_CTA of the split map."""

import ctypes

import numpy as np
import torch

from tangram_sglang.kernels.decode import decode_arguments, decode_kernel
from tangram_sglang.kernels.decode_config import Config, config_for
from tangram_sglang.kernels.dispatch import Dispatch
from tangram_sglang.kernels.layer_tables import LayerTables
from tangram_sglang.kernels.shared_prefix import most_readers
from tangram_sglang.kernels.workspace import Workspace
from tangram_sglang.plan.split_map import equal_splits


def resident_programs(
    tables: LayerTables,
    pool: torch.Tensor,
    ratio: int,
    readers: int | None = None,
    q_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> int:
    """Programs that fit on the pool's GPU together; the least over the kinds of layers.

    Compiles the kernel and asks the driver, which knows its registers and shared memory.

    Args:
        tables, pool: as decode will get them.
        ratio: query heads per KV head.
        readers: R; the most by default.
        q_dtype: of q; the pool's by default.
        config: for benches.
    """
    device, dim = pool.device, pool.shape[-1]
    heads, q_dtype = tables.heads, q_dtype or pool.dtype
    readers = readers or most_readers(ratio)
    split_map = equal_splits((len(tables.sliding), heads), heads, 1)
    dispatch = Dispatch.build(split_map, device, readers=readers)
    workspace = Workspace.build(heads, 1, heads, ratio, dim, readers, device)
    q = torch.empty(1, heads * ratio, dim, dtype=q_dtype, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    per_sm = []
    for sliding in sorted({window > 0 for window in tables.sliding_window}):
        layer = [window > 0 for window in tables.sliding_window].index(sliding)
        arguments = decode_arguments(
            q,
            pool,
            table,
            tables,
            dispatch,
            workspace,
            layer,
            1.0,
            config or config_for(pool, ratio),
        )
        compiled = decode_kernel.warmup(grid=(1,), DEPENDENT=False, EARLY=False, **arguments)
        per_sm.append(blocks_per_sm(compiled))
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return int(np.min(per_sm)) * processors


def blocks_per_sm(compiled) -> int:
    """Blocks of a compiled Triton kernel that one multiprocessor holds."""
    compiled._init_handles()
    driver, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    code = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(found),
        ctypes.c_void_p(compiled.function),
        ctypes.c_int(32 * compiled.metadata.num_warps),
        ctypes.c_size_t(compiled.metadata.shared),
    )
    if code or found.value < 1:
        raise RuntimeError(
            f"occupancy of {compiled.name} unknown: driver returned {code}, {found.value} blocks "
            f"with {compiled.metadata.shared} bytes of shared memory"
        )
    return found.value
