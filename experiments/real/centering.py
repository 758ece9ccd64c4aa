"""Score centering on the real model: its gradient, alone and with bounded weights, beside the full cache's.

    python -m experiments.real.centering [--weights "before training"] [--chunks 16] [--jobs 2] [--finished]

As ``experiments.real.gradients``, by the protocol of ``experiments.gradients``, with the 128 most likely tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from experiments.gradients.__main__ import main
from experiments.gradients.centering import Centered
from experiments.gradients.variants import Variant
from experiments.real.gradients import BEFORE, CASES, StorySamples, sources


@dataclass(frozen=True)
class CenteredStories(StorySamples):
    """The variants of the small policy, on stories."""

    seed: int = 78

    variants: ClassVar[tuple[Variant, ...]] = Centered.variants
    rival: ClassVar = Centered.rival
    top: ClassVar = 128


if __name__ == "__main__":
    main(__doc__, "real_centering_gradients", (BEFORE,), CASES, CenteredStories(), sources)
