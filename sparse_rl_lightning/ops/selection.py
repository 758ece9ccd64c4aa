"""Which entries of a slot survive a compression, and moving them together."""

from __future__ import annotations

import torch
from torch import Tensor


def select_entries(
    scores: Tensor,
    valid: Tensor,
    positions: Tensor,
    budget: int | Tensor,
    num_sinks: int,
    window: int,
) -> Tensor:
    """The entries to keep: the first positions, the most recent entries, and the best scores among the rest.

    Entries stand in the order of their positions, live ones first. Exact ties go to the lowest index. A row
    with no more live entries than its budget keeps all of them.

    Args:
        scores: (S, H, N) float, higher is kept; -inf is allowed, NaN is not.
        valid: (S, H, N) bool, live entries.
        positions: (S, H, N) true token positions.
        budget: Entries to keep per (slot, head): a number, or a tensor that broadcasts to (S, H).
        num_sinks: Entries at positions below this are always kept.
        window: The last ``window`` live entries are always kept.

    Returns:
        (S, H, N) bool, the entries that stay.
    """
    pinned = pinned_entries(valid, positions, num_sinks, window)
    rank = rank_entries(scores, valid.to(torch.int8) + pinned.to(torch.int8))  # 2 pinned, 1 live, 0 free memory
    limit = budget.unsqueeze(-1) if isinstance(budget, Tensor) else budget
    return valid & (rank < limit)


def pinned_entries(valid: Tensor, positions: Tensor, num_sinks: int, window: int) -> Tensor:
    """The live entries that no score can evict, as in :func:`select_entries`: (S, H, N) bool."""
    index = torch.arange(valid.shape[-1], device=valid.device)
    return valid & ((positions < num_sinks) | (index >= valid.sum(dim=-1, keepdim=True) - window))


def rank_entries(scores: Tensor, classes: Tensor) -> Tensor:
    """The place of each entry in its row, 0 for the best.

    Args:
        scores: (..., N) float without NaN.
        classes: (..., N) int8: every entry of a higher class comes before every entry of a lower one.

    Returns:
        (..., N) int64; exact ties go to the lowest index.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, classes.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    index = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, index)


def compaction_order(keep: Tensor) -> tuple[Tensor, Tensor]:
    """Where each kept entry comes from when the survivors of a row close ranks without changing order.

    Args:
        keep: (..., N) bool.

    Returns:
        ``source`` (..., N): index of the entry that moves to each place, survivors first; and ``lengths`` (...),
        the number of survivors.
    """
    return keep.to(torch.uint8).argsort(dim=-1, descending=True, stable=True), keep.sum(dim=-1)
