"""Settings of optimizer and schedule in a resumed run: some from its checkpoint, some from its configuration.

The state of an optimizer (momenta) comes from the checkpoint. Its learning rate, weight decay and so on, and the
schedule, come from the configuration: the schedule's value after the steps that were done. A checkpoint has a
description of the configuration, so that without any change nothing is touched, and a run continues bitwise.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.fingerprints import change, describe, full_name
from sparse_rl_lightning.policies.pretrained import check_finite

KEY = "sparse_rl_optimizer"


def describe_optimizer(optimizer: Optimizer, schedule: LRScheduler | None) -> dict[str, str]:
    """Describe an optimizer and a schedule that were just created, for comparison."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    described = describe(schedule, without=("optimizer",))
    return {"optimizer": full_name(type(optimizer)), "groups": describe(groups), "described": described}


def check_parts(checkpoint: dict[str, Any], parts: list[str]) -> None:
    """Refuse to continue training from a checkpoint that lacks a part it needs.

    Raises:
        ValueError: If a part is missing.
    """
    missing = [name for name in parts if name not in checkpoint]
    if missing:
        raise UserError(
            f"ckpt_path: this checkpoint has no {', '.join(map(repr, missing))}, so training cannot go on from it: it "
            "is of another module or of version 0.1, or was written with save_weights_only. Give another, or start "
            "anew from its weights: sparse-rl export, and model.policy."
        )


def check_weights(stored: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse weights of another model, NaN or infinite ones.

    Args:
        stored: A checkpoint's weights.
        expected: The module's.

    Raises:
        ValueError: If names or shapes differ, or a weight is no finite number.
    """
    unknown, missing = sorted(stored.keys() - expected.keys()), sorted(expected.keys() - stored.keys())
    shapes = sorted(n for n in expected.keys() & stored.keys() if expected[n].shape != stored[n].shape)
    if unknown or missing or shapes:
        example = shapes[0] if shapes else (unknown or missing)[0]
        raise UserError(
            f"ckpt_path: this checkpoint is of another model: {len(unknown)} unknown, {len(missing)} missing and "
            f"{len(shapes)} weights of another shape, for example {example!r}. Give the checkpoint of the policy "
            "named under model.policy, or change model.policy."
        )
    check_finite(stored.items(), "ckpt_path: this checkpoint")


def check_optimizer(checkpoint: dict[str, Any], optimizer: Optimizer) -> None:
    """Refuse the state of another optimizer than the configured one.

    Args:
        checkpoint: Checkpoint of Lightning; strategies that shard keep the state elsewhere.
        optimizer: Optimizer as configured.

    Raises:
        ValueError: If it is of another class, or of other groups of parameters.
    """
    was, now = checkpoint.get(KEY, {}).get("optimizer"), full_name(type(optimizer))
    groups = (checkpoint.get("optimizer_states") or [{}])[0].get("param_groups")
    if was is not None and was != now:
        raise UserError(
            f"ckpt_path: this checkpoint is of {was}, model.optimizer is {now}, and neither knows the other's state. "
            "Resume with the same, or start anew from the checkpoint's weights: sparse-rl export, and model.policy."
        )
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if groups is not None and [len(group["params"]) for group in groups] != sizes:
        raise UserError(
            "ckpt_path: this checkpoint's optimizer has other groups of parameters: it trained another part of the "
            "policy. Resume with the configuration it was trained with."
        )


def advance(schedule: LRScheduler | None, steps: int) -> None:
    """Advance a schedule that was just created by ``steps`` steps, with its optimizer's settings.

    One that follows a metric begins anew: what it saw is over.
    """
    if schedule is None or isinstance(schedule, ReduceLROnPlateau):
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # before optimizer.step, as is meant
        for _ in range(steps):
            schedule.step()


def apply_settings(optimizer: Optimizer, wanted: Optimizer) -> list[str]:
    """Give an optimizer the settings of another of its class, group by group, except for values it counts itself.

    Returns:
        Descriptions of the changes.
    """
    changes: dict[str, None] = {}
    kept = {"params", *_counted(wanted)}  # a strategy may have wrapped the first
    for group, wanted_group in zip(optimizer.param_groups, wanted.param_groups, strict=True):
        for name, value in wanted_group.items():
            if name in kept:
                continue
            old, new = _plain(group.get(name)), _plain(value)
            if old != new and name != "initial_lr":
                changes[f"{name} was {old} and is {new}"] = None
            if isinstance(group.get(name), Tensor):
                group[name].fill_(new)  # graphs use its address
            else:
                group[name] = value
    return list(changes)


def schedule_change(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What has become of a checkpoint's schedule; nothing is known of one before version 0.3."""
    before = was.get("described", now["described"])
    return [] if before == now["described"] else [change("the schedule", before, now["described"])]


def _counted(optimizer: Optimizer) -> set[str]:
    """Values that an optimizer keeps in its groups itself: a number of steps, Prodigy's estimate of its rate."""
    arguments = {name for base in type(optimizer).__mro__ for name in inspect.signature(base.__init__).parameters}  # type: ignore[misc]  # every class has an __init__
    return optimizer.defaults.keys() - arguments


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
