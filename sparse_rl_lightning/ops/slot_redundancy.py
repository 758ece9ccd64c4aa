"""key_redundancy: how much every entry of a slot repeats the others, straight from the pools."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.ops.float8 import to_computed
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import KVPools, accumulation_dtype, check, check_runs, gather_heads
from sparse_rl_lightning.ops.redundancy import key_redundancy


def score_redundancy(pools: KVPools, slots: Tensor, num_entries: int, threshold: float = 0.5) -> Tensor:
    """Mean cosine similarity of each key to the other keys of its head, the last similar neighbours spared.

    The mathematics is that of :func:`sparse_rl_lightning.ops.redundancy.key_redundancy`.

    Args:
        pools: One layer, (S, H).
        slots: (B) int64, -1 for a row to skip.
        num_entries: N, no head holds more.
        threshold: Cosine above which two keys are similar.

    Returns:
        (B, H, N) float32 (float64 for float64 pools), 0 in free memory.

    Raises:
        ValueError: If a tensor has the wrong shape, type, device or layout.
    """
    shape, dtype = (slots.shape[0], pools.offsets.shape[1], num_entries), accumulation_dtype(pools.keys.dtype)
    redundancy = torch.empty(shape, dtype=dtype, device=pools.keys.device)
    scratch = redundancy.new_empty(*shape[:2], 2, num_entries)

    def check_all() -> None:
        pools.check(2)
        check("slots", slots, pools.keys, torch.int64, (None,))

    call(
        "key_redundancy", pools.keys, check_all, pools.keys, slots, pools.offsets, pools.lengths, threshold,
        redundancy, scratch, pools.errors,
    )  # fmt: skip
    return redundancy


def redundancy_reference(
    key_pool: Tensor, slots: Tensor, offsets: Tensor, lengths: Tensor, threshold: float, redundancy: Tensor,
    scratch: Tensor, errors: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``key_redundancy`` in PyTorch."""
    check_runs(slots, offsets, lengths, redundancy.shape[2], len(key_pool))
    used = slots >= 0
    slots = slots.clamp(min=0)
    rows, live = gather_heads(offsets[slots], lengths[slots] * used[:, None], redundancy.shape[2])
    if redundancy.numel():
        redundancy.copy_(key_redundancy(to_computed(key_pool[rows], redundancy.dtype), live, threshold))


register("key_redundancy", redundancy_reference)
