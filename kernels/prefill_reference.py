"""Prefill attention of one request: every query in its own epoch, in plain PyTorch."""

import torch

from tangram_sglang.kernels.sink_reference import attend_with_sinks
from tangram_sglang.plan.window import WindowRule


def prefill_reference(
    q: torch.Tensor,
    sealed_k: torch.Tensor,
    sealed_v: torch.Tensor,
    raw_k: torch.Tensor,
    raw_v: torch.Tensor,
    raw_start: int,
    rule: WindowRule,
    scaling: float,
    floor: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Full attention of KV heads that keep equally many entries of a window.

    Args:
        q: [H, r, T, D], the last T tokens of the request, r query heads per KV head.
        sealed_k, sealed_v: [H, windows * K, D], kept entries of windows 0, 1, ...
        raw_k, raw_v: [H, M, D], every token from ``raw_start`` to the last one.
        raw_start: a window border at or below the first epoch of the queries.
        rule: windows and epochs.
        scaling: factor on q.k.
        floor: windows that even the first query sees sealed.
        sinks: [H, r], logits that join each softmax without a value.

    Returns:
        [H, r, T, D].
    """
    n1 = raw_start + raw_k.shape[1]
    position = n1 - q.shape[2]
    windows = rule.sealed(n1, floor)
    kept = sealed_k.shape[1] // windows if windows else 0
    pieces = []
    while position < n1:
        epoch = rule.sealed(position + 1, floor)
        end = min(n1, rule.epoch_end(epoch, floor))
        first, last = epoch * rule.window - raw_start, end - raw_start
        seen = epoch * kept
        k = torch.cat([sealed_k[:, :seen], raw_k[:, first:last]], dim=1)
        v = torch.cat([sealed_v[:, :seen], raw_v[:, first:last]], dim=1)
        token = torch.arange(epoch * rule.window, end, device=q.device)
        query = torch.arange(position, end, device=q.device)
        causal = token <= query[:, None]
        mask = torch.cat([causal.new_ones(len(query), seen), causal], dim=1)
        part = q[:, :, q.shape[2] - (n1 - position) : q.shape[2] - (n1 - end)]
        pieces.append(_attend(part, k, v, mask, scaling, sinks))
        position = end
    return torch.cat(pieces, dim=2)


def sliding_reference(
    q: torch.Tensor,
    raw_k: torch.Tensor,
    raw_v: torch.Tensor,
    sliding_window: int,
    scaling: float,
    sinks: torch.Tensor | None = None,
    tile: int = 512,
) -> torch.Tensor:
    """Sliding-window attention; a query sees itself and the ``sliding_window - 1`` before it.

    Args:
        q: [H, r, T, D], the last T tokens.
        raw_k, raw_v: [H, M, D], the last M tokens; all that the queries see.
        sinks: [H, r], logits that join each softmax without a value.
        tile: queries that share one mask.
    """
    pieces, past = [], raw_k.shape[1] - q.shape[2]
    for start in range(0, q.shape[2], tile):
        end = min(q.shape[2], start + tile)
        first = max(0, past + start - sliding_window + 1)
        token = torch.arange(first, past + end, device=q.device)
        query = torch.arange(past + start, past + end, device=q.device)[:, None]
        mask = (token <= query) & (token > query - sliding_window)
        k, v = raw_k[:, first : past + end], raw_v[:, first : past + end]
        pieces.append(_attend(q[:, :, start:end], k, v, mask, scaling, sinks))
    return torch.cat(pieces, dim=2)


def _attend(q, k, v, mask, scaling, sinks) -> torch.Tensor:
    shape = (-1, q.shape[1], -1, -1)
    k, v = k[:, None].expand(shape), v[:, None].expand(shape)
    sinks = None if sinks is None else sinks[:, :, None, None]
    return attend_with_sinks(q, k, v, mask, scaling, sinks)
