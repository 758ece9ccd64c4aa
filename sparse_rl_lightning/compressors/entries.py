"""Helpers for scores: live entries in float32, newest token and queries, comparable and shared scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from sparse_rl_lightning.ops.pools import accumulation_dtype
from sparse_rl_lightning.records import LayerState

HeadReduction = Literal["max", "mean"]
"""Reduction over the heads that have a token: its best score, or the mean."""

_NOWHERE = torch.iinfo(torch.int64).max


def live_entries(tensor: Tensor, valid: Tensor) -> Tensor:
    """Keys or values (S, H, N, D) to sum over: float32 or better, 0 in free memory."""
    return tensor.to(accumulation_dtype(tensor.dtype)).masked_fill(~valid.unsqueeze(-1), 0.0)


def newest_position(layer: LayerState) -> Tensor:
    """The true position (S,) of the last token of each sequence, which every head has."""
    return layer.positions.masked_fill(~layer.valid, -1).amax(dim=(1, 2))


def newest_queries(layer: LayerState, count: int) -> LayerState:
    """The same layer with only the ``count`` most recent queries in its ring."""
    if layer.queries.shape[2] <= count:
        return layer
    index = layer.query_positions.argsort(dim=-1, descending=True, stable=True)[:, :count]  # (S, count)
    rows = torch.arange(len(index), device=index.device)[:, None]
    queries = layer.queries.transpose(1, 2)[rows, index].transpose(1, 2)  # (S, Hq, count, D)
    return replace(layer, queries=queries, query_positions=layer.query_positions.gather(-1, index))


def normalized_ranks(scores: Tensor, valid: Tensor) -> Tensor:
    """The ranks (S, H, N) of scores: the share of a row's other live entries that are lower, from 0 to 1.

    Equal scores have equal ranks. A score of +inf, which means that the entry must stay, is left unchanged. Ranks in
    free memory are undefined.
    """
    known = scores.masked_fill(~valid, torch.inf).contiguous()
    lower = torch.searchsorted(known.sort(dim=-1).values, known, side="left")
    ranks = lower.to(torch.float32) / (valid.sum(dim=-1, keepdim=True) - 1).clamp(min=1)
    return ranks.masked_fill(scores == torch.inf, torch.inf)


def standardized(scores: Tensor, valid: Tensor) -> Tensor:
    """Scores (..., N) minus their mean, divided by their standard deviation, over the live entries of each row.

    Infinite scores do not count, and are left unchanged. Scores in free memory are undefined.
    """
    counted = valid & scores.isfinite()
    number = counted.sum(dim=-1, keepdim=True).clamp(min=1)
    finite = scores.masked_fill(~counted, 0.0)
    centered = (finite - finite.sum(dim=-1, keepdim=True) / number).masked_fill(~counted, 0.0)
    deviation = (centered.square().sum(dim=-1, keepdim=True) / number).sqrt()
    return torch.where(counted, centered / deviation.clamp(min=1e-6), scores)


def shared_scores(scores: Tensor, positions: Tensor, valid: Tensor, reduction: HeadReduction) -> Tensor:
    """Give a token the same score in every head that has it: its best or its mean (S, H, N), 0 in free memory.

    Heads that always keep the same tokens have the same token at the same entry. Budgets per head, or a mixture with
    scores that differ from head to head, break that, so tokens are found by their positions, which increase over the
    live entries of a row.
    """
    assert reduction in ("max", "mean"), reduction
    ordered = positions.masked_fill(~valid, _NOWHERE)
    wanted = ordered.flatten(1)  # (S, H x N)
    total = torch.zeros_like(scores) if reduction == "mean" else torch.full_like(scores, -torch.inf)
    holders = torch.zeros_like(scores)
    for head in range(scores.shape[1]):
        there = ordered[:, head].contiguous()  # (S, N)
        index = torch.searchsorted(there, wanted).clamp(max=there.shape[1] - 1)
        found = (there.gather(1, index) == wanted).view_as(scores)  # free memory is masked at the end
        score = scores[:, head].gather(1, index).view_as(scores)
        total = torch.where(found, torch.maximum(total, score) if reduction == "max" else total + score, total)
        holders += found
    result = total if reduction == "max" else total / holders.clamp(min=1)
    return result.masked_fill(~valid, 0.0)
