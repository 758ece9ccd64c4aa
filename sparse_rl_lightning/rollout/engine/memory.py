"""The memory plan: the bytes of a slot, and how many slots fit into a limit.

Nothing is priced by hand: the cache and the logs are created on torch's meta device, with shapes and types but no
memory, once for one slot and once for two. The difference is the size of a slot, the rest is the fixed part.

On a GPU the logits of a step, and what a draw makes of them, count too: they are as wide as the vocabulary, and are
there twice, in the memory of the CUDA graphs and where the first tokens of prompts are drawn. So do the partial results
of heads so long that several blocks attend to them, once: they are in the memory of the graphs only. So do the
weights that are copied for decoding.

The data that a rollout collects per sequence (tokens, log-probabilities, deaths) comes on top of the slots, as do
other activations and the staging of prompts; leave room for them in the limit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.cache.slots import CacheSize
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.decode_attention import empty_partials
from sparse_rl_lightning.ops.draw import reference
from sparse_rl_lightning.ops.library import has_kernel
from sparse_rl_lightning.ops.live_bytes import LiveBytes
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.policies.routing import RoutingShape
from sparse_rl_lightning.rollout.engine.decoders.base import ROW_MULTIPLE
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams, draw
from sparse_rl_lightning.rollout.engine.sequences import SequenceLogs

MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class SlotBytes:
    """The memory of slots, in bytes."""

    total: int  # bytes of one more slot
    pool: int  # its keys and values, as in SlotCache.pool_bytes
    fixed: int  # bytes besides the slots: one more row, written by rows that only pad a batch, and what exists once
    arithmetic: str  # the terms of the total, in words

    def of(self, num_slots: int) -> int:
        """The bytes of ``num_slots`` slots, with the fixed part."""
        return num_slots * self.total + self.fixed


@dataclass(frozen=True)
class MemoryPlan:
    """The number of slots to use, and their memory."""

    num_slots: int
    bytes_per_slot: int
    pool_bytes: int  # keys and values of all slots and summaries of pages, as in SlotCache.pool_bytes
    total_bytes: int  # everything that is stored per slot
    limit: int  # limit of total_bytes, in bytes
    why: str  # one sentence for the log
    memory_limit: float  # as it was set: a share, or bytes
    origin: str  # origin of the limit, in words


def slot_bytes(
    geometry: CacheGeometry,
    size: CacheSize,
    params: SamplingParams | None = None,
    logs: type[SequenceLogs] = SequenceLogs,
    vocabulary: int = 0,
    decoder: int = 0,
    logits: torch.dtype | None = None,
    routed: RoutingShape | None = None,
) -> SlotBytes:
    """Measure the memory of one slot of a cache.

    Args:
        geometry: Sizes of the model and the type of keys and values.
        size: Size of the cache; its number of slots does not matter.
        params: Sampling parameters: with them the logs of the sequences count too; without, only the cache.
        logs: Class of the logs.
        vocabulary: Number of tokens: on a GPU the memory of drawing counts too; without it does not.
        decoder: Bytes of the copies of weights made for decoding: they count on a GPU, beside the slots.
        logits: Type of the logits, None for the type that the model computes in.
        routed: Sizes of the record of experts, which is one of the logs, None without one.
    """
    g = replace(geometry, device=torch.device("meta"))

    def measure(num_slots: int) -> tuple[dict[str, int], int]:
        cache = replace(size, num_slots=num_slots).allocate(g)
        parts = cache.parts()
        if params is not None:
            logged = vars(logs(num_slots, size.max_length, params, g.device)).values()
            parts["logs"] = [value for value in logged if isinstance(value, Tensor)]
            if routed is not None:
                parts["logs"].append(routed.empty(num_slots + 1, size.max_length, device=g.device))
        nbytes = {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in parts.items()}
        if params is not None and geometry.device.type == "cuda":
            nbytes["attention of long heads"] = partial_bytes(num_slots, g, cache.most_read)
        if params is not None and vocabulary and geometry.device.type == "cuda":
            nbytes["drawing"] = 2 * drawing_bytes(num_slots, vocabulary, params, logits or geometry.dtype)
        if geometry.device.type == "cuda":
            nbytes["weights made for decoding"] = decoder
        return nbytes, cache.pool_bytes

    (first, pool), (second, pools) = measure(1), measure(2)
    slot = {name: second[name] - first[name] for name in first}
    total, words = sum(slot.values()), _words(g, size)
    arithmetic = " + ".join(f"{count:,} for {name}{words.get(name, '')}" for name, count in slot.items() if count)
    return SlotBytes(total, pools - pool, sum(first.values()) - total, arithmetic)


def partial_bytes(num_rows: int, geometry: CacheGeometry, most_entries: int) -> int:
    """The bytes that the splits of a layer's heads of up to ``most_entries`` leave; the next layer uses them again."""
    shape = (num_rows, geometry.num_heads, geometry.head_dim)
    partials = empty_partials(torch.empty(shape, dtype=geometry.query_dtype, device="meta"), most_entries)
    return 0 if partials is None else partials.nbytes


