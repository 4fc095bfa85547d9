"""How decode attention is compiled for a pool."""

from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True, slots=True)
class Config:
    """How the kernel is compiled.

    Attributes:
        warps, stages: of a program; stages are pages or tiles in flight.
        block: entries per tile where pages are gathered by ordinary loads.
        registers: most per thread; None leaves it to the compiler.
    """

    warps: int
    stages: int
    block: int = 64
    registers: int | None = None


def config_for(pool: torch.Tensor, ratio: int) -> Config:
    """The config for a pool's head size, type and pages and ``ratio`` query heads per KV head."""
    width = triton.next_power_of_2(pool.shape[-1]) * pool.element_size()
    if uses_copy_engine(pool):
        return Config(warps=1 if width <= 256 and ratio <= 16 else 2, stages=4)
    if width <= 256:
        return Config(warps=2, stages=3, block=64)
    return Config(warps=4, stages=3 if width <= 512 else 2, block=32 if width <= 512 else 16)


def uses_copy_engine(pool: torch.Tensor) -> bool:
    """Whether K and V of a page are fetched by the bulk copy engine (Hopper and later)."""
    page, dim = pool.shape[-2:]
    capable = not pool.is_cuda or torch.cuda.get_device_capability(pool.device)[0] >= 9
    return (
        capable
        and pool.element_size() == 2
        and page >= 16
        and page == triton.next_power_of_2(page)
        # four stages of K and V fit into an SM
        and page * triton.next_power_of_2(dim) <= 1 << 14
        and dim % 8 == 0
        and pool.stride(0) % dim == 0
        and pool.data_ptr() % 16 == 0
    )


def rows_of(pool: torch.Tensor) -> TensorDescriptor:
    """``pool`` as lines of D, of which the copy engine fetches P at a time."""
    page, dim = pool.shape[-2:]
    lines = ((pool.shape[0] - 1) * pool.stride(0) + pool.shape[1] * pool.stride(1)) // dim
    block = [page, max(16, triton.next_power_of_2(dim))]
    return TensorDescriptor(pool, [lines, dim], [dim, 1], block)
