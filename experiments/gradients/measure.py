"""Gradients at fixed weights, chunk by chunk of prompts, as products of all with all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from experiments.gradients.variants import NAIVE, REPLAY, VARIANTS, Variant, gradients
from experiments.stability.studies import METHODS
from sparse_rl_lightning.compressors import RKV, Compressor, FullKV, SnapKV
from sparse_rl_lightning.corrections import consistency_log_ratio, mismatch_statistics
from sparse_rl_lightning.data import ArithmeticTasks
from sparse_rl_lightning.modules import ReplayGRPO, SparseGRPO
from sparse_rl_lightning.policies.source import PolicySource
from sparse_rl_lightning.records import Rollout, Rows
from sparse_rl_lightning.rewards import arithmetic_reward, worked_steps_reward
from sparse_rl_lightning.rollout import SamplingParams

FULL = "full cache"


@dataclass(frozen=True)
class Samples:
    """Chunks of prompts, each its own prompts, and their samples; a subclass says of which task and policy."""

    chunks: int = 16
    prompts: int = 32  # per chunk
    generations: int = 8
    parts: int = 4  # forward passes per chunk
    task: str = "sum"
    seed: int = 77

    variants: ClassVar[tuple[Variant, ...]] = VARIANTS

    def rows(self) -> list[Rows]:
        """Training problems, chunk by chunk."""
        rows = self.problems(self.chunks * self.prompts)
        return [rows[start : start + self.prompts] for start in range(0, len(rows), self.prompts)]

    def problems(self, count: int) -> Rows:
        """So many training problems."""
        return ArithmeticTasks(self.task, num_train=count, num_val=0, seed=self.seed).train_rows()

    def compressor(self, method: str, budget: int) -> Compressor:
        """The compressor of a case, as in ``experiments.stability``."""
        if method == "R-KV":
            return RKV(budget=budget, buffer=4, num_sinks=0)
        return SnapKV(budget=budget, **METHODS["SnapKV"]["init_args"])

    def module(self, policy: str, compressor: Compressor) -> SparseGRPO:
        """What samples and learns at a policy's weights."""
        return self._module(policy, compressor, [arithmetic_reward, worked_steps_reward], 48)

    def precision(self) -> AbstractContextManager[Any]:
        """What sampling and learning happen in."""
        return nullcontext()

    def _module(
        self, policy: str | PolicySource, compressor: Compressor, reward_funcs: list[Any], length: int, **options: Any
    ) -> SparseGRPO:
        sampling = SamplingParams(num_generations=self.generations, max_completion_length=length, seed=self.seed)
        options |= {"sampling": sampling, "steps_per_generation": self.parts}
        if isinstance(compressor, FullKV):
            return SparseGRPO(policy, compressor, reward_funcs, **options)
        # mixed computes both kinds of log-probs
        return ReplayGRPO(policy, compressor, reward_funcs, replay_objective="mixed", **options)


@dataclass
class Gradients:
    """Gradients (chunks, weights) by variant, and what the rollouts were like."""

    by_variant: dict[str, list[Tensor]]
    statistics: dict[str, float]


def measured(policy: str, compressor: Compressor, samples: Samples) -> Gradients:
    """The gradients of every variant at a policy's weights, of rollouts under a compressor; only one with FullKV."""
    sparse = not isinstance(compressor, FullKV)
    module = samples.module(policy, compressor)
    module.configure_model()
    found = Gradients({}, {})
    totals: dict[str, list[float]] = {}
    for rows in samples.rows():
        with samples.precision():
            rollout = module.roll_out(rows).rollout
            module.num_rollouts += 1  # other random numbers
            own = dict(of_chunk(module, rollout, samples.variants if sparse else (NAIVE,), samples.parts))
        for name, value in described(rollout).items():
            totals.setdefault(name, []).append(value)
        for name, gradient in own.items():
            found.by_variant.setdefault(name if sparse else FULL, []).append(gradient)
    found.statistics = {name: sum(values) / len(values) for name, values in totals.items()}
    return found


def of_chunk(
    module: SparseGRPO, rollout: Rollout, variants: tuple[Variant, ...], parts: int
) -> Iterator[tuple[str, Tensor]]:
    """Every variant's gradient of a rollout, the mean over its equal parts."""
    dense = tuple(variant for variant in variants if not variant.replays)
    sums: dict[str, Tensor] = {}
    for part in rollout.parts(parts):
        logprobs, _ = module.learner.dense(module.policy, part)
        found = dict(zip(dense, gradients(module, dense, part, logprobs), strict=True))
        if REPLAY in variants:
            found[REPLAY] = gradients(module, (REPLAY,), part, module.replayed(part)[0])[0]
        for variant, gradient in found.items():
            sums[variant.name] = sums.get(variant.name, 0) + gradient / parts
    yield from sums.items()


def described(rollout: Rollout) -> dict[str, float]:
    """Mismatch and rewards of a rollout; rejected are sequences with a token of xi below 1e-4."""
    assert rollout.old_logprobs is not None
    assert rollout.rewards is not None
    log_ratio = consistency_log_ratio(rollout.old_logprobs, rollout.sampler_logprobs, rollout.completion_mask)
    numbers = mismatch_statistics(log_ratio, rollout.completion_mask)
    return {
        "rejected": float(numbers["mismatch/low_ratio_sequences"]), "k3": float(numbers["mismatch/kl_k3"]),
        "ess": float(numbers["mismatch/ess"]), "reward": float(rollout.rewards.mean()),
    }  # fmt: skip


def gram(found: dict[str, list[Tensor]]) -> Tensor:
    """Products (K, C, K, C), float64, of all gradients in all chunks."""
    every = list(found.values())  # pair by pair: those of a real model are gigabytes, which one product would copy
    return torch.stack([torch.stack([torch.stack(a) @ torch.stack(b).T for b in every], dim=1) for a in every]).double()
