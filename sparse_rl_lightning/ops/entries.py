"""CachedEntries: the entries of some slots in all layers, where the cache holds them; scores are computed from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparse_rl_lightning.ops.pools import FLOAT8, KVPools, accumulation_dtype, gather_heads

HeadReduction = Literal["max", "mean"]
"""Reduction over the heads that have a token: its best score, or the mean."""

AT_A_TIME = {"cpu": 64}  # heads that an op scores at the same time at most: each needs separate memory
AT_A_TIME_ON_DEVICE = 1024


@dataclass(frozen=True)
class CachedEntries:
    """Everything that the scoring ops read, without a copy: the pools, and numbers by slot.

    Tensors are indexed by slot as in ``ops/schemas.py``; scores (L, B, H, N) are by row of ``slots``.
    """

    pools: KVPools  # (L, S, H)
    slots: Tensor  # (B) int64, -1 for a row to skip
    seen: Tensor  # (S) int64, tokens fed so far
    queries: Tensor  # (L, S, Hq, A, D) ring of the most recent ones, that of position p at place p modulo A
    prompt_lengths: Tensor  # (S) int64
    prompt_keys: Tensor  # (S) int64
    sequence_keys: Tensor  # (S) int64
    state_pool: Tensor | None  # (R, C) float32, running numbers
    scale: float  # factor on q.k before the softmax
    width: int  # N, at least the entries of any head

    def scores(self) -> Tensor:
        """Memory (L, B, H, N) for scores."""
        p = self.pools
        layers, _, heads = p.offsets.shape
        computed = self.queries.dtype if p.keys.dtype == FLOAT8 else p.keys.dtype
        shape = (layers, len(self.slots), heads, self.width)
        return torch.empty(shape, dtype=accumulation_dtype(computed), device=p.keys.device)


def scratch_for(scores: Tensor, num_rows: int) -> Tensor:
    """Memory (X, Y, N) for the heads that are scored at the same time, ``num_rows`` rows for each."""
    most = AT_A_TIME.get(scores.device.type, AT_A_TIME_ON_DEVICE)
    count = max(1, min(most, scores[..., 0].numel()))
    return torch.empty(count, num_rows, scores.shape[-1], dtype=scores.dtype, device=scores.device)


def dense_pools(keys: Tensor, lengths: Tensor, positions: Tensor | None = None) -> tuple[KVPools, Tensor]:
    """Pools of one layer with the heads of (S, H, N, D) keys, and all their slots; contiguous keys are not copied."""
    slots, heads, width, dim = keys.shape
    count = slots * heads * width
    starts = torch.arange(0, count, max(width, 1), device=keys.device) if width else torch.zeros(slots * heads)
    counts = lengths.to(torch.int32).contiguous()[None]
    at = torch.zeros(0) if positions is None else positions.to(torch.int32).contiguous().view(-1)
    flat = keys.contiguous().view(count, dim)
    offsets = starts.to(keys.device, torch.int64).view(1, slots, heads)
    pools = KVPools(flat, flat, at, offsets, torch.full_like(counts, width), counts)
    return pools, torch.arange(slots, device=keys.device)


def heads_of(
    pool: Tensor, slots: Tensor, offsets: Tensor, lengths: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For the references: the rows of ``slots`` in use, their entries (L, B', H, N, ...) and which are live.

    Returns:
        Rows of the call (B',), entries, mask (L, B', H, N), and the rows (L, B', H, N) of the pool.
    """
    used = (slots >= 0).nonzero().squeeze(1)
    rows, live = gather_heads(offsets[:, slots[used]], lengths[:, slots[used]], width)
    return used, pool[rows.clamp(max=max(len(pool) - 1, 0))], live, rows


def shared_scores(scores: Tensor, positions: Tensor, valid: Tensor, reduction: HeadReduction) -> Tensor:
    """Give a token the same score in every head that has it: its best or its mean (S, H, N), 0 in free memory.

    Heads that always keep the same tokens have the same token at the same entry. Budgets per head, or a mixture with
    scores that differ from head to head, break that, so tokens are found by their positions, which increase over the
    live entries of a row.
    """
    assert reduction in ("max", "mean"), reduction
    ordered = positions.masked_fill(~valid, torch.iinfo(positions.dtype).max)
    wanted = ordered.flatten(1)  # (S, H x N)
    total = torch.zeros_like(scores) if reduction == "mean" else torch.full_like(scores, -torch.inf)
    holders = torch.zeros_like(scores)
    for head in range(scores.shape[1]):
        head_positions = ordered[:, head].contiguous()  # (S, N)
        index = torch.searchsorted(head_positions, wanted).clamp(max=head_positions.shape[1] - 1)
        matches = (head_positions.gather(1, index) == wanted).view_as(scores)  # free memory is masked at the end
        score = scores[:, head].gather(1, index).view_as(scores)
        total = torch.where(matches, torch.maximum(total, score) if reduction == "max" else total + score, total)
        holders += matches
    result = total if reduction == "max" else total / holders.clamp(min=1)
    return result.masked_fill(~valid, 0.0)
