"""PolicyModule: the base of all modules, a policy with its tokenizer, an optimizer, and export to a folder."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparse_rl_lightning.callbacks.foreign import check_foreign
from sparse_rl_lightning.callbacks.guards.log_guard import LastSave, LogGuard
from sparse_rl_lightning.callbacks.guards.run_lock import RunLock
from sparse_rl_lightning.callbacks.schedules import FollowValidation, follow_metric
from sparse_rl_lightning.checkpoints import DurableCheckpointIO
from sparse_rl_lightning.checkpoints.folders import SPOILED, check_dtype, save_folder
from sparse_rl_lightning.checkpoints.plain import readable
from sparse_rl_lightning.distributed.ranks import check_processes, check_strategy, end_group_at_exit
from sparse_rl_lightning.distributed.sharded import ShardedStrategy
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.fingerprints import weights_digest
from sparse_rl_lightning.modules.optimizers import check_numbers, default_optimizer, lost_steps
from sparse_rl_lightning.modules.resume.optimizer import describe_optimizer
from sparse_rl_lightning.modules.resume.run_state import RunState
from sparse_rl_lightning.policies.modes import WideProducts, disable_dropout, lacks_bfloat16
from sparse_rl_lightning.policies.pretrained import check_finite
from sparse_rl_lightning.policies.sharding import is_sharded, shard_fully, whole_weights
from sparse_rl_lightning.policies.source import PolicySource, check_trainable, has_adapters, resolve_policy
from sparse_rl_lightning.rollout.prompts import default_end_token_ids

FOLDERS_OF_LOGGERS = ("_root_dir", "_save_dir")


class PolicyModule(LightningModule):
    """A trainable policy, whose weights are loaded in ``configure_model``, when the strategy is ready for them.

    Args:
        policy: Hugging Face folder or hub name, or a source of models.
        optimizer: Function from the parameters to the optimizer.
        lr_scheduler: Function from the optimizer to the learning-rate schedule, stepped every optimizer step.
            Lightning's ``ReduceLROnPlateau`` follows the metric of its ``monitor``: a validation's after each one.
        disable_dropout: Set every dropout of the policy to zero.
    """

    default_callbacks: tuple[type[Callback], ...] = (RunLock, LogGuard, LastSave, FollowValidation)
    """Callbacks of every run; one of the trainer's own of the same class replaces one of these."""

    _products: AbstractContextManager[Any] = nullcontext()  # what a training step and its backward pass run in
    _world_size = 1  # of the trainer

    resumed_parts: tuple[str, ...] = ()
    """Parts that a checkpoint must have besides Lightning's own, if training is to continue from it."""

    def __init__(
        self,
        policy: str | PolicySource,
        optimizer: OptimizerCallable = default_optimizer,
        lr_scheduler: LRSchedulerCallable | None = None,
        disable_dropout: bool = True,
    ) -> None:
        super().__init__()
        self.policy_source = resolve_policy(policy)
        self.optimizer_factory = optimizer
        self.lr_scheduler_factory = lr_scheduler
        self.disable_dropout = disable_dropout
        self.policy: PreTrainedModel = None  # type: ignore[assignment]  # until configure_model
        self.tokenizer: PreTrainedTokenizerBase = None  # type: ignore[assignment]  # until the policy is loaded
        self.same_on_ranks: dict[str, str] = {}
        self.run_state: RunState = RunState(self)
        self._rotary: list[tuple[torch.nn.Module, str, Tensor]] = []

    @property
    def seeds(self) -> dict[str, int]:
        """The seeds of all that is drawn, by the keys that set them, once the trainer has set this up."""
        return self.run_state.seeds

    def configure_callbacks(self) -> list[Callback]:
        """One of each of ``default_callbacks`` that the trainer was not given.

        This is called before the strategy starts anything, so strategy and number of processes are checked here.

        Raises:
            ValueError: If the strategy trains something else, or the trainer expects other processes.
        """
        self._world_size = self.trainer.world_size
        check_strategy(self.trainer.strategy)
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it where no type says so
        for callback in callbacks:
            check_foreign(callback)
        fix_folders(self.trainer)
        # ranks that have met and trained together may test one by one, as Lightning advises
        if self.trainer.state.fn == TrainerFn.FITTING or not torch.distributed.is_initialized():
            check_processes(self.trainer.world_size)
        missing = [c for c in self.default_callbacks if not any(isinstance(callback, c) for callback in callbacks)]
        return [create() for create in missing]

    def setup(self, stage: str) -> None:
        """Check the trainer's numbers; write checkpoints durably, unless the trainer has its own way to write files.

        Raises:
            ValueError: If a number that the trainer does not check itself is out of range, or the trainer's own way
                to write checkpoints is of no use where ranks write parts.
        """
        self.run_state.set_up()
        if self.trainer.world_size > 1:
            end_group_at_exit()
        check_number("trainer.accumulate_grad_batches", self.trainer.accumulate_grad_batches, least=1)
        if self.trainer.gradient_clip_val is not None:
            check_number("trainer.gradient_clip_val", self.trainer.gradient_clip_val)
        strategy = self.trainer.strategy
        if isinstance(strategy, (SingleDeviceStrategy, DDPStrategy, ShardedStrategy)):
            if type(strategy.checkpoint_io) is TorchCheckpointIO:
                strategy.checkpoint_io = DurableCheckpointIO()
        if isinstance(strategy, ShardedStrategy) and not isinstance(strategy.checkpoint_io, DurableCheckpointIO):
            raise UserError(
                f"trainer.plugins: {type(strategy.checkpoint_io).__name__} writes files, and the checkpoints of "
                f"{type(strategy).__name__} are folders that all ranks write. Leave it out."
            )

    def configure_model(self) -> None:
        """Load the policy on first use, on the host, as on any machine; Lightning moves it to its device."""
        if self.policy is None:
            with torch.device("cpu"):  # Lightning's own context is that of the device
                self._load_policy()

    def _load_policy(self) -> None:
        self.policy, self.tokenizer = self._loaded_source.load()
        self.run_state.see_policy()
        self._rotary = [
            (module, name, value.clone())
            for module in self.policy.modules()
            for name, value in module.named_buffers(recurse=False)
            if name.endswith("inv_freq")
        ]
        self.policy.train()
        if self.disable_dropout:
            disable_dropout(self.policy)
        self.on_policy_loaded()
        if self._device_mesh is not None:
            self.same_on_ranks["starting weights"] = weights_digest(self.policy)  # FSDP2 keeps only a part of each
            shard_fully(self, self.policy, self._device_mesh["data_parallel"])

    @property
    def _loaded_source(self) -> PolicySource:
        """The source of weights, in the type of their folder where the engine keeps float32 ones of its own."""
        if self._trainer is None or not isinstance(self.trainer.strategy, DeepSpeedStrategy):
            return self.policy_source
        return self.policy_source if self.trainer.precision.startswith("32") else self.policy_source.as_stored()

    def on_policy_loaded(self) -> None:
        """Hook for subclasses, called once while the policy is still whole on every rank."""

    def on_fit_start(self) -> None:
        """Restore the rotary positions; multiply as float32 where the processor would emulate the products."""
        self.restore_rotary()
        is_mixed = self.trainer.precision == "bf16-mixed"
        is_narrow = is_mixed or any(parameter.dtype == torch.bfloat16 for parameter in self.policy.parameters())
        if is_narrow and self.device.type == "cpu" and lacks_bfloat16():
            self._products = WideProducts()  # type: ignore[no-untyped-call]  # torch's

    on_test_start = on_predict_start = on_fit_start

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Differentiate the loss, with the products of the step."""
        with self._products:
            super().backward(loss, *args, **kwargs)

    def restore_rotary(self) -> None:
        """Restore the precision of rotary positions, which ``precision: bf16-true`` reduces with the weights'."""
        # moved once: CUDA graphs read the memory of the first
        self._rotary = [(module, name, value.to(self.device)) for module, name, value in self._rotary]
        for module, name, value in self._rotary:
            setattr(module, name, value)

    def on_validation_start(self) -> None:
        """Prepare like a fit; random numbers drawn during validation must not affect training."""
        PolicyModule.on_fit_start(self)
        self.run_state.begin_validation()

    def on_validation_end(self) -> None:
        """Restore training's random state."""
        self.run_state.end_validation()

    def configure_optimizers(self) -> Any:  # Lightning's own union of six types
        """The optimizer over the trainable parameters, and its schedule if there is one.

        Raises:
            ValueError: If the optimizer or this module refuses one of its numbers.
        """
        optimizer, schedule = self.configured()
        self.run_state.optimizer = describe_optimizer(optimizer, schedule)
        if schedule is None:
            return optimizer
        stepped = {"scheduler": schedule, "interval": "step", "reduce_on_plateau": False}  # as lr_scheduler_step says
        return {"optimizer": optimizer, "lr_scheduler": stepped}

    def configured(self) -> tuple[torch.optim.Optimizer, Any]:
        """An optimizer and its schedule, None if there is none, as they are before the first step."""
        groups = self.parameter_groups()
        if groups == [] or has_adapters(self.policy):
            check_trainable(self.policy)
        try:
            optimizer = self.optimizer_factory(groups)
        except ValueError as error:
            raise UserError(f"model.optimizer: {error}") from error
        check_numbers(optimizer)
        schedule = None if self.lr_scheduler_factory is None else self.lr_scheduler_factory(optimizer)
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) and not hasattr(schedule, "monitor"):
            raise UserError(
                "model.lr_scheduler: torch's ReduceLROnPlateau does not know what it looks at. Give lightning.pytorch."
                "cli.ReduceLROnPlateau with monitor, such as monitor='reward', mode='max'."
            )
        return optimizer, schedule

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step a schedule; one that follows a metric of validation is stepped at its end."""
        if isinstance(scheduler, ReduceLROnPlateau):
            follow_metric(scheduler, self.trainer, validated=False)
        else:
            super().lr_scheduler_step(scheduler, metric)

    def parameter_groups(self) -> list[Any]:
        """The parameters for the optimizer: the trainable ones, or groups of them with their own settings."""
        return [p for p in self.policy.parameters() if p.requires_grad]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another model before a single tensor is overwritten; in ``fit``, of another run.

        Raises:
            ValueError: If names or shapes of the weights differ, one is NaN or infinite, or training cannot continue
                from it.
        """
        self.configure_model()
        self.run_state.load(checkpoint)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the state of the run, and its configuration, so that a resumed run knows what was changed."""
        self.run_state.save(checkpoint)
        if isinstance(self.trainer.strategy.checkpoint_io, TorchCheckpointIO):
            checkpoint.update(readable(checkpoint))  # on all ranks, of which one writes

    def on_train_start(self) -> None:
        """Warn of steps that 16-bit weights lose; apply changed settings to a resumed run, and report them."""
        lost = None if isinstance(self.trainer.strategy, DeepSpeedStrategy) else lost_steps(self.trainer.optimizers)
        if lost is not None:
            rank_zero_warn(lost)
        self.run_state.apply()

    @property
    def has_own_optimizer(self) -> bool:
        """Whether the optimizer is the configured one, and not of a subclass."""
        return type(self).configure_optimizers is PolicyModule.configure_optimizers

    @property
    def compares_with_start(self) -> bool:
        """Whether the loss reads the policy that training began with, from somewhere else than the checkpoint."""
        return False

    def export(self, folder: str | Path, dtype: str | None = None) -> None:
        """Write policy and tokenizer as a plain Hugging Face folder (safetensors), in a type, default the policy's.

        On several ranks all call this, and rank zero writes.
        """
        self.configure_model()
        is_zero = self._trainer is None or self.global_rank == 0
        state = None
        if is_sharded(self.policy):
            state = {n: v.detach().to("cpu", copy=True) for n, v in whole_weights(self.policy) if is_zero}
        if is_zero:
            self._export(self.policy, folder, dtype, state)

    def _export(
        self, policy: PreTrainedModel, folder: str | Path, dtype: str | None, state: dict[str, Tensor] | None = None
    ) -> None:
        """Write a model, with whole weights if it has only parts, and the end tokens that it was trained with."""
        target = check_dtype(dtype, "dtype")
        check_finite(self.named_parameters() if state is None else state.items(), "export", SPOILED)
        plain = self.policy_source.exported(policy) if target is None else self.policy_source.exported(policy, target)
        save_folder(folder, plain, self.tokenizer, state=state, dtype=target, ends=self.end_token_ids())

    def end_token_ids(self) -> list[int]:
        """Token ids at which a completion of the policy ends."""
        return default_end_token_ids(self.policy, self.tokenizer, tell=False)

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> Self:
        """A module with a checkpoint's weights, as Lightning's, from plain data; the module's arguments are keywords.

        Raises:
            ValueError: If one of them is missing: a checkpoint does not hold them.
        """
        try:
            return super().load_from_checkpoint(*args, **{"weights_only": True, **kwargs})
        except TypeError as error:
            raise UserError(
                f"{cls.__name__}.load_from_checkpoint: {error}. A checkpoint holds weights and no arguments of the "
                "module: name those that it was made with, such as policy=... and compressor=... . For the policy "
                "alone, `sparse-rl export` writes a folder that from_pretrained reads."
            ) from error

    def forward(self, input_ids: Tensor) -> Tensor:
        """The logits (B, T, V) of the dense policy, for experiments."""
        self.configure_model()
        logits: Tensor = self.policy(input_ids, use_cache=False).logits
        return logits


def fix_folders(trainer: Trainer) -> None:
    """Make the folders of a run and of its loggers absolute: a user's function may change the working directory.

    Those that Lightning reads later are its own attributes; it has no setting for them once a logger is made.
    """
    owners = [
        (trainer, "_default_root_dir"),
        *((logger, name) for logger in trainer.loggers for name in FOLDERS_OF_LOGGERS),
    ]
    for owner, name in owners:
        path = vars(owner).get(name)
        if path and isinstance(path, str | Path) and "://" not in str(path):
            setattr(owner, name, os.path.abspath(os.path.expanduser(path)))
