"""TRL's trainer and ours on a policy and prompts so small that a step takes a fraction of a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from sparse_rl_lightning.compressors import RKV, FullKV
from sparse_rl_lightning.integrations.trl import SparseGRPOTrainer
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

ALPHABET = "0123456789abcdef"
PROMPTS = [ALPHABET[i:] + "a" for i in range(16)]  # of different lengths


def evicting() -> RKV:
    return RKV(budget=8, buffer=3, num_sinks=1, window=2)


def likes_letters(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    return [sum(map(str.isalpha, text)) / 12 for text in completions]


def config(folder: Path, **changes: Any) -> GRPOConfig:
    """Two micro-batches of 4 sequences make a step and a generation batch, unless changed."""
    return GRPOConfig(
        str(folder),
        **{
            "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True,
            "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4, "max_steps": 2,
            "max_completion_length": 12, "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-2,
            "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0, "per_device_eval_batch_size": 4,
            **changes,
        },
    )  # fmt: skip


def policy(folder: Path, **sizes: Any) -> str:
    """A folder with a policy whose distributions are peaked, so that what is evicted matters."""
    model = tiny_model(**{"vocab_size": 19, "hidden_size": 32, "initializer_range": 0.3, **sizes})
    model.save_pretrained(folder / "policy")
    character_tokenizer(ALPHABET).save_pretrained(folder / "policy")
    return str(folder / "policy")


def build(
    folder: Path, kind: type[GRPOTrainer] = SparseGRPOTrainer, more: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """A trainer of this kind; ``more`` are its other arguments, ``changes`` those of its configuration."""
    more = dict(more or {})
    if issubclass(kind, SparseGRPOTrainer):
        more.setdefault("compressor", FullKV())
    return kind(
        model=more.pop("model", None) or policy(folder),
        reward_funcs=more.pop("reward_funcs", likes_letters),
        args=config(folder, **changes),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=more.pop("processing_class", character_tokenizer(ALPHABET)),
        **more,
    )


def listening(trainer: Any) -> list[list[list[int]]]:
    """The completions of every rollout that the trainer will draw."""
    heard: list[list[list[int]]] = []
    draw = trainer._generate_single_turn

    def listen(*given: Any) -> Any:
        found = draw(*given)
        heard.append(found[0])
        return found

    trainer._generate_single_turn = listen
    return heard


def weights(trainer: GRPOTrainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def logged(trainer: GRPOTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]
