"""TailWatch: the three signs of a collapse and how long each has persisted, as plain numbers without a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparse_rl_lightning.errors import UserError


@dataclass(frozen=True)
class Limits:
    """The limits that define a sign; arguments as in TailGuard."""

    max_rejection_rate: float = 0.1
    length_drop: float = 0.4
    min_tokens: int = 200
    window: int = 10
    patience: int = 2

    def __post_init__(self) -> None:
        for name in ("max_rejection_rate", "length_drop"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"TailGuard: {name} must lie in (0, 1], got {name}={getattr(self, name)}.")
        for name in ("min_tokens", "window", "patience"):
            if getattr(self, name) < 1:
                raise UserError(f"TailGuard: {name} must be at least 1, got {name}={getattr(self, name)}.")


class TailWatch:
    """Keeps as much of the rollouts as is necessary to distinguish a sign from noise.

    Args:
        limits: Limits that define a sign.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.lengths: list[float] = []  # of the newest rollouts, at most a window
        self.rejections: list[float] = []
        self.longest: float = 0.0  # mean length of the window in which responses were longest
        self.strikes: dict[str, int] = {"tail": 0, "rejection": 0, "length": 0}  # observations in a row

    @property
    def length_ratio(self) -> float | None:
        """The newest window's mean length over that of the longest window; None before there is a window."""
        return (
            None if len(self.lengths) < self.limits.window or not self.longest else _mean(self.lengths) / self.longest
        )

    def see(self, length: float, rejection_rate: float) -> None:
        """Add a rollout's mean response length and its share of rejected sequences."""
        self.lengths = [*self.lengths, length][-self.limits.window :]
        self.rejections = [*self.rejections, rejection_rate][-self.limits.window :]
        if len(self.lengths) == self.limits.window:
            self.longest = max(self.longest, _mean(self.lengths))
        ratio = self.length_ratio
        full = len(self.rejections) == self.limits.window
        self._strike("length", ratio is not None and ratio < 1 - self.limits.length_drop)
        self._strike("rejection", full and _mean(self.rejections) > self.limits.max_rejection_rate)

    def see_tail(self, tail: Mapping[str, float], tokens: Mapping[str, int], target: float) -> tuple[str, float] | None:
        """Add the percentiles of a rollout that was measured.

        Args:
            tail: Percentile of each length bin.
            tokens: Number of tokens of each bin; bins with too few are not judged.
            target: Percentile that every bin should reach.

        Returns:
            The worst bin and its distance above the target (below: negative); None if no bin could be judged.
        """
        judged = {name: value - target for name, value in tail.items() if tokens[name] >= self.limits.min_tokens}
        if not judged:
            return None  # a strike is neither added nor removed
        worst = min(judged, key=lambda name: judged[name])
        self._strike("tail", judged[worst] < 0)
        return worst, judged[worst]

    @property
    def alarms(self) -> list[str]:
        """The signs that have persisted: ``tail``, ``rejection``, ``length``."""
        return [name for name, count in self.strikes.items() if count >= self.limits.patience]

    def start_over(self) -> None:
        """Restart after a reaction: old observations no longer count, except for the longest responses so far."""
        self.lengths, self.rejections = [], []
        self.strikes = dict.fromkeys(self.strikes, 0)

    def state(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint."""
        return {
            "lengths": list(self.lengths),
            "rejections": list(self.rejections),
            "longest": self.longest,
            "strikes": dict(self.strikes),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state` returned."""
        self.lengths, self.rejections = list(state["lengths"]), list(state["rejections"])
        self.longest, self.strikes = state["longest"], dict(state["strikes"])

    def _strike(self, sign: str, given: bool) -> None:
        self.strikes[sign] = self.strikes[sign] + 1 if given else 0


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)
