"""Optimizers of modules: the default, what is refused, steps that 16 bits round away."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparse_rl_lightning.errors import check_number
from sparse_rl_lightning.policies.sharding import part_of

FINITE = ("lr", "weight_decay", "eps", "betas", "momentum")
"""Settings of an optimizer that cannot be infinite; for others it may mean no limit (Prodigy's ``growth_rate``)."""


def check_numbers(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose numbers would ruin the weights: NaN, infinite, or a learning rate below 0.

    Raises:
        ValueError: If it has such a number.
    """
    for group in optimizer.param_groups:
        for name, value in group.items():
            numbers = value if isinstance(value, tuple) else (value,)
            for number in numbers:
                if isinstance(number, float) and (name in FINITE or math.isnan(number)):
                    check_number(f"model.optimizer.{name}", number, least=0 if name == "lr" else None)


def default_optimizer(parameters: Any) -> Optimizer:  # torch's own parameter type
    """AdamW with a learning rate of 1e-6 and no weight decay."""
    return torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0)


def lost_steps(optimizers: Iterable[Optimizer]) -> str | None:
    """A line on the trained weights in 16 bits, and the share that a first step leaves as it is; None without any.

    AdamW's first steps, and all of Lion's, are of the size of the learning rate, whatever the gradient. A weight whose
    distance to the next number of its type is more than twice that is rounded back to what it was, in every step.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    trained = [
        (part_of(parameter).detach(), max(float(group["lr"]), float(group.get("initial_lr", 0))), "betas" in group)
        for group in groups for parameter in group["params"] if parameter.dtype.itemsize == 2
    ]  # fmt: skip
    if not trained:
        return None
    dtype, rate = trained[0][0].dtype, max(rate for _, rate, _ in trained)
    if all(moves_by_rate for *_, moves_by_rate in trained):
        stuck = sum(int(_is_stuck(values, rate).sum()) for values, rate, _ in trained)
        share = f" {stuck / max(1, sum(values.numel() for values, *_ in trained)):.1%} of them do not move by a step of"
    else:
        share = " Most of them may not move by steps of"
    return (
        f"The trained weights are {str(dtype).removeprefix('torch.')}, which rounds small steps away.{share} the "
        f"learning rate, lr={rate:g}. Train float32 weights: leave the policy's dtype at auto, with "
        "trainer.precision=bf16-mixed to compute in 16 bits."
    )


def _is_stuck(values: Tensor, step: float) -> Tensor:
    """Where a step is less than half of the distance to the next number, which grows with the power of two."""
    if step <= 0:
        return torch.ones_like(values, dtype=torch.bool)
    exponent = math.floor(math.log2(2 * step / torch.finfo(values.dtype).eps)) + 1
    return values.abs() >= 2.0**exponent
