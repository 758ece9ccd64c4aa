"""key_redundancy: similarity of every cached key to the others, R-KV's redundancy without its N x N matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.ops.checks import check_numbers
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import accumulation_dtype, dense_heads, live_entries

BLOCK_SIZE = 128
"""Number of columns that the reference searches at a time: its memory is O(N x BLOCK_SIZE)."""


def key_redundancy(keys: Tensor, lengths: Tensor, threshold: float = 0.5) -> Tensor:
    """Compute the mean cosine similarity of each key to the other keys of its row, without the last similar neighbors.

    R-KV (arXiv 2505.24133) builds the matrix of cosines with a zero diagonal, sets in every row i the entry of the
    last column j with cosine above ``threshold`` to zero, so that the most recent of similar tokens does not count as
    redundant, and takes the mean over the rows. All but those entries are linear in the keys: the sum over i of
    cos(i, j) is k_j . (sum_i k_i - k_j) for unit keys k. Only the search for the last similar column is pairwise; it
    goes backwards in blocks and stops when every row has found its own.

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
    dtype, shape = accumulation_dtype(keys.dtype), keys.shape[:3]
    redundancy = torch.empty(shape, dtype=dtype, device=keys.device)
    scratch = torch.empty(*shape[:2], 2, shape[-1], dtype=dtype, device=keys.device)
    held = lengths.to(torch.int32).contiguous()
    call("key_redundancy", keys, dense_heads(keys), held, threshold, redundancy, scratch)
    return redundancy


def reference(keys: Tensor, lengths: Tensor, threshold: float, redundancy: Tensor, scratch: Tensor) -> None:
    """The op ``key_redundancy`` in PyTorch."""
    check_numbers("a head's number of entries", lengths, keys.shape[2] + 1)
    if not redundancy.numel():
        return
    valid = live_entries(lengths, keys.shape[2])
    live = keys.to(redundancy.dtype).masked_fill(~valid.unsqueeze(-1), 0.0)
    unit = live / (torch.linalg.vector_norm(live, dim=-1, keepdim=True) + 1e-8)
    spared, cosine = _last_similar(unit, valid, threshold)
    total = (unit * (unit.sum(dim=-2, keepdim=True) - unit)).sum(dim=-1)
    redundancy.copy_(total.scatter_add(-1, spared, -cosine) / valid.sum(dim=-1, keepdim=True).clamp(min=1))


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
        found = pending & (last >= 0)
        index = torch.where(found, last, index)
        cosine = torch.where(found, block.gather(-1, (last - start).clamp(min=0).unsqueeze(-1)).squeeze(-1), cosine)
        pending = pending & ~found
        if not bool(pending.any()):
            break
    return index, cosine


register("key_redundancy", reference)
