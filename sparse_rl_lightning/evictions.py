"""When every token left the cache: the log that the cache writes, and the record that stays of it.

EvictionLog is on the device, for every token and slot. EvictionRecord is stored only for the tokens that died. A
sequence is compressed a few times, and each compression removes many tokens at once. So a death step is written once
per compression and sequence, and a head's dead tokens follow as bare positions, compression by compression: about two
bytes per dead token, where the dense form takes four per token, dead or alive, and pads every sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.errors import UserError

NEVER = torch.iinfo(torch.int32).max
"""The death step of a token that no eviction removed."""


@dataclass(frozen=True)
class EvictionRecord:
    """When every token of every sequence left the cache: enough to replay the sampler's attention exactly.

    The query at index q saw the key at index k if and only if ``k <= q < death[..., k]``. Letters: B sequences,
    L layers, H KV heads, T tokens; E dead tokens and S compressions of all sequences, C = S x L x H.
    """

    positions: Tensor  # (E,) int16 or int32, by sequence, layer, head, death, position
    counts: Tensor  # (C,) int16 or int32: dead tokens by sequence, layer, head, compression
    steps: Tensor  # (S,) int16 or int32: death steps by sequence, ascending
    num_dead: Tensor  # (B,) int64, number of dead tokens of each sequence, all layers and heads
    num_steps: Tensor  # (B,) int64, number of compressions of each sequence
    num_layers: int
    num_heads: int
    length: int  # T

    @classmethod
    def from_dense(cls, death: Tensor) -> Self:
        """The record of ``death`` (L, B, H, T), :data:`NEVER` where a token stayed."""
        layers, batch, heads, length = death.shape
        parts = [_sequence(death[:, row].flatten(0, 1)) for row in range(batch)]  # one at a time, for bounded memory
        positions, counts, steps = (_join([columns[i] for columns in parts], death.device) for i in range(3))
        sizes = [[len(columns[i]) for columns in parts] for i in (0, 2)]
        num_dead, num_steps = (torch.tensor(size, dtype=torch.int64, device=death.device) for size in sizes)
        return cls(positions, counts, steps, num_dead, num_steps, layers, heads, length)

    @classmethod
    def of_sequence(cls, death: Tensor, steps: Tensor, num_dead: int) -> Self:
        """The record of one sequence of ``death`` (L, 1, H, T), without a wait for the device.

        Args:
            death: Death steps, :data:`NEVER` where a token stayed.
            steps: Death steps (S,), int64, that occur, ascending.
            num_dead: Number of tokens that did not stay, over all layers and heads.
        """
        layers, _, heads, length = death.shape
        flat = death.reshape(-1)
        is_dead = flat != NEVER
        assert flat.device.type != "cpu" or int(is_dead.sum()) == num_dead, "deaths were counted wrongly"
        flat_index = torch.nonzero_static(is_dead, size=num_dead).squeeze(1)
        step = torch.searchsorted(steps, flat[flat_index].long())
        cell = flat_index // length * len(steps) + step
        order = cell.argsort(stable=True)  # positions ascend within a cell
        counts = torch.zeros(layers * heads * len(steps), dtype=torch.int64, device=death.device)
        counts.scatter_add_(0, cell, torch.ones_like(cell))
        dtype = torch.int16 if length <= torch.iinfo(torch.int16).max else torch.int32
        return cls(
            positions=(flat_index[order] % length).to(dtype), counts=counts.to(dtype), steps=steps.to(dtype),
            num_dead=flat_index.new_full((1,), num_dead), num_steps=flat_index.new_full((1,), len(steps)),
            num_layers=layers, num_heads=heads, length=length,
        )  # fmt: skip

    @classmethod
    def cat(cls, records: Sequence[EvictionRecord]) -> Self:
        """All sequences of the records in the order given; shorter ones are padded with tokens that stayed.

        Raises:
            ValueError: If there are no records, or they differ in layers or heads.
        """
        shapes = {(record.num_layers, record.num_heads) for record in records}
        if len(shapes) != 1:
            raise UserError(f"Records to join must have the same layers and KV heads, got {sorted(shapes) or 'none'}.")
        names = ("positions", "counts", "steps", "num_dead", "num_steps")
        joined: dict[str, Any] = {name: torch.cat([getattr(record, name) for record in records]) for name in names}
        layers, heads = shapes.pop()
        length = max(record.length for record in records)
        return cls(**joined, num_layers=layers, num_heads=heads, length=length)

    def __len__(self) -> int:
        return len(self.num_dead)

    def __getitem__(self, index: Tensor | slice) -> Self:
        rows = torch.arange(len(self), device=self.num_dead.device)[index]
        cells = self.num_layers * self.num_heads
        return replace(
            self,
            positions=_take(self.positions, self.num_dead, rows),
            counts=_take(self.counts, self.num_steps * cells, rows),
            steps=_take(self.steps, self.num_steps, rows),
            num_dead=self.num_dead[rows],
            num_steps=self.num_steps[rows],
        )

    @property
    def death(self) -> Tensor:
        """The death steps (L, B, H, T) int32, :data:`NEVER` where a token stayed; a new tensor at every call."""
        heads = self.num_layers * self.num_heads
        rows = torch.arange(len(self), device=self.num_dead.device)
        cell_row = rows.repeat_interleave(self.num_steps * heads)
        # within a sequence cells are numbered head x num_steps + compression
        cell = torch.arange(len(self.counts), device=rows.device) - _starts(self.num_steps * heads)[cell_row]
        head, step = cell // self.num_steps[cell_row], cell % self.num_steps[cell_row]
        death = self.steps[_starts(self.num_steps)[cell_row] + step].to(torch.int32)
        counts = self.counts.long()
        dense = death.new_full((len(self), heads, self.length), NEVER)
        flat_index = (cell_row * heads + head).repeat_interleave(counts) * self.length + self.positions
        dense.view(-1)[flat_index] = death.repeat_interleave(counts)
        return dense.view(len(self), self.num_layers, self.num_heads, self.length).transpose(0, 1)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the record."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    @property
    def dense_nbytes(self) -> int:
        """The number of bytes of :attr:`death`."""
        return 4 * self.num_layers * len(self) * self.num_heads * self.length

    def to(self, device: torch.device | str) -> Self:
        """Copy of the record with every tensor on ``device``."""
        moved = {name: v.to(device) for name, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)  # type: ignore[arg-type]  # mypy expects integers, which are not among them


def _sequence(death: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, counts and steps of one sequence's deaths (L x H, T)."""
    head, position = (death != NEVER).nonzero(as_tuple=True)
    steps, step = torch.unique(death[head, position], sorted=True, return_inverse=True)
    cell = head * len(steps) + step
    order = cell.argsort(stable=True)  # positions ascend within a cell
    counts = torch.bincount(cell, minlength=len(death) * len(steps))
    return _narrow(position[order]), _narrow(counts), _narrow(steps)


