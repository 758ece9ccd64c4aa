"""Steps far longer than usual or on tokens moved far, and what is said of their cause and cure."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from sparse_rl_lightning.callbacks.corrections.naive import REPLAY

MOVED = (
    "tokens that the policy before the rollout's first step found unlikely, and that steps on the same rollout have "
    "moved"
)
FEWER = "fewer optimizer steps per rollout (a larger accumulate_grad_batches, or a smaller num_iterations)"
CORRECTED = f"ImportanceReweighting with clip_max: 1.5, or {REPLAY} (no replay follows a retriever)"
LARGE_RATIO = 10.0
"""Staleness ratio from which tokens moved far are taken for the cause; naive training's long steps have more."""


@dataclass
class SpikeWatch:
    """Compares every gradient's norm with the median of the steps before it.

    Args:
        factor: Multiple of the median from which a step is a spike.
        window: Steps that the median is of, and after a warning the steps in which nothing is said.
        least: Steps before anything is judged.
    """

    factor: float = 20.0
    window: int = 50
    least: int = 10
    norms: list[float] = field(default_factory=list)
    silent: int = 0  # steps until the next warning
    spikes: int = 0  # since the start of the run

    def see(self, norm: float) -> float | None:
        """Add a step's norm before clipping; returns its multiple of the usual one if that is to be told of."""
        usual = median(self.norms) if len(self.norms) >= self.least else 0.0
        self.norms = [*self.norms, norm][-self.window :]
        self.silent = max(0, self.silent - 1)
        if not 0 < self.factor * usual < norm:
            return None
        self.spikes += 1
        if self.silent:
            return None
        self.silent = self.window
        return norm / usual

    def state(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint."""
        return {"norms": list(self.norms), "silent": self.silent, "spikes": self.spikes}


@dataclass(frozen=True)
class Cause:
    """What a long step is made of, as far as its worst micro-batch tells.

    Args:
        ratio: Largest staleness ratio of its tokens, 0 if not known.
        share: Share of the policy term's derivative that ten tokens of that micro-batch have.
        draws: Largest ratio of a drawn eviction that is learned from, 0 if there is none.
    """

    ratio: float = 0.0
    share: float = 0.0
    draws: float = 0.0

    def told(self, can_correct: bool, can_bound: bool) -> str:
        """A sentence on the cause, and one on what helps.

        Args:
            can_correct: Whether the sampler sees less than the whole cache, and no weights or replay account for it.
            can_bound: Whether ``loss.delta`` is open to be set; else the loss bounds the ratio already.
        """
        if self.draws >= LARGE_RATIO and self.draws > self.ratio:
            bound = "model.loss.delta: 2, " if can_bound else ""
            return (
                f"The largest ratio of a drawn eviction is {self.draws:.2g}: steps on the same rollout have changed "
                f"what is kept. What helps: {bound}a smaller eviction_weight, {FEWER}."
            )
        known = f"Its largest staleness ratio is {self.ratio:.2g}" if self.ratio else ""
        if self.ratio < LARGE_RATIO or not (can_correct or can_bound):
            return (
                f"{known}{'. ' if known else ''}Look at rewards and completions of this rollout; a lower learning rate "
                "or gradient_clip_val keeps single steps short."
            )
        correct = f"{CORRECTED}; then " if can_correct else ""
        free, bound = (
            (" With a negative advantage nothing bounds them.", ", model.loss.delta: 2") if can_bound else ("", "")
        )
        return (
            f"{known}, and ten tokens carry {self.share:.0%} of its micro-batch: {MOVED}.{free} What helps: "
            f"{correct}{FEWER}{bound}."
        )


@dataclass
class RatioWatch:
    """Tells once of tokens whose staleness ratio has grown large under eviction without weights or replay.

    A loss that bounds the ratio keeps such a step short, so that its gradient shows nothing. Most runs of
    docs/results.md that passed 100 so ended behind dense training.

    Args:
        limit: Staleness ratio above which it is told of.
        told: Whether it has been.
    """

    limit: float = 100.0
    told: bool = False

    def see(self, cause: Cause) -> str | None:
        """A step's largest ratio and what helps, if that is to be told of."""
        if self.told or not self.limit < cause.ratio:
            return None
        self.told = True
        return (
            f"is {cause.ratio:.2g}: {MOVED}. The step need not be a long one (with model.loss.delta it is not), but "
            f"most runs that went so far ended behind dense training. What helps: {CORRECTED}; else {FEWER}."
        )
