"""How the attention output's error falls as more of one window is kept, head by head.

The queries are those that would see the window sealed: W positions from (j + 1)W + R on, of which
every ``W / QUERIES``-th is taken. All else is kept in full, so the curve is the window's own doing.
The error is the mean over queries of the squared norm of the difference after the output projection's
columns of that head's query heads: what the head adds to the residual stream that it should not.

Device-agnostic torch. Memory: one layer's [HQ, QUERIES, tokens so far] attention weights at a time.
"""

from collections.abc import Sequence

import torch

QUERIES = 64
# of 32 parts of a window: fine where curves are steep
PARTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32)


def grid(window: int) -> list[int]:
    """Tokens kept at each point of a curve; the last is the whole window, whose error is 0."""
    return sorted({max(1, window * part // 32) for part in PARTS})


def query_positions(first: int, window: int) -> torch.Tensor:
    """Positions of the queries taken, from ``first`` on."""
    return torch.arange(first, first + window, max(1, window // QUERIES))


def selection_order(scores: torch.Tensor, sinks: int) -> torch.Tensor:
    """Offsets of a window, [H, W], in the order in which a head gives them room.

    Sinks first, then by score [H, W], ties to the lower position, as selection when serving.
    """
    scores = scores.clone()
    scores[:, :sinks] = torch.inf
    return torch.argsort(scores, dim=1, descending=True, stable=True)


def head_gram(projection: torch.Tensor, q_heads: int, kv_heads: int) -> torch.Tensor:
    """W^T W of each KV head's columns of an output projection [hidden, HQ * D]: [H, rD, rD]."""
    if projection.shape[1] % q_heads:
        raise ValueError(
            f"an output projection of {projection.shape[1]} columns for {q_heads} query heads, expected a "
            "multiple of them"
        )
    columns = projection.float().unflatten(1, (kv_heads, -1)).permute(1, 0, 2)
    return columns.transpose(1, 2) @ columns


def error_curves(
    q: torch.Tensor,
    positions: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    order: torch.Tensor,
    gram: torch.Tensor,
    scaling: float,
    points: Sequence[int],
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Error of every head when ``points`` tokens of one window are kept, [H, len(points)] fp32.

    Also returns the power of each head's undisturbed output in the same measure, [H].

    Args:
        q: [Q, HQ, D] queries after RoPE, at ``positions`` [Q].
        k, v: [N, H, D] every token up to the last query.
        start: first token of the window.
        order: [H, W], see ``selection_order``.
        gram: [H, rD, rD], see ``head_gram``.
        scaling: factor on q.k before the softmax.
        points: as ``grid`` gives them.
        sinks: [HQ], logits that join each softmax without a value, or None.
    """
    heads, window = order.shape
    q = q.float().unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [H, r, Q, D]
    k, v = k.float().transpose(0, 1), v.float().transpose(0, 1)  # [H, N, D]
    logits = torch.einsum("hrqd,hnd->hrqn", q, k) * scaling
    unseen = torch.arange(k.shape[1], device=k.device) > positions.to(k.device)[:, None]
    logits.masked_fill_(unseen, -torch.inf)
    weights, lost = logits.softmax(dim=-1), 0.0
    if sinks is not None:
        # what a sink takes of each softmax
        taken = sinks.float().view(heads, -1, 1) - logits.logsumexp(dim=-1)
        lost = taken.sigmoid()
        weights *= (-taken).sigmoid()[..., None]
    full = torch.einsum("hrqn,hnd->hrqd", weights, v)
    chosen = start + order
    at = chosen[:, None, None, :].expand(*weights.shape[:3], -1)
    mine, values = weights.gather(-1, at), v.gather(1, chosen[..., None].expand(-1, -1, v.shape[2]))
    weights.scatter_(-1, at, 0.0)
    mass, output = weights.sum(dim=-1) + lost, torch.einsum("hrqn,hnd->hrqd", weights, v)
    errors, first = [], 0
    for point in points:
        part = mine[..., first:point]
        output = output + torch.einsum("hrqn,hnd->hrqd", part, values[:, first:point])
        mass = mass + part.sum(dim=-1)
        first = point
        # the tokens that stay take all of the weight; the recent ones always do
        errors.append(_power(output / mass[..., None] - full, gram))
    if first == window:
        errors[-1].zero_()
    return torch.stack(errors, dim=1), _power(full, gram)


def _power(x: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Mean over queries of |W x|^2, [H]; x [H, r, Q, D]."""
    rows = x.permute(0, 2, 1, 3).flatten(2)
    return ((rows @ gram) * rows).sum(dim=-1).clamp(min=0).mean(dim=-1)