def _narrow(numbers: Tensor) -> Tensor:
    """The same numbers as int16 if they fit, else int32."""
    fit = not len(numbers) or int(numbers.max()) <= torch.iinfo(torch.int16).max
    return numbers.to(torch.int16 if fit else torch.int32)


def _join(parts: list[Tensor], device: torch.device) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int16, device=device)


def _starts(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0) - sizes


def _take(flat: Tensor, sizes: Tensor, rows: Tensor) -> Tensor:
    """The pieces ``rows`` of ``flat``, which is cut into pieces of ``sizes``."""
    taken = sizes[rows]
    shift = (_starts(sizes)[rows] - _starts(taken)).repeat_interleave(taken)
    return flat[shift + torch.arange(len(shift), device=flat.device)]


class EvictionLog:
    """The deaths of all tokens in all slots, while sequences run.

    A token's death is the number of a compression of its slot, narrower than a step, and each compression has its step
    once. Letters as in records.py; E events.

    Args:
        shape: Layers, slots, KV heads and longest sequence in tokens.
        dtype: Type that numbers the events of a slot, as in ops/pools.py.
        device: Where the cache is.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        _, num_slots, _, self.max_length = shape
        self.never = torch.iinfo(dtype).max
        self.death = torch.full(shape, self.never, dtype=dtype, device=device)  # (L, S, H, T) number of the event
        events = (num_slots, min(self.max_length, self.never))
        self.steps = torch.full(events, NEVER, dtype=torch.int32, device=device)  # (S, E) tokens fed before each event

    def begin(self, slots: Tensor) -> None:
        """Forget the deaths in these slots (B,)."""
        self.death.index_fill_(1, slots, self.never)
        self.steps.index_fill_(0, slots, NEVER)

    def of_slot(self, slot: int, end: int = NEVER) -> Tensor:
        """The death steps (L, H, T), int32, of the tokens in a slot up to index ``end``, without evictions after it."""
        steps = self.steps[slot]
        # the slot may have gone on for a few steps before the host noticed the end: those deaths are undone
        steps = F.pad(steps.masked_fill(steps > end, NEVER), (0, 1), value=NEVER)
        events = self.death[:, slot, :, : end + 1].clamp(max=len(steps) - 1)
        return steps.index_select(0, events.flatten().to(torch.int32)).view(events.shape)

    def restore(self, slot: int, death: Tensor) -> None:
        """Number death steps (L, H, T) of :meth:`of_slot`; a slot has as many numbers as a sequence has events."""
        last = self.max_length + 1  # behind all steps
        step = death.clamp(max=last).long()
        occurs = torch.zeros(last + 1, dtype=torch.bool, device=step.device)
        occurs.index_fill_(0, step.flatten(), True)
        self.steps[slot] = torch.nonzero_static(occurs[:last], size=self.steps.shape[1], fill_value=NEVER).squeeze(1)
        number = occurs.cumsum(0) - 1
        number[last:].fill_(self.never)
        self.death[:, slot] = number.to(self.death.dtype)[step]
