"""Gradients at fixed weights, chunk by chunk of prompts, as products of all with all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.gradients.variants import NAIVE, REPLAY, VARIANTS, Variant, gradients
from sparse_rl_lightning.compressors import Compressor, FullKV
from sparse_rl_lightning.corrections import consistency_log_ratio, mismatch_statistics
from sparse_rl_lightning.data import ArithmeticTasks
from sparse_rl_lightning.modules import ReplayGRPO, SparseGRPO
from sparse_rl_lightning.records import Rollout, Rows
from sparse_rl_lightning.rewards import arithmetic_reward, worked_steps_reward
from sparse_rl_lightning.rollout import SamplingParams

FULL = "full cache"
Reward = Callable[..., list[float | None]]
QUICKSTARTS: tuple[Reward, ...] = (arithmetic_reward, worked_steps_reward)


@dataclass(frozen=True)
class Samples:
    """How many: chunks of prompts, each its own prompts, and their samples."""

    chunks: int = 16
    prompts: int = 32  # per chunk
    generations: int = 8
    parts: int = 4  # forward passes per chunk
    task: str = "sum"
    seed: int = 77

    def rows(self) -> list[Rows]:
        """Training problems, chunk by chunk."""
        count = self.chunks * self.prompts
        rows = ArithmeticTasks(self.task, num_train=count, num_val=0, seed=self.seed).train_rows()
        return [rows[start : start + self.prompts] for start in range(0, count, self.prompts)]


@dataclass
class Gradients:
    """Gradients (chunks, weights) by variant, and what the rollouts were like."""

    by_variant: dict[str, list[Tensor]]
    statistics: dict[str, float]


def measured(
    policy: str, compressor: Compressor, samples: Samples, reward_funcs: Sequence[Reward] = QUICKSTARTS
) -> Gradients:
    """The gradients of every variant at a policy's weights, of rollouts under a compressor; only one with FullKV."""
    sparse = not isinstance(compressor, FullKV)
    options: dict[str, Any] = {"replay_objective": "mixed"} if sparse else {}  # it computes both kinds of log-probs
    module = (ReplayGRPO if sparse else SparseGRPO)(
        policy, compressor, list(reward_funcs),
        sampling=SamplingParams(num_generations=samples.generations, max_completion_length=48, seed=samples.seed),
        steps_per_generation=samples.parts, **options,
    )  # fmt: skip
    module.configure_model()
    found = Gradients({}, {})
    totals: dict[str, list[float]] = {}
    for rows in samples.rows():
        rollout = module.roll_out(rows).rollout
        module.num_rollouts += 1  # other random numbers
        for name, value in described(rollout).items():
            totals.setdefault(name, []).append(value)
        for name, gradient in of_chunk(module, rollout, VARIANTS if sparse else (NAIVE,), samples.parts):
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
    stacked = torch.cat([torch.stack(chunks) for chunks in found.values()])
    count = len(next(iter(found.values())))
    products = (stacked @ stacked.T).double()
    return products.reshape(len(found), count, len(found), count)
