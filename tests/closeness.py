"""Closeness of numbers that are summed or grouped in another order: relative to the size of what is summed.

A bound for each number by itself is met on one processor and missed on the next, whose kernels add in another order: a
gradient near 0 is the rest of terms that are not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SHARE = 1e-4
"""What float32 leaves of sums over some thousand terms, with twenty times as much room as three processors needed."""

LOGPROBS = 2e-5
"""The same for log-probs of a few layers, whose logits are within some tens."""


def assert_same_sums(
    got: Tensor | Sequence[Tensor],
    want: Tensor | Sequence[Tensor],
    size: float | Tensor | None = None,
    share: float = SHARE,
) -> None:
    """Hold the length of the difference, of tensors whose elements count together, to a share of a size.

    The size is that of what is summed, by default the length of ``want``. A tensor is where ``want`` began: weights
    that have been trained are apart by a share of how far they have moved.
    """
    ours, theirs = (torch.cat([part.detach().flatten().double() for part in listed(side)]) for side in (got, want))
    apart = float((ours - theirs).norm())
    moved = float((theirs - size.flatten().double()).norm()) if isinstance(size, Tensor) else size
    of = float(theirs.norm()) if moved is None else moved
    assert apart <= share * of, f"apart by {apart:.3g}, {apart / of if of else float('inf'):.3g} of {of:.3g}"


def assert_same_logprobs(got: Tensor, want: Tensor, share: float = LOGPROBS) -> None:
    """Hold log-probs to a share of the largest one.

    They are differences of logits, and round as the largest logit does: the least likely token shows how large that is.
    """
    size = max(1.0, float(want.detach().nan_to_num(0.0, 0.0, 0.0).abs().amax()))
    torch.testing.assert_close(got, want, atol=share * size, rtol=0)


def listed(tensors: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Several tensors, or one."""
    return [tensors] if isinstance(tensors, Tensor) else tensors
