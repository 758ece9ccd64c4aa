"""fork: copy the content of a slot to other slots."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.ops.checks import check_runs, check_slots
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import KVPools, gather_heads


def fork(
    pools: KVPools,
    sources: Tensor,
    destinations: Tensor,
    query_ring: Tensor | None = None,
    death: Tensor | None = None,
    state_pool: Tensor | None = None,
) -> None:
    """Copy the live entries of slots to other slots, in all layers, with their rings of queries and death records.

    Args:
        pools: Pools of all layers, (L, S, H).
        sources: Slots (B), int64, to copy from; a slot may be listed several times.
        destinations: Slots (B), int64, to copy to, distinct, none of them a source; -1 in either list skips the pair,
            and a pair of equal slots does nothing.
        query_ring: Recent queries (L, S, Hq, A, D).
        death: Numbers of events (L, S, H, T), uint8, int16 or int32, whose steps the caller copies.
        state_pool: Running state (R, C), float32.

    Raises:
        RuntimeError: On the CPU, if a destination is a source too or too small.
    """
    call(
        "fork", pools.keys, sources, destinations, pools.offsets, pools.capacities, pools.keys,
        pools.values, pools.positions, pools.lengths, query_ring, death, state_pool, pools.errors,
    )  # fmt: skip


def reference(
    sources: Tensor, destinations: Tensor, offsets: Tensor, capacities: Tensor, key_pool: Tensor, value_pool: Tensor,
    position_pool: Tensor, lengths: Tensor, query_ring: Tensor | None, death: Tensor | None, state_pool: Tensor | None,
    errors: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``fork`` in PyTorch."""
    check_runs(sources, offsets, lengths, capacities, len(key_pool))
    check_slots(destinations, offsets)
    used = ((sources >= 0) & (destinations >= 0) & (sources != destinations)).nonzero().squeeze(1)
    sources, destinations = sources[used], destinations[used]
    if bool(torch.isin(destinations, sources).any()):
        raise RuntimeError("a slot is both a destination and a source.")
    counts = lengths[:, sources]  # (L, B, H)
    if bool((counts > capacities[:, destinations]).any()):
        raise RuntimeError("a destination holds fewer entries than its source.")
    width = int(counts.max()) if counts.numel() else 0
    rows, live = gather_heads(offsets[:, sources], counts, width)
    places, _ = gather_heads(offsets[:, destinations], counts, width)
    rows, places = rows[live], places[live]
    for pool in [key_pool, value_pool, position_pool] + ([state_pool] if state_pool is not None else []):
        pool[places] = pool[rows]
    lengths[:, destinations] = counts
    for tensor in (query_ring, death):
        if tensor is not None:
            tensor[:, destinations] = tensor[:, sources]


register("fork", reference)
