"""evict: the best entries of each head stay or are copied into a slot, and the death of the others is recorded.

The ranking is written once: compressors use ``select_entries``, budget rules and ``select_pages`` use ``rank_entries``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.checks import check_numbers, check_runs, check_slots
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import KVPools, gather_heads


def evict(
    pools: KVPools,
    slots: Tensor,
    scores: Tensor,
    budgets: Tensor,
    num_sinks: int,
    window: int,
    seen: Tensor,
    death: Tensor | None = None,
    state_pool: Tensor | None = None,
    source: KVPools | None = None,
    held: Tensor | None = None,
    event_steps: Tensor | None = None,
) -> None:
    """Evict all but the best entries of these slots, in all layers: in place, or while copying from a source.

    Positions below ``num_sinks``, the last ``window`` entries and the best scores among the rest are kept, in order;
    ties go to the lowest index, NaN counts as -inf, and a head within its budget keeps everything. If more entries are
    pinned than the budget allows, the scores decide among the pinned.

    Args:
        pools: Pools of all layers, (L, S, H); keys, values, positions and lengths change.
        slots: Slots (B), int64, each at most once, -1 for a row to skip.
        scores: Scores (L, B, H, N), float32, higher is kept.
        budgets: Number of entries to keep (L, B, H), int32; with a source no more than the slot's capacity.
        num_sinks: Number of first positions that are never evicted.
        window: Number of last entries that are never evicted.
        seen: Number of tokens fed so far (S), int64: the evicted are invisible to queries from this position on.
        death: Numbers of events (L, S, H, T), uint8, int16 or int32, set at the positions of the evicted to that of the
            event at ``seen``: its place among the slot's ``event_steps``.
        state_pool: Running state (R, C), float32, of each entry, moved along; in place only.
        source: Newly read prompts that replace the slots' content: other memory, offsets and lengths (L, B, H);
            entry i has position i. Its own positions and capacities are not used.
        held: Number of entries (S, T), int32, that all heads and layers of a slot together had after each token; the
            evicted are subtracted at the last one. In place only.
        event_steps: Steps (S, E), int32, of the events of each slot, which ascend, behind them larger numbers; ``seen``
            is added where something is evicted. Given with ``death``, whose type takes more than E numbers.
    """
    if num_sinks < 0 or window < 0:
        raise UserError(f"num_sinks and window must not be negative, got num_sinks={num_sinks}, window={window}.")
    if (death is None) != (event_steps is None):
        raise UserError("evict needs both death and event_steps, or neither.")
    source_tensors = (None,) * 4 if source is None else (source.keys, source.values, source.offsets, source.lengths)
    call(
        "evict", pools.keys, scores, budgets, num_sinks, window, slots, seen, pools.offsets, pools.capacities,
        pools.keys, pools.values, pools.positions, pools.lengths, death, state_pool, *source_tensors, pools.errors,
        held, event_steps,
    )  # fmt: skip


def reference(
    scores: Tensor, budgets: Tensor, num_sinks: int, window: int, slots: Tensor, seen: Tensor, offsets: Tensor,
    capacities: Tensor, key_pool: Tensor, value_pool: Tensor, position_pool: Tensor, lengths: Tensor,
    death: Tensor | None, state_pool: Tensor | None, source_keys: Tensor | None, source_values: Tensor | None,
    source_offsets: Tensor | None, source_lengths: Tensor | None, errors: Tensor | None = None,
    held: Tensor | None = None, event_steps: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``evict`` in PyTorch."""
    check_slots(slots, offsets)
    check_numbers("a budget", budgets[:, slots >= 0])
    used = (slots >= 0).nonzero().squeeze(1)
    slots, width = slots[used], scores.shape[3]
    keys, values, starts, counts = key_pool, value_pool, offsets[:, slots], lengths[:, slots]
    source = [t for t in (source_keys, source_values, source_offsets, source_lengths) if t is not None]
    if source:
        keys, values, starts, counts = source[0], source[1], source[2][:, used], source[3][:, used]
    check_runs(torch.arange(len(used), device=used.device), starts, counts, width, len(keys))
    rows, live = gather_heads(starts, counts, width)  # (L, B, H, N)
    index = torch.arange(width, dtype=torch.int32, device=rows.device).expand_as(rows)
    positions = index if source else position_pool[rows]
    ranked = scores[:, used].nan_to_num(-torch.inf, torch.inf, -torch.inf)
    ranked, valid, at, limits = (t.flatten(0, 1) for t in (ranked, live, positions, budgets[:, used]))
    keep = select_entries(ranked, valid, at, limits, num_sinks, window).view_as(live)
    order, kept = compaction_order(keep)
    if source and bool((kept > capacities[:, slots]).any()):
        raise RuntimeError("a budget exceeds the capacity of its slot.")
    stays = index < kept.unsqueeze(-1)
    pool_rows, entry = (offsets[:, slots].unsqueeze(-1) + index)[stays], rows.gather(-1, order)[stays]
    # the right sides are copies: places may overlap
    key_pool[pool_rows] = keys[entry]
    value_pool[pool_rows] = values[entry]
    position_pool[pool_rows] = positions.gather(-1, order)[stays]
    if state_pool is not None:
        state_pool[pool_rows] = state_pool[entry]
    lengths[:, slots] = kept.to(torch.int32)
    if held is not None:
        last = seen[slots] - 1
        inside = (last >= 0) & (last < held.shape[1])
        held[slots[inside], last[inside]] -= (live & ~keep).sum(dim=(0, 2, 3), dtype=torch.int32)[inside]
    if death is not None and event_steps is not None and slots.numel():
        _record(death, event_steps, slots, seen, live & ~keep, positions)


def _record(
    death: Tensor, event_steps: Tensor, slots: Tensor, seen: Tensor, evicted: Tensor, positions: Tensor
) -> None:
    layer, row, head, entry = evicted.nonzero(as_tuple=True)
    slot, position = slots[row], positions[layer, row, head, entry].long()
    check_numbers("a position in the death record", position, death.shape[3])
    # the events before are those with smaller steps
    event = (event_steps[slots] < seen[slots].unsqueeze(-1)).sum(dim=-1)[row]
    check_numbers("the number of an event", event, min(event_steps.shape[1], torch.iinfo(death.dtype).max))
    event_steps[slot, event] = seen[slot].to(torch.int32)
    death[layer, slot, head, position] = event.to(death.dtype)


register("evict", reference)

# -------------------------------------------------------------------- which entries survive


def select_entries(
    scores: Tensor,
    valid: Tensor,
    positions: Tensor,
    budget: int | Tensor,
    num_sinks: int,
    window: int,
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

    Returns:
        The mask (S, H, N), bool, of the entries that stay.
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
    """Rank the entries of each row, 0 for the best.

    Args:
        scores: Scores (..., N), float, without NaN.
        classes: Classes (..., N), int8: every entry of a higher class comes before every entry of a lower one.

    Returns:
        The ranks (..., N), int64; exact ties go to the lowest index.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, classes.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    index = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, index)


def compaction_order(keep: Tensor) -> tuple[Tensor, Tensor]:
    """Find where each kept entry comes from when the survivors of a row close up without changing order.

    Args:
        keep: Mask (..., N), bool, of the kept entries.

    Returns:
        ``source`` (..., N): index of the entry that moves to each place, survivors first; and ``lengths`` (...),
        the number of survivors.
    """
    return keep.to(torch.uint8).argsort(dim=-1, descending=True, stable=True), keep.sum(dim=-1)
