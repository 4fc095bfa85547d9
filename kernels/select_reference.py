"""Which tokens of a window stay: the top K of each head, in plain PyTorch."""

import torch


def select_reference(scores: torch.Tensor, kept: int, sinks: int) -> torch.Tensor:
    """Positions kept by heads that all keep ``kept`` tokens.

    Args:
        scores: [H, W] fp32, higher is kept; NaN ranks last.
        kept: K, at least ``sinks``.
        sinks: leading tokens kept whatever their score.

    Returns:
        [H, K] int64, ascending. Ties go to the lower position, on every device alike.
    """
    ranked = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).clone()
    ranked[:, :sinks] = torch.inf
    order = ranked.sort(dim=1, descending=True, stable=True).indices
    return order[:, :kept].sort(dim=1).values
