"""The table of a calibration: the tail of the acceptance by budget and length, and the resulting schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sparse_rl_lightning.acceptance import NEAR_ONE, percentile
from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.metrics.intervals import tail


@dataclass(frozen=True)
class Binning:
    """Bins of tokens, and how their tails are judged.

    Args:
        bin_size: Tokens per bin of sequence length.
        min_tokens: A bin with fewer tokens at a budget has no data there.

    Raises:
        ValueError: If a number is below 1.
    """

    bin_size: int = 2000
    min_tokens: int = 200

    def __post_init__(self) -> None:
        for name in ("bin_size", "min_tokens"):
            check_number(name, getattr(self, name), least=1)


@dataclass(frozen=True)
class Acceptances:
    """Acceptances of sequences drawn at one budget: one number for each of their N tokens."""

    lengths: Tensor  # (N,) int32, tokens of the sequence before this one
    lower: Tensor  # (N,) float32, bounds of the acceptance
    upper: Tensor  # (N,) float32
    sequences: Tensor  # (N,) int32, index of the sequence

    @classmethod
    def cat(cls, batches: Sequence[Acceptances]) -> Acceptances:
        """All batches joined; their sequence numbers differ."""
        return cls(*(torch.cat([getattr(batch, f.name) for batch in batches]) for f in fields(cls)))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Tensor) -> Acceptances:
        return Acceptances(self.lengths[index], self.lower[index], self.upper[index], self.sequences[index])


@dataclass(frozen=True)
class Cell:
    """The acceptance of the tokens in one length bin at one budget."""

    tokens: int
    tail: float  # 5th percentile of the lower bound
    low: float  # 95 % interval over the sequences
    high: float
    tail_upper: float  # 5th percentile of the upper bound
    mean: float  # mean of the lower bound
    near_one: float  # share of tokens above 0.999


@dataclass(frozen=True)
class Choice:
    """A schedule, with notes on how it was chosen."""

    schedule: LengthSchedule
    budgets: list[int]  # per bin
    notes: list[str]  # bins without data, bins that no budget serves


def cell(acceptances: Acceptances) -> Cell:
    """The statistics of at least one token."""
    lower = tail(acceptances.lower, acceptances.sequences)
    return Cell(
        tokens=len(acceptances),
        tail=lower.value,
        low=lower.low,
        high=lower.high,
        tail_upper=percentile(acceptances.upper),
        mean=float(acceptances.lower.double().mean()),
        near_one=float((acceptances.lower > NEAR_ONE).double().mean()),
    )


def cells(acceptances: Acceptances, binning: Binning, num_bins: int) -> list[Cell | None]:
    """A cell for every bin, None for bins with too few tokens."""
    bins = acceptances.lengths // binning.bin_size
    by_bin = [acceptances[bins == number] for number in range(num_bins)]
    return [cell(in_bin) if len(in_bin) >= binning.min_tokens else None for in_bin in by_bin]


def choose(table: Mapping[int, Sequence[Cell | None]], target: float, bin_size: int, monotone: bool = False) -> Choice:
    """The cheapest budget that meets the target in every length bin.

    A bin for which no budget suffices gets the largest. A bin without data gets the budget of the next bin with data,
    or of the last one if none follows. With ``monotone`` no bin gets less than the one before it, as evicting caches
    need.

    Raises:
        ValueError: If no bin has data.
    """
    columns = [dict(zip(table, column, strict=True)) for column in zip(*table.values(), strict=True)]
    with_data = [number for number, column in enumerate(columns) if any(column.values())]
    if not with_data:
        raise UserError(
            "no bin of lengths has enough tokens to be judged: give more prompts or samples, larger bins (bin_size), "
            "or lower min_tokens."
        )
    largest, budgets, notes = max(table), list[int](), list[str]()
    for number in range(len(columns)):
        source = next((later for later in with_data if later >= number), with_data[-1])
        tails = {budget: cell.tail for budget, cell in columns[source].items() if cell is not None}
        budget = min((budget for budget, reached in tails.items() if reached >= target), default=largest)
        budgets.append(max([budget, *budgets]) if monotone else budget)
        if number != source:
            taken = f"budget {budgets[-1]} of {_span(source, bin_size)}"
            notes.append(f"{_span(number, bin_size)}: too few tokens, so {taken}.")
        elif max(tails.values()) < target:
            notes.append(
                f"{_span(number, bin_size)}: no budget meets the target of {target:.4f}, the best reaches "
                f"{max(tails.values()):.4f}; the largest, {largest}, is taken. Calibrate larger budgets."
            )
    return Choice(LengthSchedule.of_bins(budgets, bin_size), budgets, notes)


def _span(number: int, bin_size: int) -> str:
    return f"lengths {number * bin_size} to {(number + 1) * bin_size - 1}"
