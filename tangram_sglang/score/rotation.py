"""RoPE in the layout SGLang calls neox: dimension i turns with dimension i + rotary_dim / 2."""

import torch


def rotate_back(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Undo a rotation of ``x`` [..., D] by angles whose cosines and sines are [..., rotary_dim / 2].

    With means of cosines and sines: the transpose of the mean rotation.
    """
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos + b * sin, b * cos - a * sin, rest], dim=-1)


def mean_rotation(
    inv_freq: torch.Tensor, start: int, positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Means of cosine and sine over ``positions`` positions from ``start``, [H, rotary_dim / 2]."""
    ahead = torch.arange(start, start + positions, dtype=torch.float64, device=inv_freq.device)
    angle = ahead[:, None, None] * inv_freq
    return angle.cos().mean(dim=0).float(), angle.sin().mean(dim=0).float()
