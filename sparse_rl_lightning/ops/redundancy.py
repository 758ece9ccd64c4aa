"""How much every cached key repeats the others: R-KV's redundancy without its N x N matrix."""

from __future__ import annotations

import torch
from torch import Tensor


def key_redundancy(keys: Tensor, valid: Tensor, threshold: float = 0.5, block_size: int = 128) -> Tensor:
    """Mean cosine similarity of each key to the other keys of its row, the last similar neighbours spared.

    R-KV (arXiv 2505.24133) builds the matrix of cosines with a zero diagonal, sets in every row i the entry of the
    last column j with cosine above ``threshold`` to zero, so that the most recent of similar tokens is not called
    redundant, and takes the mean over the rows. All but those entries are linear in the keys: the sum over i of
    cos(i, j) is k_j . (sum_i k_i - k_j) for unit keys k. Only the search for the last similar column is pairwise; it
    walks backwards in blocks and stops when every row has found its own. Memory is O(N x block_size).

    Two details of the published code are kept. A row without any similar neighbour spares its first entry. With a
    threshold below 0 the zero on the diagonal counts as similar.

    Args:
        keys: (S, H, N, D), live ones first. The content of free memory is not used.
        valid: (S, H, N) bool, live entries.
        threshold: Cosine above which two keys are similar.
        block_size: Columns searched at a time.

    Returns:
        (S, H, N), each row a mean over its own live entries, before R-KV's softmax; 0 in free memory; float64 if the
        keys are, else float32.
    """
    live = keys.to(torch.promote_types(keys.dtype, torch.float32)).masked_fill(~valid.unsqueeze(-1), 0.0)
    unit = live / (torch.linalg.vector_norm(live, dim=-1, keepdim=True) + 1e-8)
    with torch.autocast(keys.device.type, enabled=False):  # mixed-precision training would round the cosines
        spared, cosine = _last_similar(unit, valid, threshold, block_size)
    total = (unit * (unit.sum(dim=-2, keepdim=True) - unit)).sum(dim=-1)
    mean: Tensor = total.scatter_add(-1, spared, -cosine) / valid.sum(dim=-1, keepdim=True).clamp(min=1)
    return mean


def _last_similar(unit: Tensor, valid: Tensor, threshold: float, block_size: int) -> tuple[Tensor, Tensor]:
    """Per row the last column with cosine above the threshold, column 0 if none, and that cosine: (S, H, N) each."""
    num_entries = unit.shape[-2]
    index = torch.zeros(valid.shape, dtype=torch.int64, device=unit.device)
    cosine = (unit * unit[..., :1, :]).sum(dim=-1)
    cosine[..., 0] = 0.0
    pending = valid
    for stop in range(num_entries, 0, -block_size):
        start = max(stop - block_size, 0)
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
