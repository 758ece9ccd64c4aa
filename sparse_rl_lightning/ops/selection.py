"""Selection of the entries of a slot that survive a compression, and their compaction."""

from __future__ import annotations

import torch
from torch import Tensor


def select_entries(
    scores: Tensor, valid: Tensor, positions: Tensor, budget: int | Tensor, num_sinks: int, window: int
) -> Tensor:
    """Select the entries to keep: the first positions, the most recent entries, and the best scores among the rest.

    Entries are in the order of their positions, live ones first. Exact ties go to the lowest index. A row
    with no more live entries than its budget keeps all of them.

    Args:
        scores: Scores (S, H, N), float, higher is kept; -inf is allowed, NaN is not.
        valid: Mask (S, H, N), bool, of the live entries.
        positions: True token positions (S, H, N).
        budget: Number of entries to keep per (slot, head): a number, or a tensor that broadcasts to (S, H).
        num_sinks: Number of first positions that are always kept.
        window: Number of last live entries that are always kept.
    """
    pinned = pinned_entries(valid, positions, num_sinks, window)
    rank = rank_entries(scores, valid.to(torch.int8) + pinned.to(torch.int8))  # 2 pinned, 1 live, 0 free memory
    limit = budget.unsqueeze(-1) if isinstance(budget, Tensor) else budget
    return valid & (rank < limit)


def pinned_entries(valid: Tensor, positions: Tensor, num_sinks: int, window: int) -> Tensor:
    """The live entries (S, H, N), bool, that no score can evict, as in :func:`select_entries`."""
    index = torch.arange(valid.shape[-1], device=valid.device)
    return valid & ((positions < num_sinks) | (index >= valid.sum(dim=-1, keepdim=True) - window))


def rank_entries(scores: Tensor, classes: Tensor) -> Tensor:
    """Rank the entries of each row (..., N), int64, 0 for the best; exact ties go to the lowest index.

    Every entry of a higher class, int8, comes before every entry of a lower one. Scores have no NaN.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, classes.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    index = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, index)


def compaction_order(keep: Tensor) -> tuple[Tensor, Tensor]:
    """Find where each kept entry (..., N) comes from when the survivors of a row close up without changing order.

    It is the index of the entry that moves to each place, survivors first; with it comes their number (...).
    """
    return keep.to(torch.uint8).argsort(dim=-1, descending=True, stable=True), keep.sum(dim=-1)
