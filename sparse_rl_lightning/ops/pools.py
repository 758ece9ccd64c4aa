"""KVPools: keys, values and positions of many heads in flat memory, and where each head lives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.faults import fault


@dataclass(frozen=True)
class KVPools:
    """The memory that the ops work on, of one layer (S, H) or of all (L, S, H); see ``ops/schemas.py``.

    A layer's pools are views of the whole: the same rows, other offsets.
    """

    keys: Tensor  # (R, D)
    values: Tensor  # (R, D)
    positions: Tensor  # (R) int32
    offsets: Tensor  # (L, S, H) or (S, H) int64, first row of each head
    capacities: Tensor  # the same shape, int32, rows of each head
    lengths: Tensor  # the same shape, int32, live entries
    errors: Tensor | None = None  # (1) int32, where CUDA kernels say what they had to leave out

    @classmethod
    def uniform(
        cls, heads: tuple[int, ...], capacity: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> Self:
        """Empty pools in which every head has the same capacity.

        Args:
            heads: (L, S, H) or (S, H).
            capacity: Entries per head.
            head_dim: D.
            dtype: Type of keys and values.
            device: Where they live.
        """
        return cls.ragged(torch.full(heads, capacity, dtype=torch.int32), head_dim, dtype, device)

    @classmethod
    def ragged(cls, capacities: Tensor, head_dim: int, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Empty pools, the heads one after the other in the order of ``capacities``.

        Args:
            capacities: (L, S, H) or (S, H) int32 on the CPU, entries of each head.
            head_dim: D.
            dtype: Type of keys and values.
            device: Where they live.
        """
        ends = capacities.flatten().cumsum(0)
        keys = torch.zeros(int(ends[-1]), head_dim, dtype=dtype, device=device)
        offsets = (ends - capacities.flatten()).view(capacities.shape).to(device)
        return cls(
            keys=keys,
            values=torch.zeros_like(keys),
            positions=torch.zeros(len(keys), dtype=torch.int32, device=device),
            offsets=offsets,
            capacities=capacities.to(device),
            lengths=torch.zeros(capacities.shape, dtype=torch.int32, device=device),
            errors=torch.zeros(1, dtype=torch.int32, device=device),
        )

    @classmethod
    def from_dense(cls, keys: Tensor, values: Tensor, lengths: Tensor, positions: Tensor | None = None) -> Self:
        """Pools around (S, H, N, D) tensors, without a copy where they are contiguous.

        Args:
            keys: (S, H, N, D).
            values: (S, H, N, D), the keys again where an op does not use them.
            lengths: (S, H), or (1, S, H) for ops on all layers.
            positions: (S, H, N), default 0 to N - 1.
        """
        num_slots, num_heads, width, dim = keys.shape
        device, shape = keys.device, lengths.shape
        if positions is None:
            positions = torch.arange(width, device=device).expand(num_slots, num_heads, width)
        return cls(
            keys=keys.contiguous().view(-1, dim),
            values=values.contiguous().view(-1, dim),
            positions=positions.to(torch.int32).contiguous().view(-1),
            offsets=(torch.arange(num_slots * num_heads, device=device) * width).view(shape),
            capacities=torch.full(shape, width, dtype=torch.int32, device=device),
            lengths=lengths.to(torch.int32).contiguous(),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def layer(self, index: int) -> Self:
        """One layer of (L, S, H) pools."""
        return replace(
            self, offsets=self.offsets[index], capacities=self.capacities[index], lengths=self.lengths[index]
        )

    def single(self, index: int) -> Self:
        """One layer of (L, S, H) pools as (1, S, H), for ops on all layers."""
        one = slice(index, index + 1)
        return replace(self, offsets=self.offsets[one], capacities=self.capacities[one], lengths=self.lengths[one])

    def check(self, num_dims: int) -> None:
        """Refuse pools whose parts do not fit together.

        Args:
            num_dims: 2 where an op works on one layer, 3 where on all.

        Raises:
            ValueError: Naming the part and what is expected of it.
        """
        if self.keys.dim() != 2:
            raise UserError(f"keys of the pools must be (rows, head_dim), got shape {tuple(self.keys.shape)}.")
        rows, heads = self.keys.shape[0], tuple(self.offsets.shape)
        if len(heads) != num_dims:
            expected = "(slots, KV heads)" if num_dims == 2 else "(layers, slots, KV heads)"
            raise UserError(f"offsets of the pools must be {expected}, got shape {heads}.")
        check("keys", self.keys, self.keys, self.keys.dtype, self.keys.shape)
        check("values", self.values, self.keys, self.keys.dtype, self.keys.shape)
        check("positions", self.positions, self.keys, torch.int32, (rows,))
        check("offsets", self.offsets, self.keys, torch.int64, heads)
        check("capacities", self.capacities, self.keys, torch.int32, heads)
        check("lengths", self.lengths, self.keys, torch.int32, heads)
        check("errors", self.errors, self.keys, torch.int32, (1,))

    def raise_errors(self) -> None:
        """Raise what CUDA kernels had to leave out since the last time; waits for the device.

        Raises:
            RuntimeError: Naming the op, the slot and what was wrong; the first such case counts.
        """
        word = 0 if self.errors is None else int(self.errors)
        if self.errors is not None and word:
            self.errors.zero_()
            raise RuntimeError(fault(word))


def check(
    name: str, tensor: Tensor | None, like: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...] | torch.Size
) -> None:
    """Refuse a tensor of the wrong shape, type, device or layout.

    Args:
        name: What to call it.
        tensor: The tensor, None passes.
        like: A tensor on the device all must share.
        dtype: Expected type.
        shape: Expected sizes, None for any.

    Raises:
        ValueError: What was given and what is expected.
    """
    if tensor is None:
        return
    fits = len(tensor.shape) == len(shape) and all(
        want is None or want == size for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise UserError(f"{name} has shape {tuple(tensor.shape)}, expected ({wanted}).")
    if tensor.dtype != dtype:
        raise UserError(f"{name} is {tensor.dtype}, expected {dtype}.")
    if tensor.device != like.device:
        raise UserError(f"{name} is on {tensor.device}, the pools are on {like.device}.")
    if not tensor.is_contiguous():
        raise UserError(f"{name} is not contiguous, pass {name}.contiguous().")


def check_slots(slots: Tensor, per_slot: Tensor) -> None:
    """For the references: refuse slots (B,) that are not there, as the compiled kernels do.

    Args:
        slots: (B) int64.
        per_slot: (S, H) or (L, S, H).

    Raises:
        RuntimeError: With the slot.
    """
    count = per_slot.shape[-2]
    wrong = slots[(slots < -1) | (slots >= count)]
    if len(wrong):
        raise RuntimeError(f"slots contains {int(wrong[0])}, expected 0 to {count - 1} or -1 for a row to skip.")


def check_runs(slots: Tensor, offsets: Tensor, lengths: Tensor, limits: Tensor | int, pool_rows: int) -> None:
    """For the references: refuse heads that hold too many entries or lie outside the pool, as compiled kernels do.

    Args:
        slots: (B) int64, -1 for a row to skip.
        offsets: (S, H) or (L, S, H).
        lengths: The same.
        limits: The same, or one number: entries that a head may hold.
        pool_rows: R.

    Raises:
        RuntimeError: With the first wrong number.
    """
    check_slots(slots, offsets)
    used = slots[slots >= 0]
    held, start = lengths[..., used, :], offsets[..., used, :]
    most = torch.as_tensor(limits, device=held.device).expand_as(lengths)[..., used, :]
    if bool(((held < 0) | (held > most)).any()):
        wrong = held[(held < 0) | (held > most)]
        raise RuntimeError(f"a head holds {int(wrong[0])} entries, allowed are 0 to {int(most.max())}.")
    outside = (start < 0) | (start > pool_rows - held)
    if bool(outside.any()):
        raise RuntimeError(
            f"a head of {int(held[outside][0])} entries starts at row {int(start[outside][0])}, outside the pool of "
            f"{pool_rows} rows."
        )


def check_numbers(name: str, numbers: Tensor, limit: int | None = None) -> None:
    """For the references: refuse numbers that are negative, or not below the limit.

    Raises:
        RuntimeError: With the first of them.
    """
    wrong = numbers[(numbers < 0) if limit is None else (numbers < 0) | (numbers >= limit)]
    if len(wrong):
        allowed = "0 or more" if limit is None else f"0 to {limit - 1}"
        raise RuntimeError(f"{name} is {int(wrong[0])}, expected {allowed}: a number that is negative or too large.")


def check_groups(name: str, queries: Tensor, pools: KVPools) -> None:
    """Refuse (..., Hq, ...) queries, heads in dimension 1, whose heads are not a multiple of the KV heads.

    Raises:
        ValueError: With both numbers.
    """
    num_heads = pools.offsets.shape[-1]
    if queries.shape[1] % num_heads:
        raise UserError(f"{name} has {queries.shape[1]} heads, expected a multiple of the {num_heads} KV heads.")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of sums over elements of ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gather_heads(offsets: Tensor, lengths: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Pool rows of the first ``width`` entries of each head, for the references.

    Args:
        offsets: (...) int64.
        lengths: (...) int32.
        width: N.

    Returns:
        ``rows`` (..., N), where free entries repeat the head's first row so that free memory is never read, and
        ``live`` (..., N) bool.
    """
    entries = torch.arange(width, device=offsets.device)
    live = entries < lengths.unsqueeze(-1)
    return offsets.unsqueeze(-1) + torch.where(live, entries, 0), live
