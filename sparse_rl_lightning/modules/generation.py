"""What every module that rolls out shares: samplers, rewards, validation with the dense and the sparse cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.callbacks.base import RolloutCallback
from sparse_rl_lightning.compressors import Compressor, FullKV
from sparse_rl_lightning.modules.base import PolicyModule
from sparse_rl_lightning.modules.policy import PolicySource
from sparse_rl_lightning.rewards import compute_rewards, reward_name
from sparse_rl_lightning.rollout import Progress, RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.prompts import encode_prompts
from sparse_rl_lightning.types import Rollout, ScoredRollout

Rows = list[dict[str, Any]]
RewardFunctions = Callable[..., list[float | None]] | list[Callable[..., list[float | None]]]


class GenerationModule(PolicyModule):
    """A policy with a sparse and a dense sampler, and reward functions; arguments as in SparseGRPO."""

    def __init__(
        self,
        policy: str | PolicySource,
        compressor: Compressor,
        reward_funcs: RewardFunctions,
        reward_weights: list[float] | None,
        *,
        num_generations: int,
        max_completion_length: int,
        min_completion_length: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float | None,
        num_slots: int | None,
        end_tokens: list[str] | None,
        val_max_completion_length: int | None,
        seed: int,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None,
        disable_dropout: bool,
    ) -> None:
        super().__init__(policy, optimizer, lr_scheduler, disable_dropout)
        self.compressor = compressor
        self.reward_funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        self.reward_weights = [1.0] * len(self.reward_funcs) if reward_weights is None else reward_weights
        if len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} numbers for {len(self.reward_funcs)} reward_funcs: "
                "give one number per function."
            )
        self.sampling = SamplingParams(
            num_generations=num_generations, max_completion_length=max_completion_length,
            min_completion_length=min_completion_length, temperature=temperature, top_k=top_k, top_p=top_p,
            min_p=min_p, seed=seed,
        )  # fmt: skip
        self.val_sampling = SamplingParams(
            max_completion_length=val_max_completion_length or max_completion_length, temperature=0.0
        )
        self.num_slots = num_slots
        self.end_tokens = end_tokens or []
        self.num_generations = num_generations
        self.temperature = temperature
        self.seed = seed
        self._samplers: dict[bool, RolloutSampler] = {}

    @property
    def dense_policy(self) -> PreTrainedModel:
        """The policy with its own, dense attention."""
        self.configure_model()
        assert self.policy is not None
        return self.policy

    def sampler(self, dense: bool = False) -> RolloutSampler:
        """The sampler with the module's compressor, or with the full cache."""
        if dense not in self._samplers:
            compressor = FullKV() if dense else self.compressor
            sampler = RolloutSampler(self.dense_policy, compressor, self.num_slots)
            sampler.end_token_ids = sorted({*sampler.end_token_ids, *self._end_token_ids()})
            self._samplers[dense] = sampler
        return self._samplers[dense]

    def generate(
        self,
        rows: Rows,
        params: SamplingParams | None = None,
        *,
        dense: bool = False,
        index: int = 0,
        progress: Callable[[Progress], None] | None = None,
    ) -> ScoredRollout:
        """Completions for rows of a data set, decoded to text; rewards come later.

        Args:
            rows: Rows with a ``prompt`` column.
            params: How to draw, default the module's own training settings.
            dense: Use the full cache instead of the module's compressor.
            index: Number of the rollout: with the seed and the rank it fixes the random numbers.
            progress: Called after every decode step.
        """
        start, params = time.perf_counter(), params or self.sampling
        sampler, tokenizer = self.sampler(dense), self.tokenizer
        assert tokenizer is not None
        prompts = encode_prompts(tokenizer, [row["prompt"] for row in rows])
        count = len(prompts) * params.num_generations
        first = (index * self._world_size + self.global_rank) * count
        rollout = sampler.generate(prompts, params, sequence_ids=range(first, first + count), progress=progress)
        completions = tokenizer.batch_decode(completion_ids(rollout), skip_special_tokens=True)
        seconds = {"rollout": time.perf_counter() - start}
        return ScoredRollout(rollout, rows, completions, {}, index, seconds)

    def reward(self, scored: ScoredRollout) -> Tensor:
        """(B,) weighted sums of the reward functions; each function's own values go into the reward table."""
        repeated = [row for row in scored.rows for _ in range(scored.num_generations)]
        columns = {name: [row.get(name) for row in repeated] for name in repeated[0] if name != "prompt"}
        rewards, table = compute_rewards(
            self.reward_funcs,
            self.reward_weights,
            [row["prompt"] for row in repeated],
            scored.completions,
            completion_ids(scored.rollout),
            columns,
        )
        scored.reward_table = {reward_name(f): table[:, i] for i, f in enumerate(self.reward_funcs)}
        return rewards.to(scored.rollout.sequences.device)

    def validation_step(self, batch: Rows, batch_idx: int) -> None:
        """Greedy completions with the sparse and with the full cache: what was trained, and what is deployed."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Rows, batch_idx: int) -> None:
        """The same as validation, logged under ``test/``."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Rows, batch_idx: int) -> Rows:
        """The rows, each with the greedy ``completion`` under the module's compressor."""
        completions = self.generate(batch, self.val_sampling).completions
        return [row | {"completion": text} for row, text in zip(batch, completions, strict=True)]

    def _evaluate(self, batch: Rows, stage: str) -> None:
        for name in ("dense", "sparse") if self.compressor.evicts else ("dense",):
            scored = self.generate(batch, self.val_sampling, dense=name == "dense")
            rewards, rollout = self.reward(scored), scored.rollout
            self.log_dict(
                {
                    f"{stage}/reward_{name}": rewards.nanmean(),
                    f"{stage}/length_{name}": rollout.completion_lengths.float().mean(),
                },
                prog_bar=True,
                batch_size=len(batch),
                sync_dist=True,
            )

    def on_validation_epoch_end(self) -> None:
        """Give the caches back: training rollouts size their own."""
        for sampler in self._samplers.values():
            sampler.release()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def _end_token_ids(self) -> list[int]:
        assert self.tokenizer is not None
        vocabulary = self.tokenizer.get_vocab()
        unknown = [token for token in self.end_tokens if token not in vocabulary]
        if unknown:
            raise ValueError(f"end_tokens: {unknown} are not in the tokenizer's vocabulary. Remove or correct them.")
        return [vocabulary[token] for token in self.end_tokens]

    def _dispatch(self, hook: str, *args: Any) -> None:
        for callback in self._rollout_callbacks():
            getattr(callback, hook)(self.trainer, self, *args)

    def _rollout_callbacks(self) -> list[RolloutCallback]:
        """Editing callbacks first, otherwise in the trainer's order."""
        if self._trainer is None:
            return []
        callbacks = [c for c in self.trainer.callbacks if isinstance(c, RolloutCallback)]  # type: ignore[attr-defined]
        return sorted(callbacks, key=lambda callback: not callback.edits)

    def _report_progress(self, progress: Progress) -> None:
        self._dispatch("on_rollout_progress", progress)

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self._trainer is not None else 1


def completion_ids(rollout: Rollout) -> list[list[int]]:
    """Token ids of every completion, without prompt and padding."""
    pairs = zip(rollout.sequences, rollout.completion_mask, strict=True)
    return [sequence[mask].tolist() for sequence, mask in pairs]
