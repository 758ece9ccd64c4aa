"""Gradients at fixed weights, chunk by chunk of prompts, beside the full cache's: a line per case and variant."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.common.pages import machine
from benchmarks.common.tables import Table
from experiments.gradients.agreement import Estimate, cosine, estimate, lead, length, noise, projection
from experiments.gradients.variants import NAIVE, REPLAY, VARIANTS, Variant, gradients
from experiments.runner.probes import Lines
from experiments.stability.studies import METHODS
from sparse_rl_lightning.callbacks.corrections.candidates import token_and_most_likely
from sparse_rl_lightning.compressors import RKV, Compressor, FullKV, SnapKV
from sparse_rl_lightning.corrections import consistency_log_ratio, mismatch_statistics
from sparse_rl_lightning.data import ArithmeticTasks
from sparse_rl_lightning.learner.forward import LearnerOptions
from sparse_rl_lightning.modules import ReplayGRPO, SparseGRPO
from sparse_rl_lightning.policies.source import PolicySource
from sparse_rl_lightning.records import Rollout, Rows
from sparse_rl_lightning.rewards import arithmetic_reward, worked_steps_reward
from sparse_rl_lightning.rollout import SamplingParams

FULL = "full cache"
MEASURES = (cosine, length, projection, noise)
Case = tuple[str, int]  # compressor and budget


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
    rival: ClassVar[str] = ""  # variant that the others' lead in cosine is over, if wanted
    top: ClassVar[int] = 0  # most likely tokens that the sampler reports, for variants that center
    rewards: ClassVar[tuple[Any, ...]] = (arithmetic_reward, worked_steps_reward)
    longest: ClassVar[int] = 48  # tokens of a completion
    learner: ClassVar[LearnerOptions] = LearnerOptions()

    def problems(self, count: int) -> Rows:
        """So many training problems."""
        return ArithmeticTasks(self.task, num_train=count, num_val=0, seed=self.seed).train_rows()

    def compressor(self, method: str, budget: int) -> Compressor:
        """The compressor of a case, as in ``experiments.stability``."""
        if method == "R-KV":
            return RKV(budget=budget, buffer=4, num_sinks=0)
        return SnapKV(budget=budget, **METHODS["SnapKV"]["init_args"])

    def policy(self, folder: str) -> str | PolicySource:
        """What is trained, from a folder of weights."""
        return folder

    def precision(self) -> AbstractContextManager[Any]:
        """What sampling and learning happen in."""
        return nullcontext()

    def module(self, folder: str, compressor: Compressor) -> SparseGRPO:
        """What samples and learns at a policy's weights."""
        sampling = SamplingParams(num_generations=self.generations, max_completion_length=self.longest, seed=self.seed)
        options: dict[str, Any] = {"sampling": sampling, "steps_per_generation": self.parts, "learner": self.learner}
        policy, rewards = self.policy(folder), list(self.rewards)
        if isinstance(compressor, FullKV):
            return SparseGRPO(policy, compressor, rewards, **options)
        # mixed computes both kinds of log-probs
        module = ReplayGRPO(policy, compressor, rewards, replay_objective="mixed", **options)
        module.generator.top["centering"] = self.top
        return module


def lines_of(weights: str, folder: str, samples: Samples, cases: tuple[Case, ...]) -> Lines:
    """A line per case and variant, measured at one policy, in a process of its own."""
    torch.set_num_threads(1)
    full, _ = measured(folder, FullKV(), samples)
    lines = []
    for method, budget in cases:
        compressed, statistics = measured(folder, samples.compressor(method, budget), samples)
        products = gram(full | compressed)
        lines += [
            {
                "weights": weights, "method": method, "budget": budget, "variant": variant,
                **{measure.__name__: asdict(estimate(measure, products, 0, number)) for measure in MEASURES},
                **leads(products, compressed, samples.rival, number),
                **statistics, "samples": asdict(samples), "machine": machine("cpu"),
            }
            for number, variant in enumerate((FULL, *compressed))
        ]  # fmt: skip
    return lines


def leads(products: Tensor, names: Iterable[str], rival: str, number: int) -> Lines:
    """The lead in cosine over a rival variant, if there is one among those measured."""
    places = {name: place for place, name in enumerate(names, start=1)}
    if rival not in places or number == 0:
        return {}
    return {"lead": asdict(lead(cosine, products, 0, number, places[rival]))}


def measured(folder: str, compressor: Compressor, samples: Samples) -> tuple[dict[str, list[Tensor]], dict[str, float]]:
    """Gradients by variant and chunk at a policy's weights, of rollouts under a compressor, and what these were like.

    With FullKV there is one variant alone.
    """
    is_full = isinstance(compressor, FullKV)
    module = samples.module(folder, compressor)
    module.configure_model()
    rows, by_variant, numbers = samples.problems(samples.chunks * samples.prompts), dict[str, list[Tensor]](), []
    for start in range(0, len(rows), samples.prompts):
        with samples.precision():
            rollout = module.roll_out(rows[start : start + samples.prompts]).rollout
            module.num_rollouts += 1  # other random numbers
            chunk = of_chunk(module, rollout, (NAIVE,) if is_full else samples.variants, samples.parts)
        numbers.append(described(rollout))
        for name, gradient in chunk.items():
            by_variant.setdefault(FULL if is_full else name, []).append(gradient)
    return by_variant, {name: fmean(row[name] for row in numbers) for name in numbers[0]}


def of_chunk(module: SparseGRPO, rollout: Rollout, variants: tuple[Variant, ...], parts: int) -> dict[str, Tensor]:
    """Every variant's gradient of a rollout, the mean over its equal parts."""
    dense = tuple(variant for variant in variants if not variant.replays)
    sums: dict[str, Tensor] = {}
    top = module.generator.drawing.top_logprobs if any(variant.centers for variant in variants) else 0
    for batch in rollout.parts(parts):
        logprobs, _ = module.learner.dense(
            module.policy, batch, (lambda rollout: token_and_most_likely(rollout, top)) if top else None
        )
        logprobs, likely = (logprobs[..., 0], logprobs[..., 1:]) if top else (logprobs, None)
        each = dict(zip(dense, gradients(module, dense, batch, logprobs, likely), strict=True))
        if REPLAY in variants:
            each[REPLAY] = gradients(module, (REPLAY,), batch, module.replayed(batch)[0])[0]
        for variant, gradient in each.items():
            sums[variant.name] = sums.get(variant.name, 0) + gradient / parts
    return sums


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


def gram(gradients: dict[str, list[Tensor]]) -> Tensor:
    """Products (K, C, K, C), float64, of all gradients in all chunks."""
    every = list(gradients.values())  # pair by pair: a real model's are gigabytes, which one product would copy
    return torch.stack([torch.stack([torch.stack(a) @ torch.stack(b).T for b in every], dim=1) for a in every]).double()


def table(lines: Lines) -> Table:
    """Every line: agreement with the full cache's gradient, and what the rollouts were like."""
    heads = [measure.__name__ for measure in MEASURES] + ["lead"] * any("lead" in line for line in lines)
    result = Table("", ["weights", "cache", "gradient", *heads, "sequences rejected", "k3"])
    for line in lines:
        numbers = [str(Estimate(**line[name])) if name in line else "" for name in heads]
        cache, ends = f"{line['method']} {line['budget']}", (f"{line['rejected']:.1%}", f"{line['k3']:.2g}")
        result.add(line["weights"], cache, line["variant"], *numbers, *ends)
    return result
