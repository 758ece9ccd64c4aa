"""Steps of an optimizer that weights in 16 bits round away."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

HALF = (torch.bfloat16, torch.float16)


def lost_steps(optimizers: Iterable[Optimizer]) -> str | None:
    """A line on the trained weights in 16 bits, and the share that a first step leaves as it is; None without any.

    AdamW's first steps, and all of Lion's, are of the size of the learning rate, whatever the gradient. A weight whose
    distance to the next number of its type is more than twice that is rounded back to what it was, in every step.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    found = [
        (_local(parameter), max(float(group["lr"]), float(group.get("initial_lr", 0))), "betas" in group)
        for group in groups for parameter in group["params"] if parameter.dtype in HALF
    ]  # fmt: skip
    if not found:
        return None
    dtype, rate = found[0][0].dtype, max(rate for _, rate, _ in found)
    share = ""
    if all(moves_by_rate for *_, moves_by_rate in found):
        stuck = sum(int(_is_stuck(values, rate).sum()) for values, rate, _ in found)
        share = f" {stuck / max(1, sum(values.numel() for values, *_ in found)):.1%} of them do not move by a step of"
    else:
        share = " Most of them may not move by steps of"
    return (
        f"The trained weights are {str(dtype).removeprefix('torch.')}, which rounds small steps away.{share} the "
        f"learning rate, lr={rate:g}. Train float32 weights: leave the policy's dtype at auto, with "
        "trainer.precision=bf16-mixed to compute in 16 bits."
    )


def _local(parameter: Tensor) -> Tensor:
    """The values of this rank."""
    values = parameter.detach()
    return values.to_local() if isinstance(values, DTensor) else values


def _is_stuck(values: Tensor, step: float) -> Tensor:
    """Where a step is less than half of the distance to the next number, which grows with the power of two."""
    if step <= 0:
        return torch.ones_like(values, dtype=torch.bool)
    exponent = math.floor(math.log2(2 * step / torch.finfo(values.dtype).eps)) + 1
    return values.abs() >= 2.0**exponent
