"""select_and_compact, select_and_store: which entries stay, moved together, and when the others died."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import KVPools, check, check_numbers, check_runs, check_slots, gather_heads
from sparse_rl_lightning.ops.select import compaction_order, select_entries


def select_and_compact(
    pools: KVPools,
    slots: Tensor,
    scores: Tensor,
    budgets: Tensor,
    num_sinks: int,
    window: int,
    seen: Tensor,
    death: Tensor | None = None,
    state_pool: Tensor | None = None,
) -> None:
    """Evict all but the best entries of these slots, in all layers, in place and in order.

    Kept are positions below ``num_sinks``, the last ``window`` entries and the best scores among the rest; ties go to
    the lowest index, NaN counts as -inf, and a head within its budget keeps everything. If more entries are pinned
    than the budget allows, the scores decide among the pinned.

    Args:
        pools: All layers, (L, S, H); keys, values, positions and lengths change.
        slots: (B) int64, each slot at most once, -1 for a row to skip.
        scores: (L, B, H, N) float32, higher is kept.
        budgets: (L, B, H) int32, entries to keep.
        num_sinks: First positions that are never evicted.
        window: Last entries that are never evicted.
        seen: (S) int64, tokens fed so far: from the query at this position on, the evicted are invisible.
        death: (L, S, H, T) int32, gets ``seen`` at the positions of the evicted.
        state_pool: (R, C) float32, running state of each entry, moved along.

    Raises:
        ValueError: If a tensor has the wrong shape, type, device or layout.
    """

    def check_all() -> None:
        _check(pools, slots, scores, budgets, num_sinks, window, seen, death)
        check("state_pool", state_pool, pools.keys, torch.float32, (pools.keys.shape[0], None))

    call(
        "select_and_compact", pools.keys, check_all, scores, budgets, num_sinks, window, slots, seen, pools.offsets,
        pools.keys, pools.values, pools.positions, pools.lengths, death, state_pool, pools.errors,
    )  # fmt: skip


def select_and_store(
    pools: KVPools,
    slots: Tensor,
    scores: Tensor,
    budgets: Tensor,
    num_sinks: int,
    window: int,
    seen: Tensor,
    source: KVPools,
    death: Tensor | None = None,
) -> None:
    """Copy the best entries of freshly read prompts into their slots, replacing what was there.

    Args:
        pools: All layers, (L, S, H).
        slots: (B) int64, where each prompt goes, -1 for a row to skip.
        scores: (L, B, H, N) float32, as for :func:`select_and_compact`.
        budgets: (L, B, H) int32, entries to keep, no more than the slot's capacity.
        num_sinks: First positions that are never evicted.
        window: Last entries that are never evicted.
        seen: (S) int64, the prompts' lengths.
        source: The prompts, other memory, offsets and lengths (L, B, H); entry i stands at position i. Its own
            positions and capacities are not used.
        death: (L, S, H, T) int32, gets ``seen`` at the positions of the evicted.

    Raises:
        ValueError: If a tensor has the wrong shape, type, device or layout.
    """

    def check_all() -> None:
        _check(pools, slots, scores, budgets, num_sinks, window, seen, death)
        check("source.keys", source.keys, pools.keys, pools.keys.dtype, (None, pools.keys.shape[1]))
        check("source.values", source.values, pools.keys, pools.keys.dtype, source.keys.shape)
        check("source.offsets", source.offsets, pools.keys, torch.int64, budgets.shape)
        check("source.lengths", source.lengths, pools.keys, torch.int32, budgets.shape)

    call(
        "select_and_store", pools.keys, check_all, scores, budgets, num_sinks, window, source.keys, source.values,
        source.offsets, source.lengths, slots, seen, pools.offsets, pools.capacities, pools.keys, pools.values,
        pools.positions, pools.lengths, death, pools.errors,
    )  # fmt: skip


def _check(
    pools: KVPools, slots: Tensor, scores: Tensor, budgets: Tensor, num_sinks: int, window: int, seen: Tensor,
    death: Tensor | None,
) -> None:  # fmt: skip
    pools.check(3)
    num_layers, num_slots, num_heads = pools.offsets.shape
    check("slots", slots, pools.keys, torch.int64, (None,))
    check("scores", scores, pools.keys, torch.float32, (num_layers, len(slots), num_heads, None))
    check("budgets", budgets, pools.keys, torch.int32, scores.shape[:3])
    check("seen", seen, pools.keys, torch.int64, (num_slots,))
    check("death", death, pools.keys, torch.int32, (num_layers, num_slots, num_heads, None))
    if num_sinks < 0 or window < 0:
        raise UserError(f"num_sinks and window must not be negative, got num_sinks={num_sinks}, window={window}.")


def compact_reference(
    scores: Tensor, budgets: Tensor, num_sinks: int, window: int, slots: Tensor, seen: Tensor, offsets: Tensor,
    key_pool: Tensor, value_pool: Tensor, position_pool: Tensor, lengths: Tensor, death: Tensor | None,
    state_pool: Tensor | None, errors: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``select_and_compact`` in PyTorch."""
    check_runs(slots, offsets, lengths, scores.shape[3], len(key_pool))
    check_numbers("a budget", budgets[:, slots >= 0])
    used = (slots >= 0).nonzero().squeeze(1)
    slots = slots[used]
    rows, live = gather_heads(offsets[:, slots], lengths[:, slots], scores.shape[3])  # (L, B, H, N)
    positions = position_pool[rows]
    keep = _keep(scores[:, used], budgets[:, used], num_sinks, window, live, positions)
    order, kept = compaction_order(keep)
    source = rows.gather(-1, order)
    stays = torch.arange(scores.shape[3], device=scores.device) < kept.unsqueeze(-1)
    pools = [key_pool, value_pool, position_pool] + ([state_pool] if state_pool is not None else [])
    for pool in pools:
        pool[rows[stays]] = pool[source[stays]]  # the right side is a copy: places may overlap
    lengths[:, slots] = kept.to(torch.int32)
    _record(death, slots, seen, live & ~keep, positions)


