"""The dispatch line of a decode step: where each program of every layer starts and ends.

For one layer, the whole pages that the batch must read stand in one line, piece after piece; the newest
token's page, which the merge reads, is left out. A piece is what a head holds of a request, or the
windows at its beginning that several requests read together (``kernels/shared_prefix.py``):

    of a leader     [ head 0 of the common windows )[ head 1 .. )  [ head 0 of the rest )[ head 1 .. )
    of the others                                                  [ head 0 of the rest )[ head 1 .. )

A program of the decode kernel reads the stretch from its start to the next program's. Two ways to cut
the line, both from the split map:

    stretched  the map's programs at equal distances on the line of this step. A request gets
               programs in proportion to its length, a head in proportion to what it holds.
    rigid      every request gets the programs of its map, whatever its length; a head's splits
               are equal. What the paper does. Nothing is read together.

One launch per step, inside the CUDA graph, cuts the lines of all layers from `rows`, `seq_lens`,
`n_win` and the records of what is shared. Rows of padding (row 0) have no pieces.
"""

from dataclasses import dataclass

import torch
import triton

from tangram_sglang.kernels.dispatch_line import MERGE, PIECE, START, dispatch_kernel
from tangram_sglang.kernels.layer_tables import LayerTables
from tangram_sglang.kernels.shared_prefix import READERS, alone
from tangram_sglang.plan.split_map import SplitMap

# pages that starting on another head costs, in time
OVERHEAD = 8
# fewest pages worth a program
LEAST = 4


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The split map of one captured batch size on the device, and the lines cut from it.

    Attributes:
        batch: requests, padding included.
        grid: programs of each layer's launch.
        stretched: how lines are cut.
        readers: R, most requests that read windows together; 1 where lines are rigid.
        programs: [L] int32, ``grid`` on the device.
        slots: [L, T, 3] int32, (head, split, splits) of a request's programs; anything if stretched.
        splits: [L, H, 2] int32, (first slot, splits) of a head; anything if stretched.
        shared: [B, 3 + R] int32, records of what requests read together
            (``kernels/shared_prefix.py``); to be written before a step. Not read where R is 1.
        starts: [L, max grid + 1, START] int32, written each step: where a program starts; the
            next one's start is its end.
        pieces: [L, most pieces + 1, PIECE] int32, written each step. (A program that ends where the line
            does looks at the piece behind it.)
        merges: [L, batch * H, MERGE] int32, written each step, one for each (request, head).
    """

    batch: int
    grid: tuple[int, ...]
    stretched: bool
    readers: int
    programs: torch.Tensor
    slots: torch.Tensor
    splits: torch.Tensor
    shared: torch.Tensor
    starts: torch.Tensor
    pieces: torch.Tensor
    merges: torch.Tensor

    @staticmethod
    def build(
        split_map: SplitMap, device: torch.device | str, stretched: bool = True, readers: int = 1
    ):
        """Static tensors and buffers for ``split_map.batch`` requests.

        Stretched lines need no table, and nothing is copied from the host.
        """
        layers, heads = split_map.splits.shape
        if stretched:
            # for just the programs that the GPU holds; a few more would run after all others
            grid = (split_map.programs,) * layers
            programs = torch.full((layers,), split_map.programs, dtype=torch.int32, device=device)
            slots = splits = torch.zeros(1, 1, 1, dtype=torch.int32, device=device)
        else:
            readers = 1
            grid = tuple(int(x) for x in split_map.grid)
            programs = torch.tensor(grid, dtype=torch.int32, device=device)
            slots = torch.zeros(layers, max(grid) // split_map.batch, 3, dtype=torch.int32)
            for i in range(layers):
                own = torch.from_numpy(split_map.slots(i))
                slots[i, : len(own)] = own
            splits = torch.from_numpy(split_map.splits)
            splits = torch.stack([splits.cumsum(1) - splits, splits], dim=2).to(torch.int32)

        def written(count: int, width: int) -> torch.Tensor:
            return torch.zeros(layers, count, width, dtype=torch.int32, device=device)

        return Dispatch(
            batch=split_map.batch,
            grid=grid,
            stretched=stretched,
            readers=readers,
            programs=programs,
            slots=slots.to(device),
            splits=splits.to(device),
            shared=torch.from_numpy(alone(split_map.batch, readers)).to(device),
            starts=written(max(grid) + 1, START),
            pieces=written(most_pieces(split_map.batch, heads, readers) + 1, PIECE),
            merges=written(split_map.batch * heads, MERGE),
        )


def most_pieces(batch: int, heads: int, readers: int) -> int:
    """Of a line: every leader has at least one other reader."""
    return (batch + (batch // 2 if readers > 1 else 0)) * heads


def dispatch_step(
    dispatch: Dispatch,
    tables: LayerTables,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    n_win: torch.Tensor,
    overhead: int = OVERHEAD,
    least: int = LEAST,
) -> None:
    """Cut the lines of all layers for one decode step, into ``dispatch``'s buffers.

    Args:
        dispatch: of this batch size.
        tables: where heads lie.
        rows: [B] int, rows of the page table; 0 is padding and gets no work.
        seq_lens: [B] int, tokens of each request, the new one included.
        n_win: [B] int, sealed windows that the new token sees.
        overhead, least: cost of a head and least share of a program, in pages; for benches.
    """
    layers, heads = tables.kept_pages.shape
    # One warp a program: with several, Triton 3.6 fails to compile this kernel for 32 requests. For
    # more than 256, one warp takes minutes to compile and spills; there, eight do without.
    block, warps = (32, 1) if dispatch.batch <= 256 else (16, 8)
    width = max(dispatch.starts.shape[1], dispatch.pieces.shape[1])
    dispatch_kernel[(triton.cdiv(width, block), layers)](
        rows=rows,
        seq_lens=seq_lens,
        n_win=n_win,
        shared=dispatch.shared,
        kept_pages=tables.kept_pages,
        pages_before=tables.pages_before,
        table_offset=tables.table_offset,
        ring_offset=tables.ring_offset,
        column=tables.column,
        sliding=tables.sliding,
        rings=tables.ring,
        programs=dispatch.programs,
        slots=dispatch.slots,
        splits=dispatch.splits,
        starts=dispatch.starts,
        pieces=dispatch.pieces,
        merges=dispatch.merges,
        batch=dispatch.batch,
        slots_stride=dispatch.slots.stride(0),
        starts_stride=dispatch.starts.shape[1],
        pieces_stride=dispatch.pieces.shape[1],
        merges_stride=dispatch.merges.shape[1],
        H=heads,
        W=tables.window,
        P=tables.page,
        BB=triton.next_power_of_2(dispatch.batch),
        BH=triton.next_power_of_2(heads),
        BC=block,
        STRETCHED=dispatch.stretched,
        SHARING=dispatch.readers > 1,
        OVERHEAD=overhead,
        LEAST=least,
        START=START,
        PIECE=PIECE,
        MERGE=MERGE,
        RECORD=READERS + dispatch.readers,
        num_warps=warps,
    )
