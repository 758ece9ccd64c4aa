"""What all modules share: a policy with its tokenizer, an optimiser, and export to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparse_rl_lightning.checkpoints import DurableCheckpointIO
from sparse_rl_lightning.modules.policy import PolicySource, disable_dropout, resolve_policy
from sparse_rl_lightning.modules.ranks import check_processes, check_strategy, fingerprint
from sparse_rl_lightning.modules.rng import random_state, restore_random_state
from sparse_rl_lightning.sharding import is_sharded, shard_fully, whole_weights


def default_optimizer(parameters: Any) -> torch.optim.Optimizer:  # torch's own parameter type
    """AdamW with a learning rate of 1e-6 and no weight decay."""
    return torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0)


class PolicyModule(LightningModule):
    """A trainable policy. The weights are loaded in ``configure_model``, when the strategy is ready for them.

    Args:
        policy: A Hugging Face folder or hub name, or a source of models.
        optimizer: Makes the optimiser from the parameters.
        lr_scheduler: Makes the learning-rate schedule from the optimiser, stepped every optimiser step.
        without_dropout: Set every dropout of the policy to zero.
    """

    def __init__(
        self,
        policy: str | PolicySource,
        optimizer: OptimizerCallable = default_optimizer,
        lr_scheduler: LRSchedulerCallable | None = None,
        without_dropout: bool = True,
    ) -> None:
        super().__init__()
        self.policy_source = resolve_policy(policy)
        self.optimizer_factory = optimizer
        self.lr_scheduler_factory = lr_scheduler
        self.without_dropout = without_dropout
        self.policy: PreTrainedModel | None = None
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.same_on_ranks: dict[str, str] = {}
        self._rotary: list[tuple[torch.nn.Module, str, Tensor]] = []
        self._random_state_of_training: dict[str, Any] | None = None  # while a validation draws numbers of its own

    def configure_callbacks(self) -> list[Callback]:
        """None; asked before the strategy starts anything, so here it is looked at, and the number of processes.

        Raises:
            ValueError: If the strategy is one that trains something else, or the trainer is of other processes.
        """
        check_strategy(self.trainer.strategy)
        check_processes(self.trainer.world_size)
        return []

    def setup(self, stage: str) -> None:
        """Have single-file checkpoints written durably, unless the trainer was given a way of its own."""
        strategy = self.trainer.strategy
        if isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
            if type(strategy.checkpoint_io) is TorchCheckpointIO:
                strategy.checkpoint_io = DurableCheckpointIO()

    def configure_model(self) -> None:
        """Load the policy once, whoever asks first."""
        if self.policy is not None:
            return
        self.policy, self.tokenizer = self.policy_source.load()
        self._rotary = [
            (module, name, value.clone())
            for module in self.policy.modules()
            for name, value in module.named_buffers(recurse=False)
            if name.endswith("inv_freq")
        ]
        self.policy.train()
        if self.without_dropout:
            disable_dropout(self.policy)
        self.on_policy_loaded()
        if self._device_mesh is not None:
            self.same_on_ranks["starting weights"] = fingerprint(self.policy.state_dict())  # FSDP2 takes a part of each
            self._shard_fully()

    def on_policy_loaded(self) -> None:
        """Called once, while the policy is still whole on every rank."""

    def _shard_fully(self) -> None:
        assert self.policy is not None
        assert self.device_mesh is not None
        if self.device_mesh["tensor_parallel"].size() > 1:
            raise ValueError(
                "ModelParallelStrategy: tensor parallelism is not supported. Set tensor_parallel_size to 1 and "
                "data_parallel_size to the number of ranks."
            )
        shard_fully(self, self.policy, self.device_mesh["data_parallel"])

    def on_fit_start(self) -> None:
        """Give rotary positions their precision back, which ``precision: bf16-true`` takes away with the weights'."""
        for module, name, value in self._rotary:
            setattr(module, name, value.to(self.device))

        self._random_state_of_training = None  # of a validation that did not come to its end

    on_test_start = on_predict_start = on_fit_start

    def on_validation_start(self) -> None:
        """As at the start of a fit; random numbers that are drawn from now on are none of training's."""
        PolicyModule.on_fit_start(self)
        self._random_state_of_training = random_state()

    def on_validation_end(self) -> None:
        """Training goes on as if there had been no validation, which a resumed run does not repeat."""
        restore_random_state(self.random_state_of_training())
        self._random_state_of_training = None

    def random_state_of_training(self) -> dict[str, Any]:
        """What a checkpoint must hold: ModelCheckpoint with a ``monitor`` saves before the module's validation ends."""
        return random_state() if self._random_state_of_training is None else self._random_state_of_training

    def configure_optimizers(self) -> Any:  # Lightning's own union of six types
        """The optimiser over the trainable parameters, and its schedule if there is one."""
        optimizer = self.optimizer_factory(self.parameter_groups())
        if self.lr_scheduler_factory is None:
            return optimizer
        schedule = {"scheduler": self.lr_scheduler_factory(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def parameter_groups(self) -> list[Any]:
        """What the optimiser gets: the trainable parameters, or groups of them with their own settings."""
        assert self.policy is not None
        return [p for p in self.policy.parameters() if p.requires_grad]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another model before a single tensor is overwritten.

        Raises:
            ValueError: If names or shapes of the weights differ.
        """
        self.configure_model()
        own, other = self.state_dict(), checkpoint.get("state_dict", {})
        if not other:
            return  # sharded strategies bring their own checks
        unknown, missing = sorted(other.keys() - own.keys()), sorted(own.keys() - other.keys())
        shapes = sorted(n for n in own.keys() & other.keys() if own[n].shape != other[n].shape)
        if unknown or missing or shapes:
            example = shapes[0] if shapes else (unknown or missing)[0]
            raise ValueError(
                f"ckpt_path: this checkpoint is of another model: {len(unknown)} unknown, {len(missing)} missing and "
                f"{len(shapes)} weights of another shape, for example {example!r}. Give the checkpoint of the policy "
                "named under model.policy, or change model.policy."
            )

    def export(self, folder: str | Path) -> None:
        """Write policy and tokenizer as a plain Hugging Face folder (safetensors).

        On several ranks all call this, and rank zero writes.
        """
        assert self.policy is not None
        assert self.tokenizer is not None
        is_zero = self._trainer is None or self.global_rank == 0
        state = None
        if is_sharded(self.policy):
            state = {n: v.detach().to("cpu", copy=True) for n, v in whole_weights(self.policy) if is_zero}
        if is_zero:
            self.policy_source.exported(self.policy).save_pretrained(folder, state_dict=state)
            self.tokenizer.save_pretrained(folder)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, T, V) logits of the dense policy, for trying things out."""
        self.configure_model()
        assert self.policy is not None
        logits: Tensor = self.policy(input_ids, use_cache=False).logits
        return logits
