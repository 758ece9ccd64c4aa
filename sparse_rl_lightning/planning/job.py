"""Job: what a configuration says about memory and time, per GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.learner.block import BlockPlan
from sparse_rl_lightning.learner.forward import LearnerOptions
from sparse_rl_lightning.learner.memory import MicroBatch
from sparse_rl_lightning.planning.blueprint import Blueprint, empty_model
from sparse_rl_lightning.policies.geometry import CacheGeometry, kv_type
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rollout import RolloutOptions, SamplingParams

PROMPT = 256
"""Default number of tokens of the longest prompt."""

MOST_TOKENS = 2**24
"""The longest sequence that is counted; models of 2026 know up to ten million positions."""

CUDA = torch.device("cuda")
HALF = {"bf16": torch.bfloat16, "16": torch.float16}
"""16-bit types by the beginning of Lightning's ``precision``."""


@dataclass(frozen=True)
class Sharding:
    """What ranks share: stages of DeepSpeed's ZeRO, 0 for nothing (one device, DDP)."""

    stage: int = 0
    ranks: int = 1
    offloads_optimizer: bool = False
    offloads_weights: bool = False


@dataclass(frozen=True)
class Job:
    """A training run of one GPU, with the objects of its configuration."""

    blueprint: Blueprint
    compressor: Compressor
    sampling: SamplingParams
    rollout: RolloutOptions
    learner: LearnerOptions
    optimizer: Callable[[Any], torch.optim.Optimizer]  # from the parameters
    block: BlockPlan  # of a rollout, on this rank
    retriever: Retriever | None = None
    beta: float = 0.0
    precision: str = "32-true"
    sharding: Sharding = Sharding()
    prompt: int = PROMPT
    keeps_evictions: bool = False  # whether the loss reads their record
    num_steps: int | None = None  # optimizer steps of the whole run, None where they are not known

    def __post_init__(self) -> None:
        check_number("--prompt", self.prompt, least=1)
        for of, count, most in (
            ("the longest sequence", self.length, MOST_TOKENS),
            ("the sequences of a rollout", self.length * self.sequences, 256 * MOST_TOKENS),
        ):
            if count > most:
                raise UserError(
                    f"A plan counts up to {most:,} tokens of {of}, got {count:,}. Lower max_completion_length or "
                    "--prompt, prompts_per_rollout or num_generations."
                )

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights while they are trained; DeepSpeed's mixed precision has them in 16 bits."""
        return self._cast or self.blueprint.loaded_dtype

    @property
    def model(self) -> PreTrainedModel:
        """The model as it is trained, without memory."""
        return empty_model(self.blueprint, self.dtype, self.is_of_one_type)

    @property
    def is_of_one_type(self) -> bool:
        """Whether Lightning or DeepSpeed give all weights one type, adapters too."""
        return self._cast is not None

    @property
    def _cast(self) -> torch.dtype | None:
        """The type that Lightning or DeepSpeed gives all weights, None for theirs."""
        half = HALF.get(self.precision.partition("-")[0])
        if half is not None and (self.precision.endswith("true") or self.sharding.stage):
            return half
        return torch.float64 if self.precision == "64-true" else None

    @property
    def autocast(self) -> torch.dtype | None:
        """The type of mixed precision, None without."""
        half = HALF.get(self.precision.partition("-")[0])
        return half if self.precision.endswith("mixed") and not self.sharding.stage else None

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type that products are computed in."""
        return self.autocast or self.dtype

    @cached_property
    def geometry(self) -> CacheGeometry:
        """The shape of the cache on a GPU, without rotary frequencies."""
        model = empty_model(self.blueprint, self.compute_dtype)
        geometry = CacheGeometry.of(model, kv_type(self.rollout.kv_dtype), self.length, of_shapes=True)
        return replace(geometry, device=CUDA)

    @property
    def sequences(self) -> int:
        """Sequences that a rollout draws on this rank, those that are not trained on included."""
        options = self.rollout
        return round(self.block.prompts * options.oversampling) * options.drawn(self.sampling).num_generations

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt + self.sampling.max_completion_length

    @property
    def micro_batch(self) -> MicroBatch:
        """The largest forward pass of the learner: a micro-batch, or a part of it where packing limits the tokens."""
        rows, most = self.block.micro_batch, self.learner.micro_batch_tokens
        if most is not None:
            rows = min(self.block.sequences, max(1, most // self.length))
        return MicroBatch(rows, self.length, self.sampling.max_completion_length)

    @property
    def parts(self) -> int:
        """Forward passes of a micro-batch: more than one where packing limits their tokens."""
        return -(-self.block.micro_batch // self.micro_batch.rows)