def record_bytes(geometry: CacheGeometry, num_sequences: int, length: int) -> int:
    """The most bytes of eviction records when a rollout ends: one per sequence, and all of them joined, which stays."""
    position = torch.int16 if length < 2**15 else torch.int32
    return 2 * num_sequences * length * geometry.num_layers * geometry.num_kv_heads * position.itemsize


def drawing_bytes(num_rows: int, vocabulary: int, params: SamplingParams, dtype: torch.dtype = torch.float32) -> int:
    """The most bytes that logits (n, V) of this type, and what a draw on a GPU makes of them, hold at the same time."""
    peak = _DrawBytes()
    with peak:
        logits = torch.zeros(num_rows, vocabulary, dtype=dtype, device="meta")
        occurred = torch.zeros_like(logits, dtype=torch.bool) if params.repetition_penalty != 1 else None
        numbers = torch.zeros(num_rows, dtype=torch.int64, device="meta")
        draw(logits, params, numbers, numbers, numbers[:1], occurred)
    return peak.most


class _DrawBytes(LiveBytes):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """The same of a draw in its PyTorch form, where there is no kernel."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.sparse_rl.draw.default and not has_kernel("draw", "cuda"):
            with self:
                reference(*args)
            return None
        return super().__torch_dispatch__(func, types, args, kwargs)


def _words(g: CacheGeometry, size: CacheSize) -> dict[str, str]:
    """Explanations of the largest numbers."""
    heads = g.num_layers * g.num_kv_heads
    state = ""
    if g.linear is not None:
        tokens = g.linear.nbytes // (heads * g.bytes_per_entry)
        state = f" ({g.linear.num_layers} layers; as much as keys and values of {tokens:,} tokens)"
    rows = f"{sum(size.entries):,} entries in {g.num_layers} layers x {g.num_kv_heads} KV heads"
    width, layers = min(g.window, size.max_length), len(g.window_layers)
    return {
        "windows": f" ({width:,} entries in each of {layers} layers x {g.num_kv_heads} KV heads, with positions)",
        "keys and values": f" ({rows} x 2 x {g.head_dim} x {g.kv_dtype.itemsize} bytes)",
        "queries": f" ({size.num_queries} x {g.num_heads} heads x {g.num_layers} layers x {g.head_dim} x "
        f"{g.query_dtype.itemsize})",
        "the eviction record": f" ({size.max_length:,} tokens x {heads} heads of all layers x "
        f"{size.event_dtype.itemsize}, and steps of events)",
        "linear attention": state,
    }


def plan_slots(
    slot: SlotBytes,
    limit: float,
    num_sequences: int,
    device: torch.device | str = "cpu",
    multiple: int = ROW_MULTIPLE,
    before: MemoryPlan | None = None,
) -> MemoryPlan:
    """Plan the most slots that fit into a limit, never more than there are sequences.

    Args:
        slot: Memory of one slot.
        limit: Share of the memory that is free on ``device`` now, up to 1, or a whole number of bytes above that.
        num_sequences: Number of sequences of the rollout, prompts x num_generations.
        device: Device of the slots.
        multiple: Divisor of the number of slots if memory is the limit and there are more slots than this, since decode
            batches are padded to a multiple of it.
        before: Earlier plan for the same memory, whose limit is reused: a share of the free memory measured again would
            count memory in use as taken.

    Raises:
        ValueError: If not even one slot fits, with the arithmetic, or the limit is out of range.
    """
    same = before is not None and before.memory_limit == limit
    available, origin = (before.limit, before.origin) if before is not None and same else _resolve(limit, device)
    fits = (available - slot.fixed) // slot.total
    if fits < 1:
        raise UserError(
            f"Not even one slot fits: it takes {slot.of(1):,} bytes, the limit is {available:,} ({origin}). A slot is "
            f"{slot.arithmetic}; {slot.fixed:,} stand beside the slots. Raise the limit (up to 1 a share of the "
            "free memory, above that bytes) or lower the compressor's budget, buffer or window, or "
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
    return MemoryPlan(count, slot.total, count * slot.pool, total, available, why, limit, origin)


def free_bytes(device: torch.device | str) -> int:
    """The memory available to new tensors on this device; torch's own reserve there counts as free.

    Raises:
        ValueError: If the operating system does not report it.
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
        raise UserError("This system does not say how much memory is free: give the limit in bytes.") from unknown


def check_limit(limit: float) -> None:
    """Refuse a memory limit that is neither a share nor a number of bytes, whether it is an int or a float.

    Raises:
        ValueError: If it is out of range.
    """
    if not 0 < limit <= 1 and not (limit > 1 and float(limit).is_integer()):
        raise UserError(
            "memory_limit: a limit up to 1 is a share of the free memory, one above it a whole number of bytes, got "
            f"{limit}."
        )


def _resolve(limit: float, device: torch.device | str) -> tuple[int, str]:
    """The limit in bytes, and its origin in words."""
    check_limit(limit)
    if limit <= 1:
        free = free_bytes(device)
        return int(limit * free), f"{limit:g} of {_mib(free)} free on {device}"
    return int(limit), "given in bytes"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.2f} MiB"