def store_reference(
    scores: Tensor, budgets: Tensor, num_sinks: int, window: int, source_keys: Tensor, source_values: Tensor,
    source_offsets: Tensor, source_lengths: Tensor, slots: Tensor, seen: Tensor, offsets: Tensor, capacities: Tensor,
    key_pool: Tensor, value_pool: Tensor, position_pool: Tensor, lengths: Tensor, death: Tensor | None,
    errors: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``select_and_store`` in PyTorch."""
    check_slots(slots, offsets)
    check_numbers("a budget", budgets[:, slots >= 0])
    used = (slots >= 0).nonzero().squeeze(1)
    rows_read = torch.arange(len(used), device=used.device)
    check_runs(rows_read, source_offsets[:, used], source_lengths[:, used], scores.shape[3], len(source_keys))
    slots = slots[used]
    rows, live = gather_heads(source_offsets[:, used], source_lengths[:, used], scores.shape[3])
    positions = torch.arange(scores.shape[3], dtype=torch.int32, device=scores.device).expand_as(rows)
    keep = _keep(scores[:, used], budgets[:, used], num_sinks, window, live, positions)
    order, kept = compaction_order(keep)
    if bool((kept > capacities[:, slots]).any()):
        raise RuntimeError("a budget exceeds the capacity of its slot.")
    stays = positions < kept.unsqueeze(-1)
    place = (offsets[:, slots].unsqueeze(-1) + positions)[stays]
    source = rows.gather(-1, order)[stays]
    key_pool[place] = source_keys[source]
    value_pool[place] = source_values[source]
    position_pool[place] = order[stays].to(torch.int32)
    lengths[:, slots] = kept.to(torch.int32)
    _record(death, slots, seen, live & ~keep, positions)


def _keep(scores: Tensor, budgets: Tensor, num_sinks: int, window: int, live: Tensor, positions: Tensor) -> Tensor:
    ranked = scores.masked_fill(scores.isnan(), -torch.inf)
    ranked, valid, at, limits = (t.flatten(0, 1) for t in (ranked, live, positions, budgets))
    return select_entries(ranked, valid, at, limits, num_sinks, window).view_as(live)


def _record(death: Tensor | None, slots: Tensor, seen: Tensor, evicted: Tensor, positions: Tensor) -> None:
    if death is None:
        return
    layer, row, head, entry = evicted.nonzero(as_tuple=True)
    slot, position = slots[row], positions[layer, row, head, entry].long()
    check_numbers("a position in the death record", position, death.shape[3])
    death[layer, slot, head, position] = seen[slot].to(torch.int32)


register("select_and_compact", compact_reference)
register("select_and_store", store_reference)
