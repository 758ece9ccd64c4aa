"""The memory plan: what a slot costs, and how many slots fit into a limit. Pure functions, nothing is allocated.

Letters as in records.py. What a rollout collects per sequence (tokens, log-probabilities, deaths) comes on top of the
slots, as do activations and the staging of prompts; leave room for them in the limit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from sparse_rl_lightning.ops.pools import accumulation_dtype
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.retrieval.cache import PageLayout
from sparse_rl_lightning.rollout.cache.slots import CacheSize
from sparse_rl_lightning.rollout.engine.decoder import ROW_MULTIPLE
from sparse_rl_lightning.rollout.engine.logs import Tracks
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams

MEMINFO = Path("/proc/meminfo")
FLOAT32, INT32, INT64 = 4, 4, 8  # bytes


@dataclass(frozen=True)
class SlotBytes:
    """What one slot takes, in bytes, and how that comes about."""

    keys_values: int
    places: int  # the entries' positions; where each head lives and how much it holds
    running: int  # numbers per entry and per head that the compressor keeps
    queries: int  # the ring of recent queries
    deaths: int  # the record of evictions
    rows: int  # tokens, counters and logs
    fixed: int  # beside the slots: one more row, where rows that only pad a batch write, and what stands there once
    arithmetic: str  # what a slot takes in words, one term after the other
    pages: int = 0  # vectors that a retriever keeps of pages
    probabilities: int = 0  # attention of one layer in a step, where running numbers are made of it

    @property
    def total(self) -> int:
        """Bytes that one more slot adds."""
        kept = self.keys_values + self.places + self.running + self.queries + self.deaths + self.rows + self.pages
        return kept + self.probabilities

    def of(self, num_slots: int) -> int:
        """Bytes of that many slots, with what stands beside them."""
        return num_slots * self.total + self.fixed


@dataclass(frozen=True)
class MemoryPlan:
    """How many slots to use, and what they take."""

    num_slots: int
    bytes_per_slot: int
    pool_bytes: int  # keys and values of all slots and what is kept of pages, as SlotCache.pool_bytes
    total_bytes: int  # everything that is kept per slot
    limit: int  # bytes that total_bytes may take
    why: str  # one sentence for the log


def slot_bytes(
    geometry: CacheGeometry, size: CacheSize, params: SamplingParams | None = None, versioned: bool = False
) -> SlotBytes:
    """What one slot of a SlotCache takes, tensor by tensor.

    Args:
        geometry: The model's sizes and the type of keys and values.
        size: The cache's; its number of slots does not matter.
        params: With them the logs of the run (Tracks) are counted too; without, the cache alone.
        versioned: As for Tracks.

    Raises:
        ValueError: If ``size.capacities`` does not name every layer.
    """
    g, kind, wide = geometry, geometry.kv_dtype.itemsize, geometry.query_dtype.itemsize
    capacities, max_length = size.entries, size.max_length
    if len(capacities) != g.num_layers:
        raise ValueError(
            f"capacities must name each of the {g.num_layers} layers, got {len(capacities)} numbers: "
            f"{list(capacities)}."
        )
    entries, heads = sum(capacities), g.num_layers * g.num_kv_heads
    log, log_fixed = (0, 0) if params is None else _log_bytes(params, size, versioned)
    tokens, recent = INT64 * (max_length + 4), size.num_queries
    layout = None if size.retriever is None else PageLayout(size.retriever, g, capacities)
    record = layout.record_bytes(1, max_length) if layout is not None and size.record_pages else 0
    head_numbers = sum(width for _, width in size.head_state_fields)
    widest = max(size.most_entries(layer, g.num_kv_heads) for layer in range(g.num_layers))
    paid = accumulation_dtype(g.query_dtype).itemsize if size.keeps_probabilities else 0
    arenas = (INT64 + INT32) * heads + 2 * INT64 * g.num_layers if size.per_head else 0
    sizes = {
        "keys_values": g.bytes_per_entry * g.num_kv_heads * entries,
        "places": INT32 * g.num_kv_heads * entries + (INT64 + 2 * INT32) * heads + arenas,
        "running": FLOAT32 * (len(size.state_fields) * g.num_kv_heads * entries + head_numbers * heads),
        "queries": wide * g.head_dim * recent * g.num_heads * g.num_layers,
        "deaths": INT32 * max_length * heads,
        "rows": tokens + log + record,
        "pages": 0 if layout is None else layout.summary_bytes,
        "probabilities": paid * g.num_heads * widest,
    }
    rows = f"{entries:,} entries in {g.num_layers} layers x {g.num_kv_heads} KV heads"
    how = {
        "keys_values": f"keys and values ({rows} x 2 x {g.head_dim} x {kind} bytes)",
        "places": f"positions ({rows} x {INT32} bytes + {heads} x {INT64 + 2 * INT32} + {arenas})",
        "running": f"running numbers ({rows} x {len(size.state_fields)} x {FLOAT32} bytes"
        + (f" + {heads} x {head_numbers} x {FLOAT32})" if head_numbers else ")"),
        "queries": f"queries ({recent} x {g.num_heads} heads x {g.num_layers} layers x {g.head_dim} x {wide})",
        "deaths": f"the eviction record ({max_length:,} tokens x {heads} heads of all layers x {INT32})",
        "rows": f"tokens ({max_length:,} + 4 numbers x {INT64}) and logs ({log + record:,})",
        "pages": "vectors of the pages",
        "probabilities": f"attention probabilities ({g.num_heads} heads x {widest:,} entries x {paid} bytes)",
    }
    absent = ("pages", "probabilities")  # where there are none, they are not spoken of
    arithmetic = " + ".join(f"{sizes[name]:,} for {how[name]}" for name in sizes if sizes[name] or name not in absent)
    # and the word of errors of the pools
    fixed = tokens + log_fixed + record + (0 if layout is None else layout.fixed_bytes) + INT32
    return SlotBytes(**sizes, fixed=fixed, arithmetic=arithmetic)


def plan_slots(
    slot: SlotBytes,
    limit: int | float,
    num_sequences: int,
    device: torch.device | str = "cpu",
    multiple: int = ROW_MULTIPLE,
) -> MemoryPlan:
    """The most slots that fit into a limit, never more than there are sequences.

    Args:
        slot: What one slot takes.
        limit: Bytes where it is a whole number, a share of the memory that is free on ``device`` now where it is a
            float in (0, 1].
        num_sequences: Sequences of the rollout, prompts x num_generations.
        device: Where the slots will live.
        multiple: Where memory is the limit, more slots than this are rounded down to a multiple of it, since decode
            batches are padded to one.

    Raises:
        ValueError: If not even one slot fits, with the arithmetic, or an argument is out of range.
    """
    if num_sequences < 1 or multiple < 1:
        raise ValueError(
            f"num_sequences and multiple must be at least 1, got num_sequences={num_sequences}, multiple={multiple}."
        )
    available, origin = _resolve(limit, device)
    fits = (available - slot.fixed) // slot.total
    if fits < 1:
        raise ValueError(
            f"Not even one slot fits: it takes {slot.of(1):,} bytes, the limit is {available:,} ({origin}). A slot is "
            f"{slot.arithmetic}; {slot.fixed:,} stand beside the slots. Raise the limit (a whole number is bytes, a "
            "float up to 1.0 a share of the free memory) or lower the compressor's budget, buffer or window, or "
            "max_completion_length."
        )
    rounded = fits - fits % multiple if fits > multiple else fits
    count = num_sequences if num_sequences <= fits else rounded
    total = slot.of(count)
    if count == num_sequences:
        reason = f"one for each of the {num_sequences} sequences"
    else:
        down = f", rounded down from {fits} to a multiple of {multiple}" if rounded < fits else ""
        reason = f"as many as fit for {num_sequences} sequences{down}"
    slots = f"{count} slot{'' if count == 1 else 's'} of {_mib(slot.total)}"
    why = f"{slots}: {reason}; {_mib(total)} of the {_mib(available)} allowed ({origin})."
    return MemoryPlan(count, slot.total, count * (slot.keys_values + slot.pages), total, available, why)


def free_bytes(device: torch.device | str) -> int:
    """Memory that a new tensor on this device could take now; what torch holds in reserve there counts as free.

    Raises:
        ValueError: If the operating system does not say.
    """
    device = torch.device(device)
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + idle
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError) as unknown:
        raise ValueError("This system does not say how much memory is free: give the limit in bytes.") from unknown


def check_limit(limit: int | float) -> None:
    """Refuse a memory limit that is neither a number of bytes nor a share.

    Raises:
        ValueError: If it is out of range.
    """
    if isinstance(limit, float) and not 0 < limit <= 1:
        raise ValueError(
            f"memory_limit: a limit that is a float is a share of the free memory in (0, 1], got {limit}. Give bytes "
            "as a whole number."
        )
    if limit < 1 and not isinstance(limit, float):
        raise ValueError(f"memory_limit: a limit in bytes must be at least 1, got {limit}.")


def _resolve(limit: int | float, device: torch.device | str) -> tuple[int, str]:
    """The limit in bytes, and where it comes from."""
    check_limit(limit)
    if isinstance(limit, float):
        free = free_bytes(device)
        return int(limit * free), f"{limit:g} of {_mib(free)} free on {device}"
    return limit, "given in bytes"


def _log_bytes(params: SamplingParams, size: CacheSize, versioned: bool) -> tuple[int, int]:
    """Bytes of Tracks per slot, and beside the slots."""

    def of(num_slots: int) -> int:
        retrieves = size.retriever is not None
        tracks = Tracks(num_slots, size.max_length, params, torch.device("meta"), versioned, retrieves)  # no memory
        return sum(tensor.nbytes for tensor in vars(tracks).values() if isinstance(tensor, torch.Tensor))

    per_slot = of(2) - of(1)
    return per_slot, of(1) - per_slot


def _mib(count: int) -> str:
    return f"{count / 2**20:,.2f} MiB"
