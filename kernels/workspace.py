"""Where the programs of a decode launch leave their parts for the merge."""

from dataclasses import dataclass

import torch

from tangram_sglang.errors import TangramError
from tangram_sglang.kernels.dispatch import most_pieces


@dataclass(frozen=True, slots=True)
class Workspace:
    """Parts of one launch; all layers share it, one launch after the other.

    Attributes:
        mid: [parts, R G, D] fp32, outputs; a part that one request reads has the first G lines.
        lse: [parts, R G] fp32, their log-sum-exp in base 2.
    """

    mid: torch.Tensor
    lse: torch.Tensor

    # bytes above which a workspace is a mistake in the settings, not a need
    CAP = 1 << 30

    @staticmethod
    def parts(programs: int, batch: int, heads: int, readers: int) -> int:
        """Most parts: each starts with a program or with a piece of the line."""
        return programs + most_pieces(batch, heads, readers)

    @staticmethod
    def nbytes(
        programs: int, batch: int, heads: int, ratio: int, head_dim: int, readers: int
    ) -> int:
        """Bytes of a workspace: 4 R G (D + 1) a part."""
        parts = Workspace.parts(programs, batch, heads, readers)
        return 4 * parts * readers * ratio * (head_dim + 1)

    @staticmethod
    def build(
        programs: int,
        batch: int,
        heads: int,
        ratio: int,
        head_dim: int,
        readers: int,
        device: torch.device | str,
    ) -> "Workspace":
        """Buffers for launches of up to ``programs`` programs and ``batch`` requests.

        Args:
            programs, batch: largest grid and batch size.
            heads, ratio, head_dim, readers: H, G, D and R.
        """
        need = Workspace.nbytes(programs, batch, heads, ratio, head_dim, readers)
        if need > Workspace.CAP:
            raise TangramError(
                f"decode of {batch} requests in {programs} programs needs {need >> 20} MiB of "
                f"workspace, more than {Workspace.CAP >> 20}; lower --max-running-requests"
            )
        parts = Workspace.parts(programs, batch, heads, readers)
        return Workspace(
            mid=torch.empty(parts, readers * ratio, head_dim, device=device),
            lse=torch.empty(parts, readers * ratio, device=device),
        )
