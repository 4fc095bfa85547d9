"""Where entries lie in the pool, in plain PyTorch.

The pool is ``[pages, H_p, K and V, P, D]``; seen as rows of D, the K of slot t in column c of a
page is row ``((page * H_p + c) * 2) * P + t`` and its V is P rows further on. Every function
here returns the row of column 0's K; ``column_rows`` moves it to other columns.
"""

import torch


def column_rows(rows: torch.Tensor, columns: torch.Tensor, page: int) -> torch.Tensor:
    """Rows of other columns.

    Args:
        rows: [H, N] int64, K rows of column 0.
        columns: [H] int64, a column for each line of ``rows``.
        page: P.
    """
    return rows + columns[:, None] * (2 * page)


def page_rows(pages: torch.Tensor, per_group: int, page: int) -> torch.Tensor:
    """K rows of every slot of ``pages`` [G, N] in column 0, as [G, N * P] int64."""
    slot = torch.arange(page, device=pages.device)
    return (pages.long()[..., None] * (2 * per_group * page) + slot).flatten(-2)


def entry_rows(
    table: torch.Tensor,
    offset: torch.Tensor,
    ring_offset: torch.Tensor,
    ring: int,
    sealed: torch.Tensor,
    tail_start: int,
    n: int,
    per_group: int,
    page: int,
) -> torch.Tensor:
    """K rows of all entries that groups of one kind hold for one request.

    Args:
        table: [E] int32, the request's row of the page table.
        offset, ring_offset: [G] int64, where each group's sealed pages and ring start in it.
        ring: ring entries of each group.
        sealed: [G] int64, sealed entries of each group; whole pages.
        tail_start: first raw token.
        n: tokens stored.
        per_group, page: H_p and P.

    Returns:
        [G, max(sealed) + n - tail_start] int64. Line g holds its ``sealed[g]`` sealed entries,
        then its tail; what is left of the line repeats its last entry, so every row is a valid
        one to read.
    """
    i = torch.arange(int(sealed.max()) + n - tail_start, device=table.device)
    i = torch.minimum(i, (sealed + n - tail_start - 1)[:, None])
    is_sealed = i < sealed[:, None]
    token = i - sealed[:, None] + tail_start
    entry = torch.where(
        is_sealed,
        offset[:, None] + i // page,
        ring_offset[:, None] + token // page % ring,
    )
    slot = torch.where(is_sealed, i, token) % page
    return table[entry].long() * (2 * per_group * page) + slot
