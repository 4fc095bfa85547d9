"""Where the programs of a decode launch leave their parts for the merge."""

from dataclasses import dataclass

import torch

from tangram_sglang.errors import TangramError


@dataclass(frozen=True, slots=True)
class Workspace:
    """Parts of one launch; all layers share it, one launch after the other.

    Attributes:
        mid: [parts, G, D] fp32, outputs.
        lse: [parts, G] fp32, their log-sum-exp in base 2.
    """

    mid: torch.Tensor
    lse: torch.Tensor

    # bytes above which a workspace is a mistake in the settings, not a need
    CAP = 1 << 30

    @staticmethod
    def parts(programs: int, batch: int, heads: int) -> int:
        """Most parts: each starts with a program or with a head of a request."""
        return programs + batch * heads

    @staticmethod
    def nbytes(programs: int, batch: int, heads: int, ratio: int, head_dim: int) -> int:
        """Bytes of a workspace: 4 G (D + 1) a part."""
        return 4 * Workspace.parts(programs, batch, heads) * ratio * (head_dim + 1)

    @staticmethod
    def build(
        programs: int,
        batch: int,
        heads: int,
        ratio: int,
        head_dim: int,
        device: torch.device | str,
    ) -> "Workspace":
        """Buffers for launches of up to ``programs`` programs and ``batch`` requests.

        Args:
            programs, batch: largest grid and batch size.
            heads, ratio, head_dim: H, G and D.
        """
        need = Workspace.nbytes(programs, batch, heads, ratio, head_dim)
        if need > Workspace.CAP:
            raise TangramError(
                f"decode of {batch} requests in {programs} programs needs {need >> 20} MiB of "
                f"workspace, more than {Workspace.CAP >> 20}; lower --cuda-graph-max-bs"
            )
        parts = Workspace.parts(programs, batch, heads)
        return Workspace(
            mid=torch.empty(parts, ratio, head_dim, device=device),
            lse=torch.empty(parts, ratio, device=device),
        )
