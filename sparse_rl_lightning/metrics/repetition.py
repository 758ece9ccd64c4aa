"""Repetition within a completion: the visible failure of sequences whose cache forgot too much."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError

NGRAM = 4
"""Number of tokens in a phrase: short enough to catch loops of any length, long enough to spare plain grammar."""


def repetition_rates(sequences: Tensor, mask: Tensor, n: int = NGRAM) -> Tensor:
    """The share of a completion's n-grams that are repeats of earlier ones.

    A text without any repeated phrase has 0; one that ends in a loop approaches 1. Completions of fewer than n
    tokens have 0. Phrases are compared exactly, not by hash.

    Args:
        sequences: Token ids (B, T).
        mask: Completion tokens (B, T), bool, without gaps.
        n: Number of tokens in a phrase.

    Returns:
        The shares (B,), between 0 and 1.

    Raises:
        ValueError: If ``n`` is not positive.
    """
    if n < 1:
        raise UserError(f"n must be at least 1 token, got n={n}.")
    if sequences.shape[1] < n or not sequences.numel():
        return torch.zeros(sequences.shape[0], device=sequences.device)
    phrases = _phrase_ids(sequences, n)  # (B, T - n + 1)
    inside = mask[:, : phrases.shape[1]] & mask[:, n - 1 :]
    rows = torch.arange(len(sequences), device=sequences.device)[:, None].expand_as(phrases)
    pairs = torch.stack([rows[inside], phrases[inside]])
    distinct = torch.unique(pairs[0] * (phrases.max() + 1) + pairs[1]) // (phrases.max() + 1)
    different = torch.bincount(distinct, minlength=len(sequences))
    count = inside.sum(dim=1)
    return (count - different) / count.clamp(min=1)


def _phrase_ids(sequences: Tensor, n: int) -> Tensor:
    """A number for each phrase (B, T - n + 1), the same for the same n tokens; tokens are added one at a time."""
    ids, tokens = sequences, int(sequences.max()) + 1
    for offset in range(1, n):
        longer = ids[:, :-1] * tokens + sequences[:, offset:]
        ids = torch.unique(longer, return_inverse=True)[1]
    return ids
