"""Evictions as runs of positions, in both directions: the time grows with what was evicted, not with the length."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.evictions import EvictionRecord

ALL = -1
"""All layers, or all heads."""


def evictions_of(records: Iterable[EvictionRecord]) -> dict[str, Tensor]:
    """The arrays ``evictions``, ``num_runs`` and ``runs`` of a record, from one ``EvictionRecord`` per request."""
    parts = [_arrays(record, request) for request, record in enumerate(records)]
    none = (torch.zeros(0, *columns, dtype=torch.int32) for columns in ((4,), (), (2,)))
    columns = (torch.cat(column) for column in zip(none, *parts, strict=True))
    return dict(zip(("evictions", "num_runs", "runs"), columns, strict=True))


def _arrays(record: EvictionRecord, request: int) -> tuple[Tensor, Tensor, Tensor]:
    """Evictions, numbers of runs, and runs of one sequence: what heads or layers share is written once."""
    shape = record.num_layers, record.num_heads, len(record.steps)
    runs, sizes = _runs_of(record.positions.int(), record.counts.long())
    cell = torch.arange(len(sizes)).view(shape)
    layer_shares = _alike(runs, sizes, cell[:, :1].expand(shape)).all(1)  # (L, S)
    all_share = _alike(runs, sizes, cell[:1, :1].expand(shape)).flatten(0, 1).all(0)  # (S,)
    is_written = sizes.view(shape) > 0
    is_written[:, 1:] &= ~layer_shares[:, None]
    is_written[1:] &= ~all_share
    step, layer, head = is_written.permute(2, 0, 1).nonzero().unbind(1)
    written = cell[layer, head, step]
    rows = [
        torch.full_like(step, request), layer.masked_fill(all_share[step], ALL),
        head.masked_fill(layer_shares[layer, step], ALL), record.steps.long()[step],
    ]  # fmt: skip
    return torch.stack(rows, dim=1).int(), sizes[written].int(), runs[pieces(sizes, written)]


def _runs_of(positions: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The runs (R, 2) of positions (E,) that ascend in each cell, and their number (C,) from the cells' counts (C,)."""
    cell = torch.arange(len(counts)).repeat_interleave(counts)
    is_first = torch.ones_like(cell, dtype=torch.bool)
    is_first[1:] = (positions.diff() != 1) | (cell.diff() != 0)
    first = is_first.nonzero()[:, 0]
    last = first.roll(-1) - 1  # the last run ends at -1, the end of all
    return torch.stack([positions[first], positions[last] + 1], dim=1), cell[first].bincount(minlength=len(counts))


def _alike(runs: Tensor, sizes: Tensor, reference: Tensor) -> Tensor:
    """Whether each cell has the same runs as its reference cell, in the references' shape; sizes (C,) count runs."""
    alike = sizes == sizes[reference.flatten()]
    cell = alike.nonzero()[:, 0]
    differs = (runs[pieces(sizes, cell)] != runs[pieces(sizes, reference.flatten()[cell])]).any(dim=1)
    alike[cell.repeat_interleave(sizes[cell])[differs]] = False
    return alike.view(reference.shape)


def record_of_runs(evictions: Tensor, num_runs: Tensor, runs: Tensor, shape: tuple[int, int, int]) -> EvictionRecord:
    """The record of one sequence from its evictions, in any order and in any pieces.

    Args:
        evictions: Request, layer or -1, KV head or -1, and query (E, 4).
        num_runs: Runs (E,) of each eviction.
        runs: Runs (R, 2).
        shape: Layers, KV heads and tokens of the sequence.

    Raises:
        ValueError: If a token is evicted twice.
    """
    layers, heads, length = shape
    row, head = _heads_meant(evictions, num_runs, runs, shape)
    count = num_runs[row]
    first, past = runs[pieces(num_runs, row)].long().unbind(1)
    row, head = row.repeat_interleave(count), head.repeat_interleave(count)
    steps, step = torch.unique(evictions[:, 3].long(), return_inverse=True)
    cell = head * len(steps) + step[row]
    # numpy's stable sort is quick where most is in order, as engines write it
    order = torch.from_numpy((cell * length + first).numpy().argsort(kind="stable"))
    first, size = first[order], (past - first)[order]
    positions = ranges(first, size)
    token = head[order].repeat_interleave(size) * length + positions
    is_dead = torch.zeros(layers * heads * length, dtype=torch.bool)
    is_dead[token] = True
    if int(is_dead.sum()) < len(token):
        raise _evicted_twice(evictions, row[order].repeat_interleave(size), token)
    counts = torch.zeros(layers * heads * len(steps), dtype=torch.int64).index_add(0, cell[order], size)
    dtype = torch.int16 if length <= torch.iinfo(torch.int16).max else torch.int32
    return EvictionRecord(
        positions=positions.to(dtype), counts=counts.to(dtype), steps=steps.to(dtype),
        num_dead=torch.tensor([len(positions)]), num_steps=torch.tensor([len(steps)]),
        num_layers=layers, num_heads=heads, length=length,
    )  # fmt: skip


def _heads_meant(
    evictions: Tensor, num_runs: Tensor, runs: Tensor, shape: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """Each eviction's row as often as it means heads, and these heads, counted over all layers.

    Raises:
        ValueError: If they evict more than there is: a few lines can say so of billions of tokens.
    """
    layers, heads, length = shape
    request, layer, head, _ = evictions.long().unbind(1)
    wide = torch.where(head == ALL, heads, 1)
    count = torch.where(layer == ALL, layers, 1) * wide
    size = (runs[:, 1] - runs[:, 0]).double()  # a sum of integers could overflow
    if float(size @ count.repeat_interleave(num_runs).double()) > layers * heads * length:
        raise UserError(f"evictions: request {int(request[0])} evicts more tokens than it has.")
    row = torch.arange(len(count)).repeat_interleave(count)
    nth = ranges(torch.zeros_like(count), count)
    return row, (nth // wide[row] + layer.clamp(min=0)[row]) * heads + nth % wide[row] + head.clamp(min=0)[row]


def _evicted_twice(evictions: Tensor, row: Tensor, token: Tensor) -> UserError:
    """The error that names the last row of the evictions (E, 4) with a token that is in the list (D,) twice."""
    by_number = token.sort().values
    again = token == by_number[1:][by_number.diff() == 0][0]
    request, layer, head, query = evictions[row[again].max()].tolist()
    where = f"request {request}, layer {layer}, head {head}, query {query}"
    return UserError(f"evictions: {where} evicts a token that was evicted before.")


def pieces(sizes: Tensor, chosen: Tensor) -> Tensor:
    """The indices of all that is in the chosen of some adjacent pieces, whose sizes are int64."""
    return ranges((sizes.cumsum(0) - sizes)[chosen], sizes[chosen])


def ranges(first: Tensor, sizes: Tensor) -> Tensor:
    """The numbers from every ``first`` on, as many as its size: of 5 and 2 with sizes 3 and 1 those are 5, 6, 7, 2."""
    return (first - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes) + torch.arange(int(sizes.sum()))
