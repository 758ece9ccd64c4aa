"""key_redundancy: similarity of every cached key to the others, R-KV's redundancy without its N x N matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.ops.checks import check_runs
from sparse_rl_lightning.ops.entries import CachedEntries, dense_pools, heads_of, scratch_for
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import accumulation_dtype

BLOCK_SIZE = 128
"""Number of columns that the reference searches at a time: its memory is O(N x BLOCK_SIZE)."""


def key_redundancy(keys: Tensor, lengths: Tensor, threshold: float = 0.5) -> Tensor:
    """Compute the mean cosine similarity of each key to the other keys of its row, without the last similar neighbors.

    R-KV (arXiv 2505.24133) builds the matrix of cosines with a zero diagonal, sets in every row i the entry of the
    last column j with cosine above ``threshold`` to zero, so that the most recent of similar tokens does not count as
    redundant, and takes the mean over the rows. All but those entries are linear in the keys: the sum over i of
    cos(i, j) is k_j . (sum_i k_i - k_j) for unit keys k. Only the search for the last similar column is pairwise; it
    goes backwards in blocks and stops when every row has one.

    Two details of the published code are kept. In a row without any similar neighbor the first entry is set to zero.
    With a threshold below 0 the zero on the diagonal counts as similar.

    Args:
        keys: Keys (S, H, N, D), live ones first; a view will do. The content of free memory is not used.
        lengths: Number of live entries (S, H).
        threshold: Cosine above which two keys are similar.

    Returns:
        The similarities (S, H, N), in each row a mean over its own live entries, before R-KV's softmax; 0 in free
        memory; float64 if the keys are, else float32.
    """
    pools, slots = dense_pools(keys, lengths)
    redundancy = torch.empty(1, *keys.shape[:3], dtype=accumulation_dtype(keys.dtype), device=keys.device)
    call(
        "key_redundancy", keys, pools.keys, slots, pools.offsets, pools.lengths, threshold, None, 0.0, redundancy,
        scratch_for(redundancy, 3),
    )  # fmt: skip
    return redundancy[0]


def cached_mixture(entries: CachedEntries, importance: Tensor, mix_lambda: float, threshold: float = 0.5) -> Tensor:
    """Mix the importance with the redundancy of the keys in all layers of the cache, as R-KV does.

    Args:
        entries: Entries of the cache.
        importance: Importance (L, B, H, N) of the same entries.
        mix_lambda: Weight of the importance, from 0 to 1.
        threshold: Cosine above which two keys are similar, as in :func:`key_redundancy`.

    Returns:
        ``mix_lambda * importance - (1 - mix_lambda) * softmax(redundancy)`` (L, B, H, N), the softmax over the live
        entries of a row; 0 in free memory and in rows to skip.
    """
    p, mixed = entries.pools, entries.scores()
    call(
        "key_redundancy", p.keys, p.keys, entries.slots, p.offsets, p.lengths, threshold, importance, mix_lambda, mixed,
        scratch_for(mixed, 3), p.errors,
    )  # fmt: skip
    return mixed


def reference(
    key_pool: Tensor, slots: Tensor, offsets: Tensor, lengths: Tensor, threshold: float, importance: Tensor | None,
    mix_lambda: float, redundancy: Tensor, scratch: Tensor, errors: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``key_redundancy`` in PyTorch."""
    check_runs(slots, offsets, lengths, redundancy.shape[-1], len(key_pool))
    used, keys, valid, _ = heads_of(key_pool, slots, offsets, lengths, redundancy.shape[-1])
    if not valid.numel():
        redundancy.zero_()
        return
    valid = valid.flatten(0, 1)
    live = keys.flatten(0, 1).to(redundancy.dtype).masked_fill(~valid.unsqueeze(-1), 0.0)
    unit = live / (torch.linalg.vector_norm(live, dim=-1, keepdim=True) + 1e-8)
    spared, cosine = _last_similar(unit, valid, threshold)
    total = (unit * (unit.sum(dim=-2, keepdim=True) - unit)).sum(dim=-1)
    result = total.scatter_add(-1, spared, -cosine) / valid.sum(dim=-1, keepdim=True).clamp(min=1)
    if importance is not None:
        share = result.masked_fill(~valid, -torch.inf).softmax(dim=-1)
        mixed = mix_lambda * importance[:, used].flatten(0, 1) - (1 - mix_lambda) * share
        result = mixed.masked_fill(~valid, 0.0)
    redundancy.zero_()
    redundancy[:, used] = result.view(len(offsets), -1, *result.shape[1:])


def _last_similar(unit: Tensor, valid: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The last column per row with cosine above the threshold, column 0 if none, and that cosine: (S, H, N) each."""
    num_entries = unit.shape[-2]
    index = torch.zeros(valid.shape, dtype=torch.int64, device=unit.device)
    cosine = (unit * unit[..., :1, :]).sum(dim=-1)
    cosine[..., 0] = 0.0
    pending = valid
    for stop in range(num_entries, 0, -BLOCK_SIZE):
        start = max(stop - BLOCK_SIZE, 0)
        block = torch.matmul(unit, unit[..., start:stop, :].mT)  # (S, H, N, columns)
        block[..., start:stop, :].diagonal(dim1=-2, dim2=-1).zero_()
        similar = (block > threshold) & valid[..., None, start:stop]
        last = torch.where(similar, torch.arange(start, stop, device=unit.device), -1).amax(dim=-1)
        is_last = pending & (last >= 0)
        index = torch.where(is_last, last, index)
        cosine = torch.where(is_last, block.gather(-1, (last - start).clamp(min=0).unsqueeze(-1)).squeeze(-1), cosine)
        pending = pending & ~is_last
        if not bool(pending.any()):
            break
    return index, cosine


register("key_redundancy", reference, differentiable=True)
