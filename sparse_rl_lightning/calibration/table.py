"""The table of a calibration: the tail of the acceptance by budget and length, and the resulting schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparse_rl_lightning.acceptance import NEAR_ONE, TAIL, percentile
from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.errors import UserError, check_number

CONFIDENCE = (0.025, 0.975)


@dataclass(frozen=True)
class Binning:
    """Bins of tokens, and how their tails are judged.

    Args:
        bin_size: Tokens per bin of sequence length.
        min_tokens: A bin with fewer tokens at a budget has no data there.
        resamples: Bootstrap samples behind every confidence interval.
        seed: Seed of the bootstrap.

    Raises:
        ValueError: If a number is below 1.
    """

    bin_size: int = 2000
    min_tokens: int = 200
    resamples: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("bin_size", "min_tokens", "resamples"):
            check_number(name, getattr(self, name), least=1)


@dataclass(frozen=True)
class Acceptances:
    """Acceptances of sequences drawn at one budget: one number for each of their N tokens."""

    lengths: Tensor  # (N,) int32, tokens of the sequence before this one
    lower: Tensor  # (N,) float32, bounds of the acceptance
    upper: Tensor  # (N,) float32
    sequences: Tensor  # (N,) int32, index of the sequence

    @classmethod
    def cat(cls, parts: Sequence[Acceptances]) -> Acceptances:
        """All parts joined; their sequence numbers differ."""
        names = ("lengths", "lower", "upper", "sequences")
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Tensor) -> Acceptances:
        return Acceptances(self.lengths[index], self.lower[index], self.upper[index], self.sequences[index])


@dataclass(frozen=True)
class Cell:
    """The acceptance of the tokens in one length bin at one budget."""

    tokens: int
    tail: float  # 5th percentile of the lower bound
    low: float  # 95 % interval over bootstrap samples of the sequences
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


def cell(found: Acceptances, binning: Binning) -> Cell:
    """The statistics of at least one token."""
    low, high = bootstrap(found.lower, found.sequences, binning.resamples, binning.seed)
    return Cell(
        tokens=len(found),
        tail=percentile(found.lower),
        low=low,
        high=high,
        tail_upper=percentile(found.upper),
        mean=float(found.lower.double().mean()),
        near_one=float((found.lower > NEAR_ONE).double().mean()),
    )


def cells(found: Acceptances, binning: Binning, num_bins: int) -> list[Cell | None]:
    """A cell for every bin, None for bins with too few tokens."""
    bins = found.lengths // binning.bin_size
    own = [found[bins == number] for number in range(num_bins)]
    return [cell(part, binning) if len(part) >= binning.min_tokens else None for part in own]


def bootstrap(values: Tensor, owners: Tensor, resamples: int, seed: int) -> tuple[float, float]:
    """95 % interval of the 5th percentile of values (N,), from samples of whole sequences drawn with replacement.

    Tokens within a sequence resemble each other, so the sequences (N,) that own the values are drawn.
    """
    order = values.argsort()
    ordered: NDArray[np.float32] = values[order].numpy()
    names, owner = np.unique(owners[order].numpy(), return_inverse=True)
    random, found = np.random.default_rng(seed), []
    for _ in range(resamples):
        times = np.bincount(random.integers(len(names), size=len(names)), minlength=len(names))
        below = times[owner].cumsum()
        found.append(ordered[np.searchsorted(below, TAIL * below[-1])])
    low, high = (percentile(torch.tensor(found), share) for share in CONFIDENCE)
    return low, high


def choose(table: Mapping[int, Sequence[Cell | None]], target: float, bin_size: int, monotone: bool = False) -> Choice:
    """The cheapest budget that meets the target in every length bin.

    A bin for which no budget suffices gets the largest. A bin without data gets the budget of the next bin with data,
    or of the last one if none follows. With ``monotone`` no bin gets less than the one before it, as evicting caches
    need.

    Raises:
        ValueError: If no bin has data.
    """
    ascending, num_bins = sorted(table), len(next(iter(table.values())))
    picked: list[int | None] = []
    notes = []
    for number in range(num_bins):
        known = {budget: found for budget in ascending if (found := table[budget][number]) is not None}
        before = max((b for b in picked if b is not None), default=0) if monotone else 0
        serving = [budget for budget, found in known.items() if found.tail >= target]
        picked.append(None if not known else max(before, min(serving, default=ascending[-1])))
        if known and not serving:
            best = max(found.tail for found in known.values())
            notes.append(
                f"{_span(number, bin_size)}: no budget meets the target of {target:.4f}, the best reaches {best:.4f}; "
                f"the largest, {ascending[-1]}, is taken. Calibrate larger budgets."
            )
    return _filled(picked, bin_size, notes)


def _filled(picked: list[int | None], bin_size: int, notes: list[str]) -> Choice:
    """The choice with bins without data served by their neighbors."""
    known = [number for number, budget in enumerate(picked) if budget is not None]
    if not known:
        raise UserError(
            "no bin of lengths has enough tokens to be judged: give more prompts or samples, larger bins (bin_size), "
            "or lower min_tokens."
        )
    budgets: list[int] = []
    for number, budget in enumerate(picked):
        source = source_of(number, known)
        found = picked[source]
        assert found is not None
        if budget is None:
            notes.append(f"{_span(number, bin_size)}: too few tokens, so budget {found} of {_span(source, bin_size)}.")
        budgets.append(found)
    return Choice(LengthSchedule.of_bins(budgets, bin_size), budgets, notes)


def source_of(number: int, known: Sequence[int]) -> int:
    """The bin whose data a bin uses: the next of those with data, itself included, or the last of them."""
    return next((other for other in known if other >= number), known[-1])


def _span(number: int, bin_size: int) -> str:
    return f"lengths {number * bin_size} to {(number + 1) * bin_size - 1}"
