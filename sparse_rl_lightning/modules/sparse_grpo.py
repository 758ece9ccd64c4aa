"""SparseGRPO: the training step of Sparse-RL, from prompts to a loss, in the order of the paper."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.advantages import ScaleRewards, informative_groups
from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.distributed.ranks import advantages_of_rank, mean_over_ranks
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.fingerprints import weights_digest
from sparse_rl_lightning.learner.block import RolloutBlock
from sparse_rl_lightning.learner.forward import Learner
from sparse_rl_lightning.learner.loss import Items, Objective
from sparse_rl_lightning.losses import Denominator, ImportanceSamplingLevel, KLEstimator, LossType
from sparse_rl_lightning.metrics.rollout import rollout_metrics
from sparse_rl_lightning.modules.base import default_optimizer
from sparse_rl_lightning.modules.block_module import BlockModule
from sparse_rl_lightning.modules.generation import Rows, columns_of
from sparse_rl_lightning.policies.modes import eval_mode
from sparse_rl_lightning.policies.source import PolicySource
from sparse_rl_lightning.records import LossOutput, Rollout, ScoredRollout
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rewards import check_rewards
from sparse_rl_lightning.rollout import SamplingParams
from sparse_rl_lightning.rollout.generation_kwargs import with_generation_kwargs
from sparse_rl_lightning.rollout.options import SamplerOptions, as_texts
from sparse_rl_lightning.rollout.partial import PartialCheckpoint, PartialRollouts


class SparseGRPO(BlockModule):
    """GRPO whose rollouts run under a compressed KV cache, corrected by the callbacks it is trained with.

    A loader batch is the block of prompts of one rollout, repeated ``steps_per_generation`` x ``num_iterations`` times;
    every step trains on one micro-batch of that rollout. ``SparsityAwareRejection`` and ``ImportanceReweighting`` make
    it Sparse-RL (arXiv 2601.10079); without them it is naive, with ``FullKV`` it is dense GRPO (arXiv 2402.03300).

    Args:
        policy: A Hugging Face folder or hub name, or a source of models.
        compressor: What a full slot of the rollout cache keeps.
        reward_funcs: Reward functions with TRL's signature, a single one or several.
        reward_weights: Factor of each reward function, default 1.
        reward_timeout: Seconds that a reward function may take for a rollout; it then runs in a forked process of its
            own, which is killed when its time is up. Null: any time, in the trainer's process. Samples on which it
            takes longer, or raises an error, get no reward from it and are counted as ``rewards/{function}/failed``.
        num_generations: Samples per prompt, at least 2.
        max_completion_length: Most tokens of a completion.
        min_completion_length: End tokens are forbidden before.
        temperature: Of the rollouts, and of every log-probability computed from them.
        top_k: Draw from the k most likely tokens, 0 for all.
        top_p: Draw from the smallest set of at least this probability.
        min_p: Draw from tokens at least this likely relative to the best.
        repetition_penalty: Makes tokens of the prompt and of the completion so far less likely where above 1. Log-probs
            and the ratio xi are of the distribution without it.
        generation_kwargs: The same settings by their names in transformers or vLLM, over those given here.
        chat_template_kwargs: Arguments of the tokenizer's chat template, such as ``{enable_thinking: false}``; in
            validation too.
        retriever: Which pages of the cache each query of a rollout reads, null for all; saves time, not memory.
        num_slots: Sequences decoded at the same time, null for all.
        end_tokens: Tokens that end a completion besides the model's own, such as ``<|im_end|>`` for a base model that
            is prompted in a chat format.
        stop_strings: Texts that end a completion, in validation too; it is cut after the token that completes one.
        memory_limit: Memory that slots may take, bytes or (a float up to 1.0) a share of what is free: as many of
            ``num_slots`` are used as fit.
        kv_dtype: What cached keys and values are kept in, such as ``bfloat16``, or ``float8_e4m3fn`` for
            a byte per number; null for what the policy computes in.
        keep_pool: Keep the cache's memory while the learner works; false frees it after every rollout.
        cuda_graphs: Decode from CUDA graphs on a GPU.
        top_logprobs: Log-probs of this many most likely tokens of the sparse policy, for callbacks that read them.
        partial_rollout_steps: Partial rollouts: decode steps after which the learner goes on with the groups that are
            complete, while unfinished sequences wait in their slots for the next rollout. Null is off.
        partial_checkpoint: Checkpoints ``store`` unfinished sequences, or ``restart`` them after a resume.
        steps_per_generation: Micro-batches a rollout is cut into.
        num_iterations: Passes over a rollout.
        loss_type: ``grpo``, ``dapo``, ``bnpo``, ``dr_grpo`` or ``cispo``.
        importance_sampling_level: Staleness ratio per ``token`` or per ``sequence`` (GSPO).
        epsilon: Lower clip range.
        epsilon_high: Upper clip range, null for ``epsilon``.
        delta: Upper bound of the unclipped ratio, null for none.
        denominator: What rejected tokens and sequences count for: ``all``, ``kept_tokens`` or ``kept``.
        scale_rewards: Advantages are divided by the deviation of the ``group``, the ``batch``, or by nothing.
        beta: Factor of the KL penalty to the initial policy; 0 loads no reference policy.
        kl_estimator: ``k1``, ``k2`` or ``k3``.
        kl_on: The penalty holds for all tokens of the ``completion``, or for those rejection ``kept``.
        mask_truncated_completions: Leave completions that hit the length limit out of the loss.
        oversampling: Dynamic sampling: roll out this many times the prompts that are trained on, and keep the groups
            whose rewards differ. 1 is off.
        rescore: Compute the dense policy's log-probs after a rollout. Only a run that needs neither corrections nor
            mismatch metrics, with one optimiser step per rollout, may switch it off.
        learner: Packing by tokens, and memory and precision of the learner's passes.
        val_sampling: How validation draws, with a seed of its own; null is greedy.
        val_max_completion_length: Of greedy validation, null for the same.
        seed: Of the rollouts and of the order of micro-batches.
        optimizer: Makes the optimiser from the parameters.
        lr_scheduler: Makes the learning-rate schedule from the optimiser.
        disable_dropout: Set every dropout of the policy to zero.

    Raises:
        ValueError: If an argument is out of range, or the numbers of prompts, generations and steps do not fit.
    """

    keeps_evictions = False  # after scoring, for a loss that looks at their record

    def __init__(
        self,
        policy: str | PolicySource,
        compressor: Compressor,
        # the list first: jsonargparse saves a list of functions only as the union's first member
        reward_funcs: list[Callable[..., list[float | None]]] | Callable[..., list[float | None]],
        reward_weights: list[float] | None = None,
        reward_timeout: float | None = None,
        num_generations: int = 8,
        max_completion_length: int = 256,
        min_completion_length: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        generation_kwargs: dict[str, Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        retriever: Retriever | None = None,
        num_slots: int | None = None,
        end_tokens: list[str] | None = None,
        stop_strings: list[str] | None = None,
        memory_limit: int | float | None = None,
        kv_dtype: str | None = None,
        keep_pool: bool = True,
        cuda_graphs: bool = True,
        top_logprobs: int = 0,
        partial_rollout_steps: int | None = None,
        partial_checkpoint: PartialCheckpoint = "store",
        steps_per_generation: int = 1,
        num_iterations: int = 1,
        loss_type: LossType = "grpo",
        importance_sampling_level: ImportanceSamplingLevel = "token",
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        delta: float | None = None,
        denominator: Denominator = "all",
        scale_rewards: ScaleRewards = "group",
        beta: float = 0.0,
        kl_estimator: KLEstimator = "k3",
        kl_on: Literal["completion", "kept"] = "completion",
        mask_truncated_completions: bool = False,
        oversampling: float = 1.0,
        rescore: bool = True,
        learner: Learner | None = None,
        val_sampling: SamplingParams | None = None,
        val_max_completion_length: int | None = None,
        seed: int = 0,
        optimizer: OptimizerCallable = default_optimizer,
        lr_scheduler: LRSchedulerCallable | None = None,
        disable_dropout: bool = True,
    ) -> None:
        steps = partial_rollout_steps
        sampling = with_generation_kwargs(
            SamplingParams(
                num_generations=num_generations, max_completion_length=max_completion_length,
                min_completion_length=min_completion_length, temperature=temperature, top_k=top_k, top_p=top_p,
                min_p=min_p, repetition_penalty=repetition_penalty, top_logprobs=top_logprobs,
                stop_strings=as_texts(stop_strings), seed=seed,
            ), generation_kwargs,
        )  # fmt: skip
        super().__init__(
            policy, compressor, reward_funcs, reward_weights, sampling,
            SamplerOptions(num_slots, as_texts(end_tokens), memory_limit, kv_dtype, keep_pool, cuda_graphs),
            objective=Objective(
                loss_type=loss_type, importance_sampling_level=importance_sampling_level, epsilon=epsilon,
                epsilon_high=epsilon_high, delta=delta, denominator=denominator, beta=beta, kl_estimator=kl_estimator,
                kl_on=kl_on, max_completion_length=sampling.max_completion_length,
                mask_truncated_completions=mask_truncated_completions,
            ),
            steps_per_generation=steps_per_generation, num_iterations=num_iterations, oversampling=oversampling,
            learner=learner, partial=None if steps is None else PartialRollouts(steps, partial_checkpoint),
            retriever=retriever, reward_timeout=reward_timeout, val_sampling=val_sampling,
            val_max_completion_length=val_max_completion_length, chat_template_kwargs=chat_template_kwargs,
            optimizer=optimizer, lr_scheduler=lr_scheduler, disable_dropout=disable_dropout,
        )  # fmt: skip
        if num_generations < 2:
            raise UserError(
                f"num_generations must be at least 2, because a sample is judged against the others of its prompt; "
                f"got num_generations={num_generations}."
            )
        if sampling.temperature == 0:
            raise UserError("temperature must be above 0 in training: greedy samples of a prompt are all the same.")
        self.scale_rewards = scale_rewards
        self.rescore = rescore
        self._reference: list[PreTrainedModel] = []  # in a list: no submodule, so in no checkpoint and no optimiser

    # ---------------------------------------------------------------- the algorithm

    def training_step(self, batch: Rows, batch_idx: int) -> Tensor:
        """Roll out at the start of a block, then train on its next micro-batch."""
        if self.block is None or self.block.is_spent:
            self.block = self._new_block(batch)
        return self._loss(*self.block.next())

    def roll_out(self, rows: Rows) -> ScoredRollout:
        """Everything that happens to a block of prompts before the first loss, in this order."""
        self._dispatch("on_rollout_start", rows)
        check_rewards(self.reward_funcs, columns_of(rows))
        scored = self.draw(rows)  # sparse policy
        self._dispatch("on_rollout_drawn", scored)
        self._rescore(scored)  # dense policy
        self._score(scored)  # rewards and advantages
        self._dispatch("on_rollout_scored", scored)  # rejection, reweighting, tables
        self._log_rollout(scored)
        return scored

    def _loss(self, part: Rollout, items: Items) -> Tensor:
        """The micro-batch's share of its optimiser step's loss, and the metrics of the policy update."""
        output, _ = self.micro_batch_loss(part, items)
        self.log_dict(output.metrics, batch_size=len(part))
        if items.policy is None:  # every micro-batch by itself: Lightning takes the mean of them
            return output.loss
        return output.loss * self._accumulate * self._world_size  # trainer and strategy divide by both

    def micro_batch_loss(self, part: Rollout, items: Items) -> tuple[LossOutput, Tensor]:
        """The learner's forward pass: the loss with its metrics, and the log-probs (B, T) it comes from."""
        logprobs, entropy = self._logprobs(self.dense_policy, part)
        part.old_logprobs = logprobs.detach() if part.old_logprobs is None else part.old_logprobs
        output = self._policy_loss(part, items, logprobs)
        output.metrics["entropy"] = entropy[part.completion_mask].mean().detach()
        return output, logprobs

    def _policy_loss(self, part: Rollout, items: Items, logprobs: Tensor) -> LossOutput:
        return self.objective(part, items, logprobs)

    # ---------------------------------------------------------------- stages of a rollout

    @torch.no_grad()
    def _rescore(self, scored: ScoredRollout) -> None:
        """Log-probs of the dense policy, by the forward code and in the micro-batches of the learner."""
        start, rollout = time.perf_counter(), scored.rollout
        parts = rollout.parts(self.steps_per_generation)
        if self.rescore:
            with eval_mode(self.dense_policy):  # as the sampler: no dropout
                rollout.old_logprobs = torch.cat([self._logprobs(self.dense_policy, part)[0] for part in parts])
        if self._reference:
            self._score_by_reference(rollout)
        scored.seconds["rescoring"] = time.perf_counter() - start

    def _score_by_reference(self, rollout: Rollout) -> None:
        parts = rollout.parts(self.steps_per_generation)
        rollout.ref_logprobs = torch.cat([self.reference_logprobs(part) for part in parts])

    @torch.no_grad()
    def reference_logprobs(self, part: Rollout) -> Tensor:
        """(B, T) log-probs of the reference policy, zeros without one; its weights come to the device when needed."""
        if not self._reference:
            return torch.zeros_like(part.sampler_logprobs)
        self._reference[0].to(device=self.device)  # type: ignore[call-arg]  # transformers wraps the signature away
        return self._logprobs(self._reference[0], part)[0]

    def _score(self, scored: ScoredRollout) -> None:
        start, rollout = time.perf_counter(), scored.rollout
        rollout.rewards = self.reward(scored)
        self.tell_none(scored)
        trainer = self.trainer if self._world_size > 1 else None
        rollout.advantages = advantages_of_rank(rollout.rewards, self.num_generations, self.scale_rewards, trainer)
        rollout.keep = rollout.completion_mask.clone()
        scored.seconds["rewards"] = time.perf_counter() - start

    def _new_block(self, rows: Rows) -> RolloutBlock:
        scored = self.roll_out(rows)
        rollout = scored.rollout
        rollout.topk_ids = rollout.topk_logprobs = None  # large, and the loss does not read them
        rollout.evictions = rollout.evictions if self.keeps_evictions else None
        rollout = self._most_informative(rollout, len(rows)) if self.oversampling > 1 else rollout
        plan = self.plan(len(rollout) // self.num_generations)
        block = RolloutBlock(plan, rollout, self.num_rollouts, self.seed, self.count_items)
        self.num_rollouts += 1
        return block

    def _most_informative(self, rollout: Rollout, num_prompts: int) -> Rollout:
        """Dynamic sampling: the groups with differing rewards first, filled up with others, in prompt order."""
        assert rollout.rewards is not None
        wanted = max(1, round(num_prompts / self.oversampling))
        uninformative = ~informative_groups(rollout.rewards, self.num_generations)
        groups = uninformative.to(torch.uint8).argsort(stable=True)[:wanted].sort().values
        members = torch.arange(self.num_generations, device=groups.device)
        return rollout[(groups[:, None] * self.num_generations + members).flatten()]

    def _logprobs(self, policy: PreTrainedModel, part: Rollout) -> tuple[Tensor, Tensor]:
        return self.learner.logprobs(policy, part, self.temperature or 1.0)

    def replayed(self, part: Rollout) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (B, T) as the sampler saw them, with gradient: under its evictions, or retrieving."""
        return self._sparse_logprobs(self.dense_policy, part)

    def _sparse_logprobs(self, policy: PreTrainedModel, part: Rollout) -> tuple[Tensor, Tensor]:
        replay = self.retriever is None
        return self.learner.logprobs(policy, part, self.temperature or 1.0, replay, self.retriever)

    def _replay_old(self, scored: ScoredRollout) -> None:
        """Log-probs of the sparse policy, by the learner's own kernels."""
        start, rollout = time.perf_counter(), scored.rollout
        with torch.no_grad(), eval_mode(self.dense_policy):
            parts = [self.replayed(part)[0] for part in rollout.parts(self.steps_per_generation)]
        rollout.replay_logprobs = torch.cat(parts)
        scored.seconds["replay"] = time.perf_counter() - start

    def _log_rollout(self, scored: ScoredRollout) -> None:
        own = {} if self.partial is None else self.partial.metrics(scored.rollout)
        metrics = rollout_metrics(scored) | own
        metrics = metrics if self._world_size == 1 else mean_over_ranks(metrics)
        self.log_dict(metrics, batch_size=len(scored.completions))

    # ---------------------------------------------------------------- Lightning

    def on_policy_loaded(self) -> None:
        """Load the reference policy where the objective needs one."""
        if self.objective.beta > 0:
            self._reference = [self.policy_source.load_reference()]
            if self._world_size > 1:  # no strategy shares it
                self.same_on_ranks["reference policy"] = weights_digest(self._reference[0])

    def on_fit_start(self) -> None:
        """Check that the numbers fit together, and that nothing needs log-probs that are not computed."""
        super().on_fit_start()
        self._check_rescore()

    def on_train_batch_start(self, batch: Rows, batch_idx: int) -> None:
        """Take up the block of a resumed run, and score it where that run had no reference policy and this one has."""
        super().on_train_batch_start(batch, batch_idx)
        if self._reference and self.block is not None and self.block.rollout.ref_logprobs is None:
            self._score_by_reference(self.block.rollout)

    def _check_rescore(self) -> None:
        if self.rescore:
            return
        needing = [type(c).__name__ for c in self._rollout_callbacks() if c.edits]
        steps = self.steps_per_rollout // self.trainer.accumulate_grad_batches
        if needing or steps > 1:
            raise UserError(
                f"rescore=False leaves no dense log-probs, but {', '.join(needing) or f'{steps} optimiser steps'} "
                f"{'need' if needing else 'per rollout need'} them. Set model.rescore to true."
            )
