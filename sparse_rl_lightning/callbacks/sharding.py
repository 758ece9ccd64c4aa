"""ZeroSharding: whole weights for rollouts if weights are sharded over ranks."""

from __future__ import annotations

import time
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from sparse_rl_lightning.callbacks.base import RolloutCallback, RolloutModule, rollout_module
from sparse_rl_lightning.checkpoints.folders import check_dtype
from sparse_rl_lightning.policies.sharding import ShadowPolicy, is_sharded, own_bytes, part_of
from sparse_rl_lightning.records import ScoredRollout


class ZeroSharding(RolloutCallback):
    """Give rollouts whole weights: live ones under DDP, ZeRO-1 and 2, a copy gathered once per rollout under ZeRO-3.

    The copy (shadow) is filled layer by layer before a rollout begins; from then on every rank decodes independently,
    and all synchronize when the last is done. Modules that roll out add this callback themselves. Logged with every
    rollout on several ranks, if sharding applies:

    ============================ ======= ==============================================================
    key                          unit    meaning
    ============================ ======= ==============================================================
    sharding/parameter_bytes     bytes   weights on this rank between steps
    sharding/optimizer_bytes     bytes   the optimizer's state and its own copy of weights on this rank
    sharding/shadow_bytes        bytes   the shadow
    sharding/gather_seconds      seconds time to fill the shadow
    sharding/wait_seconds        seconds time between this rank's last sequence and the slowest rank's
    ============================ ======= ==============================================================

    Args:
        shadow_dtype: Type of the shadow, such as ``bfloat16``, null for the policy's own.
        keep_shadow: Whether the shadow's memory is kept while the learner works; false frees it after every rollout.

    Raises:
        ValueError: If the type is unknown.
    """

    def __init__(self, shadow_dtype: str | None = None, keep_shadow: bool = True) -> None:
        self.shadow_dtype = check_dtype(shadow_dtype, "shadow_dtype")
        self.keep_shadow = keep_shadow
        self.gather_seconds = 0.0  # time of the last gathering

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Invalidate the shadow: other weights may be loaded at the same step. One rank has none."""
        self.is_active = trainer.world_size > 1
        shadow = rollout_module(pl_module, self).generator.shadow
        if shadow is not None:
            shadow.version = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Create the shadow, if one is needed, before the module creates its samplers."""
        self._attach(rollout_module(pl_module, self))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Fill the shadow if a rollout comes next: inside the step ZeRO-3 relies on its own gathering."""
        module = rollout_module(pl_module, self)
        if module.starts_rollout:
            self._fill(trainer, module)

    def on_rollout_drawn(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """Synchronize with the other ranks, free memory, and log."""
        start = time.perf_counter()
        trainer.strategy.barrier()
        metrics = {"sharding/wait_seconds": time.perf_counter() - start}
        shadow = module.generator.shadow
        if shadow is not None:
            metrics |= {"sharding/gather_seconds": self.gather_seconds, "sharding/shadow_bytes": float(shadow.nbytes)}
            self._free(module)
        metrics |= {
            "sharding/parameter_bytes": float(own_bytes(module.policy)),
            "sharding/optimizer_bytes": float(sum(_optimizer_bytes(optimizer) for optimizer in trainer.optimizers)),
        }
        module.log_dict(metrics, batch_size=len(scored.completions))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Free the shadow that a monitor, in whatever order, has drawn from once more."""
        self._free(rollout_module(pl_module, self))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fill the shadow for all batches at once."""
        self._attach(rollout_module(pl_module, self))
        self._fill(trainer, rollout_module(pl_module, self))

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Free the memory."""
        self._free(rollout_module(pl_module, self))

    on_test_end = on_predict_end = on_validation_end

    def _attach(self, module: RolloutModule) -> None:
        policy, generator = module.policy, module.generator
        if not is_sharded(policy):
            generator.shadow = None
        elif generator.shadow is None or generator.shadow.policy is not policy:
            cast(Any, module).restore_rotary()  # which the module itself does after all callbacks
            generator.shadow = ShadowPolicy(policy, self.shadow_dtype)

    def _free(self, module: RolloutModule) -> None:
        shadow = module.generator.shadow
        if shadow is not None and shadow.version is not None and not self.keep_shadow:
            module.generator.release()
            shadow.release()

    def _fill(self, trainer: Trainer, module: RolloutModule) -> None:
        if module.generator.shadow is not None:
            start = time.perf_counter()
            module.generator.shadow.fill(trainer.global_step)
            self.gather_seconds = time.perf_counter() - start


def _optimizer_bytes(optimizer: Any) -> int:
    """The bytes of an optimizer's state, and under DeepSpeed of the weights in full precision that it updates."""
    inner = getattr(optimizer, "optimizer", optimizer)  # DeepSpeed wraps the user's
    state = [value for values in inner.state.values() for value in values.values() if isinstance(value, torch.Tensor)]
    for stage in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):  # ZeRO-1 and 2, ZeRO-3
        state += getattr(optimizer, stage, [])
    return sum(part_of(tensor).nbytes for tensor in state)
