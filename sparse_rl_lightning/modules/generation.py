"""What every module that rolls out shares: samplers, rewards, validation with the dense and the sparse cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.callbacks.base import RolloutCallback
from sparse_rl_lightning.compressors import Compressor, FullKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.evaluation.evaluate import evaluate
from sparse_rl_lightning.evaluation.validation import ValidationLog
from sparse_rl_lightning.modules.base import PolicyModule
from sparse_rl_lightning.policies.sharding import ShadowPolicy
from sparse_rl_lightning.policies.source import PolicySource
from sparse_rl_lightning.ranges import check_number
from sparse_rl_lightning.records import Rollout, ScoredRollout
from sparse_rl_lightning.records import Rows as Rows
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rewards import reward_counters, reward_names
from sparse_rl_lightning.rewards.base import reward_batch, reward_table, weighted_rewards
from sparse_rl_lightning.rewards.guarded import GuardedReward
from sparse_rl_lightning.rollout import Progress, RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.engine.memory import MemoryPlan
from sparse_rl_lightning.rollout.options import SamplerOptions
from sparse_rl_lightning.rollout.prompts import encode_prompts

RewardFunctions = Callable[..., list[float | None]] | list[Callable[..., list[float | None]]]


class GenerationModule(PolicyModule):
    """A policy with a sparse and a dense sampler, and reward functions.

    Args:
        policy: As in SparseGRPO.
        compressor: As in SparseGRPO.
        reward_funcs: As in SparseGRPO.
        reward_weights: As in SparseGRPO.
        sampling: How training rollouts are drawn.
        sampler_options: How both samplers are built.
        retriever: As in SparseGRPO.
        val_sampling: As in SparseGRPO.
        val_max_completion_length: As in SparseGRPO.
        reward_timeout: As in SparseGRPO.
        chat_template_kwargs: As in SparseGRPO.
        optimizer: As in SparseGRPO.
        lr_scheduler: As in SparseGRPO.
        disable_dropout: As in SparseGRPO.
    """

    def __init__(
        self,
        policy: str | PolicySource,
        compressor: Compressor,
        reward_funcs: RewardFunctions,
        reward_weights: list[float] | None,
        sampling: SamplingParams,
        sampler_options: SamplerOptions,
        *,
        retriever: Retriever | None = None,
        val_sampling: SamplingParams | None = None,
        val_max_completion_length: int | None = None,
        reward_timeout: float | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None,
        disable_dropout: bool,
    ) -> None:
        super().__init__(policy, optimizer, lr_scheduler, disable_dropout)
        self.compressor = compressor
        self.retriever = retriever
        self.reward_funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        if not self.reward_funcs:
            raise UserError("reward_funcs is empty: at least one reward function is needed.")
        self.reward_weights = [1.0] * len(self.reward_funcs) if reward_weights is None else reward_weights
        if len(self.reward_weights) != len(self.reward_funcs):
            raise UserError(
                f"reward_weights has {len(self.reward_weights)} numbers for {len(self.reward_funcs)} reward_funcs: "
                "give one number per function."
            )
        for place, weight in enumerate(self.reward_weights):
            check_number(f"reward_weights[{place}]", weight)
        if reward_timeout is not None:
            check_number("reward_timeout", reward_timeout, above=0)
        self.reward_timeout = reward_timeout
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.sampling = sampling
        self.val_sampling = val_sampling or SamplingParams(
            max_completion_length=val_max_completion_length or sampling.max_completion_length,
            temperature=0.0,
            stop_strings=sampling.stop_strings,
        )
        self.sampler_options = sampler_options
        self.num_generations = sampling.num_generations
        self.temperature = sampling.temperature
        self.seed = sampling.seed
        self._samplers: dict[bool, RolloutSampler] = {}
        self._plans_told: set[bool] = set()
        self._guards: list[GuardedReward] = []
        self._told: set[tuple[str, str]] = set()  # what was said of which reward function
        self._validation = ValidationLog(self.log)
        self._shadow: ShadowPolicy | None = None

    @property
    def rolls_out_sparse(self) -> bool:
        """Whether rollouts see less than a full cache."""
        return self.compressor.evicts or self.retriever is not None

    @property
    def dense_policy(self) -> PreTrainedModel:
        """The policy with its own, dense attention."""
        self.configure_model()
        assert self.policy is not None
        return self.policy

    @property
    def shadow(self) -> ShadowPolicy | None:
        """The whole copy of a sharded policy that rollouts read, None where they read the policy itself."""
        return self._shadow

    @shadow.setter
    def shadow(self, shadow: ShadowPolicy | None) -> None:
        self._shadow, self._samplers = shadow, {}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As the base; the shadow then holds other weights than these, be they of the same step."""
        super().on_load_checkpoint(checkpoint)
        if self.shadow is not None:
            self.shadow.version = None

    def sampler(self, dense: bool = False) -> RolloutSampler:
        """The sampler with the module's compressor and retriever, or with the full cache."""
        if dense not in self._samplers:
            compressor, retriever = (FullKV(), None) if dense else (self.compressor, self.retriever)
            policy = self.dense_policy if self.shadow is None else self.shadow.model
            assert self.tokenizer is not None
            self._samplers[dense] = self.sampler_options.sampler(policy, self.tokenizer, compressor, retriever)
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
        if self.shadow is not None:
            self.shadow.fill(self.trainer.global_step)
        prompts = self.encode(rows)

        def report(now: Progress) -> None:
            self._tell_memory_plan(self.sampler(dense).memory_plan, dense)
            if progress is not None:
                progress(now)

        rollout = self.sampler(dense).generate(
            prompts, params, sequence_ids=self.sequence_ids(index, len(prompts), params.num_generations),
            progress=report,
        )  # fmt: skip
        return self._decoded(rollout, rows, index, start)

    def encode(self, rows: Rows) -> list[list[int]]:
        """The token ids of the rows' prompts."""
        self.configure_model()
        assert self.tokenizer is not None
        return encode_prompts(self.tokenizer, [row["prompt"] for row in rows], self.chat_template_kwargs)

    def sequence_ids(self, index: int, prompts: int, generations: int) -> list[int]:
        """The numbers of this rank's sequences of rollout ``index``, different in every rollout and rank."""
        first = index * prompts * self._world_size
        return [(first + p) * generations + sample for p in self.places(prompts) for sample in range(generations)]

    def places(self, prompts: int) -> list[int]:
        """Where this rank's prompts stand among those of all ranks."""
        return list(range(self.global_rank * prompts, (self.global_rank + 1) * prompts))

    def _decoded(self, rollout: Rollout, rows: Rows, index: int, start: float) -> ScoredRollout:
        """The rollout with its text and the time since ``start``."""
        return ScoredRollout(rollout, rows, self.texts(rollout), {}, index, {"rollout": time.perf_counter() - start})

    def texts(self, rollout: Rollout) -> list[str]:
        """The completions of a rollout as text."""
        assert self.tokenizer is not None
        return self.tokenizer.batch_decode(rollout.completion_ids, skip_special_tokens=True)

    def _tell_memory_plan(self, plan: MemoryPlan | None, dense: bool) -> None:
        """Say once per cache how many slots the memory limit allows, while the first rollout is going on."""
        if plan is not None and dense not in self._plans_told:
            self._plans_told.add(dense)
            rank_zero_info(f"Memory plan of the {'full' if dense else 'compressed'} cache: {plan.why}")

    def reward(self, scored: ScoredRollout) -> Tensor:
        """(B,) weighted sums of the reward functions; each function's own values go into the reward table."""
        repeated = [row for row in scored.rows for _ in range(scored.num_generations)]
        columns = {name: [row.get(name) for row in repeated] for name in columns_of(scored.rows)}
        batch = reward_batch(
            [row["prompt"] for row in repeated], scored.completions, scored.rollout.completion_ids, columns
        )
        guards = self._guarded()
        table = reward_table([guard.judge(batch) for guard in guards])
        scored.reward_table = {guard.__name__: table[:, i] for i, guard in enumerate(guards)}
        scored.reward_counters = reward_counters(guards)
        scored.reward_failures = {guard.__name__: guard.failed for guard in guards}
        for guard in guards:
            self._tell_failures(guard)
        return weighted_rewards(table, self.reward_weights).to(scored.rollout.sequences.device)

    def _guarded(self) -> list[GuardedReward]:
        """The reward functions behind guards, which stay as long as the functions do."""
        if [id(guard.function) for guard in self._guards] != [id(function) for function in self.reward_funcs]:
            self._end_rewards()
            named = zip(self.reward_funcs, reward_names(self.reward_funcs), strict=True)
            self._guards = [GuardedReward(function, self.reward_timeout, name) for function, name in named]
        return self._guards

    def _end_rewards(self) -> None:
        for guard in self._guards:
            guard.close()

    def _tell_failures(self, guard: GuardedReward) -> None:
        """Say once per reward function that it fails on samples."""
        if guard.first and ("failed", guard.__name__) not in self._told:
            self._told.add(("failed", guard.__name__))
            rank_zero_warn(
                f"The reward function {guard.__name__} failed on {guard.failed} sample(s), first: {guard.first}. They "
                f"get no reward from it; rewards/{guard.__name__}/failed counts such samples from now on."
            )

    def tell_none(self, scored: ScoredRollout) -> None:
        """Say once per reward function that it returned None for all samples of a rollout."""
        for name, rewards in scored.reward_table.items():
            nothing = bool(rewards.isnan().all()) and not scored.reward_failures.get(name)
            if nothing and ("none", name) not in self._told:
                self._told.add(("none", name))
                rank_zero_warn(
                    f"The reward function {name} returned None for all {len(rewards)} samples of rollout "
                    f"{scored.index}: it says that it applies to none of them, and nothing is learned from it. If that "
                    "is wrong, look at the columns that it reads."
                )

    def validation_step(self, batch: Rows, batch_idx: int) -> None:
        """Completions with the sparse and with the full cache: what was trained, and what is deployed."""
        self._evaluate(batch, "val", batch_idx)

    def test_step(self, batch: Rows, batch_idx: int) -> None:
        """The same as validation, logged under ``test/``."""
        self._evaluate(batch, "test", batch_idx)

    def predict_step(self, batch: Rows, batch_idx: int) -> Rows:
        """The rows, each with the first ``completion`` under the module's compressor, drawn as in validation."""
        completions = self.generate(batch, self.val_sampling, index=batch_idx).completions
        first = completions[:: self.val_sampling.num_generations]
        return [row | {"completion": text} for row, text in zip(batch, first, strict=True)]

    def _evaluate(self, batch: Rows, stage: str, index: int) -> None:
        for name in ("dense", "sparse") if self.rolls_out_sparse else ("dense",):
            draw = partial(self.generate, params=self.val_sampling, dense=name == "dense", index=index)
            scores = evaluate(draw, batch, self.reward)
            self._validation.batch(scores, f"{stage}/{{}}_{name}", by_benchmark=self._world_size == 1)

    def on_validation_epoch_start(self) -> None:
        """Count this validation's rows only, also where the last one was interrupted."""
        self._validation.begin()

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        """Log how sure the means are; give the caches back: training rollouts size their own."""
        self._validation.end()
        for sampler in self._samplers.values():
            sampler.release()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def on_fit_start(self) -> None:
        """Build the sampler, so that what it refuses is refused before the first rollout."""
        super().on_fit_start()
        if not self.sampler().end_token_ids and not self.sampling.stop_strings:
            rank_zero_warn(
                "Neither the policy nor its tokenizer names a token that ends a completion: every one will have "
                "max_completion_length tokens. Set model.end_tokens or model.stop_strings."
            )

    def teardown(self, stage: str) -> None:
        """End the processes of the reward functions."""
        super().teardown(stage)
        self._end_rewards()

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


def columns_of(rows: Rows) -> list[str]:
    """What any of the rows has besides its prompt; a row that lacks it has None."""
    return list(dict.fromkeys(name for row in rows for name in row if name != "prompt"))
