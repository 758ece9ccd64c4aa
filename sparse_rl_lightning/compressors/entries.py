"""Helpers for scores: live entries in float32, newest token and queries, fresh draws, comparable scores."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparse_rl_lightning.ops.keyed_random import hash_uniform
from sparse_rl_lightning.ops.pools import accumulation_dtype
from sparse_rl_lightning.records import LayerState

ROUNDING = 2.0**-18
"""What float32 may be off by in a score that is a sum over a head's channels, as a share of it; with room."""


def live_entries(tensor: Tensor, valid: Tensor) -> Tensor:
    """Keys or values (S, H, N, D) to sum over: float32 or better, 0 in free memory."""
    return tensor.to(accumulation_dtype(tensor.dtype)).masked_fill(~valid.unsqueeze(-1), 0.0)


def newest_position(layer: LayerState) -> Tensor:
    """The true position (S,) of the last token of each sequence, which every head has."""
    return layer.positions.masked_fill(~layer.valid, -1).amax(dim=(1, 2))


def fresh_draws(layer: LayerState) -> Tensor:
    """Random numbers (S, H, N) in (0, 1), others at every compression, for a class with ``needs_layer_index = True``.

    They depend on nothing but the sequence, its newest token, layer, head and position: in any batch and slot a
    sequence draws the same.
    """
    heads = torch.arange(layer.positions.shape[1], device=layer.positions.device)[:, None]
    newest = newest_position(layer)[:, None, None]
    keys = layer.sequence_keys[:, None, None]  # the prompt's, until its samples begin
    return hash_uniform(keys, newest, layer.layer_index, heads, layer.positions)


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
    live_scores = scores.masked_fill(~valid, torch.inf).contiguous()
    lower = torch.searchsorted(live_scores.sort(dim=-1).values, live_scores, side="left")
    ranks = lower.to(torch.float32) / (valid.sum(dim=-1, keepdim=True) - 1).clamp(min=1)
    return ranks.masked_fill(scores == torch.inf, torch.inf)


def standardized(scores: Tensor, valid: Tensor) -> Tensor:
    """Scores (..., N) minus their mean, divided by their standard deviation, over the live entries of each row.

    Infinite scores do not count, and are left unchanged. Scores in free memory are undefined. A deviation within the
    rounding of the scores, such as of the norms of one repeated token's keys, counts as that rounding: it would
    otherwise be blown up to order 1.
    """
    counted = valid & scores.isfinite()
    number = counted.sum(dim=-1, keepdim=True).clamp(min=1)
    finite = scores.masked_fill(~counted, 0.0)
    centered = (finite - finite.sum(dim=-1, keepdim=True) / number).masked_fill(~counted, 0.0)
    variance = centered.square().sum(dim=-1, keepdim=True) / number
    rounding = (finite.detach().abs().amax(dim=-1, keepdim=True) * ROUNDING).square().clamp(min=1e-12)
    deviation = torch.maximum(variance, rounding).sqrt()  # before the root, whose slope at 0 is infinite
    return torch.where(counted, centered / deviation, scores)
