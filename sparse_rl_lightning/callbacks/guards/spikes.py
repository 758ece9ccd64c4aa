"""Steps far longer than usual, and what their staleness ratios and heaviest tokens say about the cause."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

LARGE_RATIO, LARGE_SHARE = 10.0, 0.5
"""Staleness ratio, and share of ten tokens, from which few tokens moved far are taken for the cause."""


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


def cause(ratio: float, share: float, can_bound: bool) -> str:
    """A sentence on what a long step is made of, and one on what helps.

    Args:
        ratio: Largest staleness ratio of its tokens, 0 if not known.
        share: Share of the policy term's derivative that ten tokens of a micro-batch have, 0 if not known.
        can_bound: Whether ``loss.delta`` is open to be set.
    """
    known = f"Its largest staleness ratio is {ratio:.2g}, and ten tokens carry {share:.0%} of it" if ratio else ""
    if ratio < LARGE_RATIO or share < LARGE_SHARE:
        return (
            f"{known}{'. ' if known else ''}Look at rewards and completions of this rollout; a lower learning rate or "
            "gradient_clip_val keeps single steps short."
        )
    bound = "Set model.loss.delta to 2, reject" if can_bound else "Reject"
    return (
        f"{known}: tokens that the policy before the rollout's first step found unlikely, and that steps on the same "
        "rollout have moved. With a negative advantage nothing bounds them, and clipping leaves a step that is theirs "
        f"alone. {bound} such sequences (SparsityAwareRejection), or take fewer optimizer steps per rollout "
        "(steps_per_generation, num_iterations)."
    )
