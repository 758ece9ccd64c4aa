"""Whole rollouts of an H200 as its measured steps add up: a full cache that reserves, one that is paged, and slots.

Rollouts of thousands of tokens were not timed, so this is a model. A step takes what the kept pages have for as many
sequences and tokens. Between measured steps it is interpolated; fewer than 64 sequences take what 64 do. Lengths are
log-normal. A paged cache admits sequences while memory lasts, and puts the newest back where it runs out. Reading
prompts, and reading again what was put back, takes no time here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import NormalDist, fmean

from benchmarks.common.tables import Table
from benchmarks.rollout.tail import SIGMA

BYTES = 28 * 2 * 128 * 2 * 2  # of a token: layers, KV heads, numbers of a head, keys and values, 16 bits
PROMPT = 512
FULL, SLOTS = "FullKV", "SnapKV 512 + 32"
CASES = ((34, 512, 958, 4608), (40, 1024, 1900, 8192), (40, 1024, 4000, 16384), (40, 1024, 7000, 16384))
"""GB for the full cache, sequences, mean tokens of a completion, and the longest sequence. The first was measured."""
MEASURED_SLOTS = 256  # of the first
HEADER = (
    "GB", "sequences", "mean completion", "longest sequence", "reserving, s", "paged, s", f"{SLOTS}, s",
    "times as fast as reserving", "as paged",
)  # fmt: skip
Cost = Callable[[int, float], float]  # milliseconds of a step by sequences and the tokens that they hold
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Steps:
    """Measured milliseconds of a step, by sequences: of the slots, and of the full cache without and per token."""

    slots: Points
    base: Points
    per_token: Points

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, str]]) -> Steps:
        """From rows of the kept pages, with batch, length, cache and ms per step."""
        full: dict[float, list[tuple[float, float]]] = {}
        slots: dict[float, float] = {}
        for row in rows:
            batch, length = (float(row[name].replace(",", "")) for name in ("batch", "length"))
            if row["cache"] == FULL and row["tokens/s"] != "–":
                full.setdefault(batch, []).append((batch * length, float(row["ms per step"])))
            elif row["cache"] == SLOTS:
                slots[batch] = float(row["ms per step"])
        slopes = {
            batch: (max(steps)[1] - min(steps)[1]) / (max(steps)[0] - min(steps)[0])
            for batch, steps in full.items()
            if len(steps) > 1
        }
        base = {batch: min(full[batch])[1] - slope * min(full[batch])[0] for batch, slope in slopes.items()}
        return cls(*(sorted(points.items()) for points in (slots, base, slopes)))

    def full(self, batch: int, tokens: float) -> float:
        """A step of the full cache."""
        return between(self.base, batch) + tokens * between(self.per_token, batch)

    def compressed(self, batch: int, tokens: float) -> float:
        """A step of the slots, which hold the same whatever the length."""
        return between(self.slots, batch)


def between(points: Points, batch: float) -> float:
    """A line through the two nearest points, also above the last; the first below it."""
    above = next((n for n, (x, _) in enumerate(points) if x >= batch), len(points) - 1)
    if batch <= points[0][0]:
        return points[0][1]
    (left, low), (right, high) = points[above - 1 : above + 1]
    return low + (high - low) * (batch - left) / (right - left)


def completions(count: int, mean: float, longest: int) -> list[int]:
    """Log-normal lengths of this mean, the same at every call, in an order that does not depend on them."""
    normal = NormalDist(0, SIGMA)
    shape = [math.exp(normal.inv_cdf((rank + 0.5) / count)) for rank in range(count)]
    low, high = 0.0, float(longest)
    for _ in range(60):
        scale = (low + high) / 2
        lengths = [min(longest, max(1, round(scale * factor))) for factor in shape]
        low, high = (scale, high) if fmean(lengths) < mean else (low, scale)
    Random(0).shuffle(lengths)
    return lengths


def seconds(lengths: Sequence[int], cost: Cost, slots: int, tokens: float = math.inf) -> float:
    """Of a rollout with so many sequences at once, which may hold so many tokens together."""
    waiting, live, time = [(PROMPT, length) for length in reversed(lengths)], list[tuple[int, int]](), 0.0
    while waiting or live:
        while waiting and len(live) < slots and _after_a_step([*live, waiting[-1]]) <= tokens:
            live.append(waiting.pop())
        while _after_a_step(live) > tokens:
            waiting.append(live.pop())
        count, stored = len(live), sum(length for length, _ in live)
        steps = min(missing for _, missing in live)
        steps = steps if math.isinf(tokens) else min(steps, max(1, int(tokens - stored) // count))
        time += steps * cost(count, stored + count * steps / 2) / 1000
        live = [(length + steps, missing - steps) for length, missing in live if missing > steps]
    return time


def _after_a_step(live: Sequence[tuple[int, int]]) -> int:
    return sum(length + 1 for length, _ in live)


def modeled(steps: Steps) -> Table:
    """All cases; the compressed cache has a slot for each sequence but in the first, as it was measured."""
    table = Table("", HEADER)
    for gigabytes, count, mean, longest in CASES:
        lengths, room = completions(count, mean, longest - PROMPT), gigabytes * 1e9 / BYTES
        most = MEASURED_SLOTS if (gigabytes, count, mean, longest) == CASES[0] else count
        reserving = seconds(lengths, steps.full, min(most, int(room / longest)))
        paged, fixed = seconds(lengths, steps.full, most, room), seconds(lengths, steps.compressed, most)
        sizes = (f"{value:,}" for value in (gigabytes, count, mean, longest))
        ratios = (f"{time / fixed:.1f}" for time in (reserving, paged))
        table.add(*sizes, *(f"{time:.0f}" for time in (reserving, paged, fixed)), *ratios)
    return table
