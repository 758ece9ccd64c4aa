"""SparseGRPO on a model and prompts so small that a fit takes a second."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from sparse_rl_lightning.callbacks.base import RolloutCallback
from sparse_rl_lightning.compressors import RKV, Compressor
from sparse_rl_lightning.data.base import PromptDataModule
from sparse_rl_lightning.modules import GRPOLoss, LearnerOptions, RolloutOptions, SparseGRPO
from sparse_rl_lightning.policies import LoadedPolicy
from sparse_rl_lightning.records import Rollout, ScoredRollout
from sparse_rl_lightning.rollout import SamplingParams
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

ALPHABET = "0123456789abcdef"


class Rows(PromptDataModule):
    """Sixteen short prompts of different lengths."""

    def train_rows(self) -> list[dict[str, Any]]:
        return [{"prompt": ALPHABET[i:] + "a", "answer": ALPHABET[i]} for i in range(16)]

    def val_rows(self) -> list[dict[str, Any]]:
        return self.train_rows()[:4]


def likes_a(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    return [text.count("a") / 10 for text in completions]


GROUPS: dict[str, type[Any]] = {
    "sampling": SamplingParams, "rollout": RolloutOptions, "loss": GRPOLoss, "learner": LearnerOptions
}  # fmt: skip


def grouped(**options: Any) -> dict[str, Any]:
    """Arguments of SparseGRPO from flat names: each goes into its group, whose other fields keep their defaults."""
    groups: dict[str, dict[str, Any]] = {"sampling": {"num_generations": 8}}
    for name in list(options):
        group = next((key for key, kind in GROUPS.items() if name in {field.name for field in fields(kind)}), None)
        if group is not None:
            groups.setdefault(group, {})[name] = options.pop(name)
    return {key: GROUPS[key](**values) for key, values in groups.items()} | options


def module(
    reward: Any = likes_a,
    compressor: Compressor | None = None,
    lr: float = 0.5,
    kind: type[SparseGRPO] = SparseGRPO,
    **kwargs: Any,
) -> SparseGRPO:
    tokenizer = character_tokenizer(ALPHABET)
    policy = tiny_model(vocab_size=len(tokenizer), hidden_size=32, initializer_range=0.1, eos_token_id=1)
    options: dict[str, Any] = {
        "num_generations": 4,
        "max_completion_length": 12,
        "seed": 3,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=lr),
        **kwargs,
    }
    return kind(
        LoadedPolicy(policy, tokenizer),
        compressor or RKV(budget=8, buffer=3, num_sinks=1, window=2),
        reward,
        **grouped(**options),
    )


def loaded(**options: Any) -> SparseGRPO:
    """The module with its policy, which a trainer would load."""
    grpo = module(**options)
    grpo.configure_model()
    return grpo


def quiet(max_steps: int = -1, **options: Any) -> Trainer:
    """A trainer that shows and keeps nothing."""
    silent = dict.fromkeys(("enable_checkpointing", "enable_model_summary", "enable_progress_bar", "logger"), False)
    return Trainer(max_steps=max_steps, **{"accelerator": "cpu"} | silent | options)


def every_step(folder: Any, **options: Any) -> ModelCheckpoint:
    """A checkpoint after every optimizer step, of which the last one stays."""
    options = {"every_n_train_steps": 1, "save_last": True, "enable_version_counter": False} | options
    return ModelCheckpoint(folder, **options)


def fit(
    grpo: SparseGRPO,
    steps: int = 4,
    callbacks: list[Any] | None = None,
    data: PromptDataModule | None = None,
    ckpt_path: Any = None,
    **trainer_args: Any,
) -> Trainer:
    options = {"limit_val_batches": 0, "num_sanity_val_steps": 0} | trainer_args
    trainer = quiet(steps, callbacks=callbacks, **options)
    trainer.fit(grpo, datamodule=data or Rows(prompts_per_rollout=4), ckpt_path=ckpt_path)
    return trainer


def weights(grpo: SparseGRPO) -> Tensor:
    return torch.cat([p.detach().flatten() for p in grpo.policy.parameters()])


class Recorder(RolloutCallback):
    """Keeps what it sees."""

    def __init__(self) -> None:
        self.scored: list[ScoredRollout] = []

    def on_rollout_scored(self, trainer: Trainer, module: Any, scored: ScoredRollout) -> None:
        self.scored.append(scored)


class Stale(RolloutCallback):
    """From a rollout on a token of every bad sequence was near-impossible before the update, on all ranks or one."""

    def __init__(self, first: int, rank: int | None = None) -> None:
        self.first, self.rank = first, rank

    def correct(self, trainer: Trainer, module: Any, part: Rollout) -> None:
        if module.num_rollouts >= self.first and self.rank in (None, trainer.global_rank):
            token = part.completion_mask.int().argmax(dim=1)
            part.old_logprobs[torch.arange(len(part)), token] -= 12 * (part.advantages < 0)


def is_checkpointing(policy: torch.nn.Module) -> bool:
    """Whether any layer checkpoints; transformers' own property has two names."""
    return any(getattr(module, "gradient_checkpointing", False) for module in policy.modules())
