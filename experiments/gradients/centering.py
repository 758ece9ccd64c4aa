"""Score centering at fixed weights: its gradient, alone and with bounded weights, beside the full cache's.

    python -m experiments.gradients.centering [--weights warm late] [--chunks 16] [--jobs 2] [--finished]

As ``experiments.gradients``, by its own protocol (PROTOCOL.md), with the whole vocabulary of the small policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from experiments.gradients.__main__ import Case, main, sources
from experiments.gradients.measure import Samples
from experiments.gradients.variants import BOTH, CENTERING, VARIANTS, Variant

CASES: tuple[Case, ...] = (("SnapKV", 30), ("SnapKV", 26))
WEIGHTS = ("warm", "middle", "late")


@dataclass(frozen=True)
class Centered(Samples):
    """Naive, bounded weights, centering, and both."""

    seed: int = 78  # other prompts than those by which centering was first looked at

    variants: ClassVar[tuple[Variant, ...]] = (
        *(variant for variant in VARIANTS if variant.name in ("naive", "reweighting only")), CENTERING, BOTH,
    )  # fmt: skip
    rival: ClassVar = "reweighting only"
    top: ClassVar = 25


if __name__ == "__main__":
    main(__doc__, "centering_gradients", WEIGHTS, CASES, Centered(), sources)
