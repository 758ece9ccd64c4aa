"""Steps far longer than usual, and what their staleness ratios and heaviest tokens say about the cause."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

LARGE_RATIO = 10.0
"""Staleness ratio beyond which a token has been moved further than any clip means to allow."""


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

    def see(self, norm: float, ratio: float | None, heaviest: float | None) -> str | None:
        """Add a step's norm; returns what to warn of, if it is a spike and none was told of lately.

        Args:
            norm: Norm of the gradient before clipping.
            ratio: Largest staleness ratio of the step's tokens, if known.
            heaviest: Share of the loss's derivative that its ten heaviest tokens have, if known.
        """
        usual = median(self.norms) if len(self.norms) >= self.least else 0.0
        self.norms = [*self.norms, norm][-self.window :]
        self.silent = max(0, self.silent - 1)
        if not 0 < self.factor * usual < norm:
            return None
        self.spikes += 1
        if self.silent:
            return None
        self.silent = self.window
        return f"is {norm / usual:,.0f} times as long as usual ({norm:.3g}). {cause(ratio, heaviest)}"

    def state(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint."""
        return {"norms": list(self.norms), "silent": self.silent, "spikes": self.spikes}


def cause(ratio: float | None, heaviest: float | None) -> str:
    """A sentence on what the step is made of, and one on what helps."""
    share = "" if heaviest is None else f", and ten tokens carry {heaviest:.0%} of it"
    if ratio is None or ratio < LARGE_RATIO:
        known = "" if ratio is None else f" Its largest staleness ratio is only {ratio:.2g}{share}."
        return (
            f"{known} Look at rewards and completions of this rollout; a lower learning rate or gradient_clip_val "
            "keeps single steps short."
        ).strip()
    return (
        f"Its largest staleness ratio is {ratio:.2g}{share}: tokens that the policy before the rollout's first step "
        "found near-impossible, and that steps on the same rollout have moved. With a negative advantage nothing "
        "bounds them, and clipping leaves a step that is theirs alone. Set model.loss.delta to 2, reject such "
        "sequences (SparsityAwareRejection), or take fewer optimizer steps per rollout (steps_per_generation, "
        "num_iterations)."
    )
