"""SparseGRPO: the training step of Sparse-RL, from prompts to a loss. Rollouts: ``rollout/engine/scheduler.py``."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.advantages import AdvantageEstimator, ScaleRewards, group_advantages, most_informative
from sparse_rl_lightning.callbacks import (
    DryRun,
    EmptyRollouts,
    Preemption,
    RankWatch,
    StepGuard,
    StepTimes,
    ZeroSharding,
)
from sparse_rl_lightning.callbacks.base import rollout_callbacks
from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.data.base import check_own_loader
from sparse_rl_lightning.data.sampler import places_of_rank, rows_of
from sparse_rl_lightning.distributed import ranks
from sparse_rl_lightning.downsampling import down_sample
from sparse_rl_lightning.environments import Environment
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.evaluation.evaluate import ValidationLog, evaluate
from sparse_rl_lightning.fingerprints import weights_digest
from sparse_rl_lightning.learner.block import BlockPlan, RolloutBlock, plan_of
from sparse_rl_lightning.learner.forward import Learner, LearnerOptions
from sparse_rl_lightning.learner.loss import Denominators, GRPOLoss, Loss
from sparse_rl_lightning.modules.base import PolicyModule
from sparse_rl_lightning.modules.old_logprobs import OldLogprobs
from sparse_rl_lightning.modules.optimizers import default_optimizer
from sparse_rl_lightning.modules.resume.run_state import RolloutState
from sparse_rl_lightning.policies.modes import narrow_weights
from sparse_rl_lightning.policies.source import PolicySource
from sparse_rl_lightning.records import LossOutput, Rollout, Rows, ScoredRollout
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rewards.scoring import Rewards
from sparse_rl_lightning.rollout import Generator, Progress, RolloutOptions, SamplingParams
from sparse_rl_lightning.rollout.generator import VALIDATION


class SparseGRPO(PolicyModule):
    """GRPO whose rollouts run under a compressed KV cache, corrected by the callbacks it is trained with.

    A loader batch is the block of prompts of one rollout, repeated ``steps_per_generation`` x ``num_iterations`` times;
    every step trains on one micro-batch of that rollout. ``SparsityAwareRejection`` and ``ImportanceReweighting`` make
    it Sparse-RL (arXiv 2601.10079); without them it is naive, with ``FullKV`` it is dense GRPO (arXiv 2402.03300).

    Args:
        policy: Hugging Face folder or hub name, or a source of models.
        compressor: Compressor of the rollout's cache.
        reward_funcs: Reward functions with TRL's signature, a single one or several; may be null with an environment.
        reward_weights: Factor of each reward function, default 1.
        sampling: Sampling parameters of training, at least 2 completions per prompt.
        rollout: Memory and speed of rollouts, and the end and rewards of completions.
        loss: Objective of the policy: options of ``GRPOLoss``, or a ``Loss`` of your own.
        learner: Packing by tokens, and memory and precision of the learner's passes.
        retriever: Retriever of the pages that each query of a rollout reads, null for all; saves time, not memory.
        environment: Creates what answers and rewards a sample's turns: a class, or TRL's ``environment_factory``.
        steps_per_generation: Number of micro-batches in a rollout.
        num_iterations: Number of passes over a rollout.
        scale_rewards: Deviation that divides advantages, of the ``group`` or the ``batch``; ``none`` for no division.
        advantage_estimator: Advantages from rewards by a class of your own, in place of ``scale_rewards``.
        val_sampling: Sampling parameters of validation, which draws numbers of its own; null is greedy with what
            shapes completions in ``sampling``, such as their length and stop strings.
        optimizer: Function from the parameters to the optimizer.
        lr_scheduler: Function from the optimizer to the learning-rate schedule, or Lightning's ``ReduceLROnPlateau``.

    Raises:
        ValueError: If an argument is out of range, or the numbers of prompts, generations and steps do not fit.
    """

    default_callbacks = (
        DryRun, ZeroSharding, StepTimes, EmptyRollouts, StepGuard, RankWatch, Preemption,
        *PolicyModule.default_callbacks,
    )  # fmt: skip
    resumed_parts: tuple[str, ...] = ("sparse_rl",)

    keeps_evictions = corrects = learns_from_rejected = False
    """Whether the loss reads evictions; accounts for them; trains what is rejected as a whole by them."""

    def __init__(
        self,
        policy: str | PolicySource,
        compressor: Compressor,
        # the list first: jsonargparse saves a list of functions only as the union's first member
        reward_funcs: list[Callable[..., list[float | None]]] | Callable[..., list[float | None]] | None = None,
        reward_weights: list[float] | None = None,
        *,
        sampling: SamplingParams = SamplingParams(num_generations=8),  # noqa: B008  # frozen, like the next three
        rollout: RolloutOptions = RolloutOptions(),  # noqa: B008
        loss: Loss = GRPOLoss(),  # noqa: B008
        learner: LearnerOptions = LearnerOptions(),  # noqa: B008
        retriever: Retriever | None = None,
        environment: Callable[[], Environment] | type | None = None,
        steps_per_generation: int = 1,
        num_iterations: int = 1,
        scale_rewards: ScaleRewards = "group",
        advantage_estimator: AdvantageEstimator | None = None,
        val_sampling: SamplingParams | None = None,
        optimizer: OptimizerCallable = default_optimizer,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(policy, optimizer, lr_scheduler, learner.disable_dropout)
        sampling = rollout.for_training(sampling)
        check_number("steps_per_generation", steps_per_generation, least=1, whole=True)
        check_number("num_iterations", num_iterations, least=1, whole=True)
        self.generator = Generator(
            compressor, rollout.drawn(sampling), rollout, retriever, steps_per_generation, rank_zero_info, environment
        )
        self.group_size = sampling.num_generations  # of training; the generator may draw more
        # not a lambda: must be picklable, and a copy must read its own step
        self.generator.version = partial(getattr, self, "global_step")
        self.rewards = Rewards(reward_funcs, reward_weights, rollout.reward_timeout, rank_zero_warn, bool(environment))
        self.rewards.failure_limit = rollout.reward_failure_limit
        self.learner = Learner(learner, sampling.temperature, retriever)
        self.loss = loss
        self.block: RolloutBlock | None = None
        self.old_logprobs = OldLogprobs(self)
        self.num_rollouts = 0
        self.num_sequences = 0  # drawn on all ranks
        self.steps_per_generation, self.num_iterations = steps_per_generation, num_iterations
        if advantage_estimator is not None and scale_rewards != "group":
            raise UserError(
                f"scale_rewards={scale_rewards!r} has no effect beside advantage_estimator, which is "
                f"{type(advantage_estimator).__name__}: leave one of them out."
            )
        self.scale_rewards: ScaleRewards = scale_rewards
        self.advantage_estimator = advantage_estimator
        self.val_sampling = val_sampling or sampling.greedy
        self._validation = ValidationLog(self.log)
        self.run_state: RolloutState = RolloutState(self)
        self._reference: list[PreTrainedModel] = []  # in a list, so that it is in no checkpoint and no optimizer

    # ---------------------------------------------------------------- the algorithm

    def training_step(self, batch: Rows, batch_idx: int) -> Tensor:
        """Roll out at the start of a block, then train on its next micro-batch."""
        if self.block is None or self.block.is_spent:
            with self._products:
                self.block = self.new_block(self.roll_out(batch))
        served, denominators = self.block.next()
        micro_batch = self.old_logprobs.lacking(served)
        with self._products:
            output = self.micro_batch_loss(micro_batch, denominators)
        self.old_logprobs.store(self.block, micro_batch)
        self.log_dict(output.metrics, batch_size=len(micro_batch))
        if denominators.policy is None and denominators.sequences is None:  # bnpo: Lightning averages micro-batches
            return output.loss
        return output.loss * self._accumulate * self._world_size  # trainer and strategy divide by both

    def roll_out(self, rows: Rows) -> ScoredRollout:
        """Process a block of prompts up to the first loss: sampling, rewards, rescoring, callbacks."""
        callbacks = rollout_callbacks(self)
        for callback in callbacks:
            callback.on_rollout_start(self.trainer, self, rows)
        self.rewards.check(rows)
        # where this rank's prompts stand in the block of all ranks decides their random numbers
        places = places_of_rank(self.trainer, len(rows)) if self._world_size > 1 else None
        scored = self.generator.roll_out(  # sparse policy
            rows, index=self.num_rollouts, first=self.num_sequences, places=places, progress=self._report_progress
        )
        for callback in callbacks:
            callback.on_rollout_drawn(self.trainer, self, scored)
        self.score(scored)  # rewards and advantages
        self.rescore(scored)  # dense policy, corrections
        self.old_logprobs.report(scored)
        self.num_sequences += len(rows) * self.generator.sampling.num_generations * self._world_size
        return scored

    def micro_batch_loss(self, part: Rollout, denominators: Denominators) -> LossOutput:
        """The learner's forward pass, and the micro-batch's share of its optimizer step's loss."""
        logprobs, entropy, *more = self.learner.logprobs(self.policy, part)
        self.old_logprobs.complete(part, logprobs)
        output = self.loss(part, logprobs, denominators, *more)
        output.metrics["entropy"] = entropy[part.completion_mask].mean().detach()
        return output

    def admit(self, rows: Rows, where: Callable[[int], str], is_training: bool) -> Rows:
        """The rows of a data set, checked before the first rollout; ``where`` names a row's place in its file."""
        rows = self.rewards.admit(rows, where)
        return self.generator.admit(rows, where, None if is_training else self.val_sampling)

    # ---------------------------------------------------------------- stages of a rollout

    def rescore(self, scored: ScoredRollout) -> None:
        """Compute log-probs of the reference policy, if there is one, and of the trained one before the update."""
        if self._reference:
            self._score_by_reference(scored.rollout)
        self.old_logprobs.rescore(scored)

    def score(self, scored: ScoredRollout) -> None:
        """Compute rewards, drop down-sampled completions, compute advantages."""
        start = time.perf_counter()
        scored.rollout.rewards = self.rewards(scored)
        self.rewards.settle()
        self.rewards.warn_of_none(scored)
        rule, rewards = self.generator.options.downsampling, scored.rollout.rewards
        if rule is not None:
            rewards = down_sample(scored, rule, self.group_size)
        rollout = scored.rollout
        rollout.advantages = self.advantages(rewards)
        rollout.keep = rollout.completion_mask.clone()
        scored.seconds["rewards"] = time.perf_counter() - start

    def advantages(self, rewards: Tensor) -> Tensor:
        """Advantages (B,) of this rank's rewards (B,); NaN rewards count in no baseline and get 0."""
        estimator, scale = self.advantage_estimator, self.scale_rewards
        over_batch = scale == "batch" if estimator is None else estimator.over_batch
        estimate = estimator or partial(group_advantages, scale_rewards=scale)
        if self._world_size == 1 or not over_batch:
            return estimate(rewards, self.group_size)
        return ranks.advantages_of_rank(rewards, self.group_size, estimate, self.trainer)

    def new_block(self, scored: ScoredRollout) -> RolloutBlock:
        """The rollout as micro-batches."""
        rollout, oversampling = scored.rollout, self.generator.options.oversampling
        if oversampling > 1:  # dynamic sampling
            assert rollout.rewards is not None
            wanted = max(1, round(len(scored.rows) / oversampling))
            rollout = rollout[most_informative(rollout.rewards, self.group_size, wanted)]
        plan = self.plan(len(rollout) // self.group_size)
        block = RolloutBlock(plan, rollout, self.num_rollouts, self.generator.sampling.seed or 0, self.denominators)
        self.num_rollouts += 1
        return block

    def plan(self, num_prompts: int) -> BlockPlan:
        """How a rollout of ``num_prompts`` prompts becomes optimizer steps.

        Raises:
            ValueError: If the numbers do not divide evenly.
        """
        sizes = (num_prompts, self.group_size, self.steps_per_generation, self.num_passes, self._accumulate)
        return plan_of(*sizes, self.learner.options.packs, self.learner.options.share_prompts)

    def denominators(self, window: Rollout) -> Denominators:
        """The divisors of one optimizer step over all ranks; ``window`` holds this rank's sequences of it."""
        local = self.loss.denominators(window, self.generator.sampling.max_completion_length)
        if self._world_size == 1:
            return local
        return local.summed(lambda sums: self.trainer.strategy.reduce(sums, reduce_op="sum"))

    @torch.no_grad()
    def reference_logprobs(self, rollout: Rollout) -> Tensor:
        """Log-probs (B, T) of the reference policy, zeros without one; its weights move to the device when needed."""
        if not self._reference:
            return torch.zeros_like(rollout.sampler_logprobs)
        self._reference[0].to(device=self.device)  # type: ignore[call-arg]  # transformers' wrapper hides the signature
        return self.learner.logprobs(self._reference[0], rollout)[0]

    def replayed(self, rollout: Rollout) -> tuple[Tensor, ...]:
        """Log-probs and entropies (B, T) of the sparse policy as the sampler saw the sequences."""
        return self.learner.replayed(self.policy, rollout)

    @property
    def compares_with_start(self) -> bool:
        """Whether the reference policy is a model apart; with LoRA it is in the checkpoint, under the adapters."""
        return bool(self._reference) and isinstance(self._reference[0], PreTrainedModel)

    @property
    def num_passes(self) -> int:
        """The number of times that a rollout is served as a whole."""
        return self.num_iterations

    @property
    def steps_per_rollout(self) -> int:
        """The number of batches that the loader must yield per block of prompts."""
        return self.steps_per_generation * self.num_passes

    @property
    def starts_rollout(self) -> bool:
        """Whether the next training step begins with a rollout."""
        return not self.run_state.has_rest and (self.block is None or self.block.is_spent)

    # ---------------------------------------------------------------- validation

    def validation_step(self, batch: Rows, batch_idx: int) -> None:
        """Complete with the sparse and with the full cache: what was trained, and what is deployed."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Rows, batch_idx: int) -> None:
        """Run validation, logged under ``test/``."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Rows, batch_idx: int) -> Rows:
        """The rows, each with the first ``completion`` under the module's compressor, drawn as in validation."""
        places, _ = self._validation.rows.next(len(batch))
        texts = self.generator.generate(batch, self.val_sampling, first=VALIDATION, places=places).texts
        first = texts[:: self.val_sampling.num_generations]
        return [row | {"completion": text} for row, text in zip(batch, first, strict=True)]

    def _evaluate(self, batch: Rows, stage: str) -> None:
        places, counts = self._validation.rows.next(len(batch))
        # the full cache comes last: it takes most of the memory that is left
        for name in ("sparse", "dense") if self.generator.is_sparse else ("dense",):
            draw = partial(self.generator.generate, params=self.val_sampling, dense=name == "dense", first=VALIDATION)
            scores = evaluate(partial(draw, places=places), batch, self.rewards)
            self._validation.batch(scores, counts, f"{stage}/{{}}_{name}", by_benchmark=self._world_size == 1)

    def on_validation_epoch_start(self) -> None:
        """Count only this validation's rows, even if the last one was interrupted."""
        self._validation.begin(self.rewards, ranks.DealtRows(self._trainer, self._world_size))

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        """Log confidence intervals of the means; free the caches: training rollouts size their own."""
        self._validation.end(self.rewards)
        self.generator.release()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    # ---------------------------------------------------------------- Lightning

    def setup(self, stage: str) -> None:
        """Pass the rank and the seeds to the generator, and set up like the base class."""
        self.generator.rank, self.generator.world_size = self.global_rank, self._world_size
        self.generator.sampling, self.val_sampling = self.generator.sampling.seeded, self.val_sampling.seeded
        super().setup(stage)

    def on_policy_loaded(self) -> None:
        """Pass the policy to generator and learner; load the reference policy if the loss needs one."""
        if self.loss.beta > 0:
            self._reference = [self.policy_source.load_reference()]
            if self._world_size > 1 and self.compares_with_start:  # no strategy synchronizes it
                self.same_on_ranks["reference policy"] = weights_digest(self._reference[0])
        self.learner.prepare(self.policy)
        self.generator.bind(self.policy, self.tokenizer)

    def end_token_ids(self) -> list[int]:
        """Those of ``rollout.end_tokens``, too."""
        return list(dict.fromkeys([*super().end_token_ids(), *self.generator.options.end_token_ids(self.tokenizer)]))

    def on_fit_start(self) -> None:
        """Check that prompts, generations, steps and ranks fit together, and print the plan; build the sampler."""
        super().on_fit_start()
        if self._reference and self.compares_with_start:
            narrow_weights(self._reference[0], self.policy)  # whose type the strategy has set by now
        if not self.generator.sampler().end_token_ids and not self.generator.sampling.stop_strings:
            rank_zero_warn(
                "Neither the policy nor its tokenizer names a token that ends a completion: every one will have "
                "max_completion_length tokens. Set model.rollout.end_tokens or model.sampling.stop_strings."
            )
        self.block = None  # from an earlier, interrupted fit
        self.old_logprobs.forget()
        self.check_strategy()
        self.run_state.check_agreement()
        prompts = getattr(getattr(self.trainer, "datamodule", None), "prompts_per_rollout", None)
        if prompts is not None:
            oversampling = self.generator.options.oversampling
            trained = max(1, round(prompts / oversampling))
            if trained == prompts and oversampling > 1:
                raise UserError(
                    f"model.rollout.oversampling={oversampling} leaves out none of data.prompts_per_rollout={prompts} "
                    "prompts: raise one of them, or set oversampling to 1."
                )
            rank_zero_info(f"Each rollout: {self.plan(trained)}.")

    def on_train_start(self) -> None:
        """Check that ranks start alike, and the rows of a loader that is not ours."""
        super().on_train_start()
        self.run_state.begin()
        check_own_loader(self.trainer, self.admit, self.steps_per_rollout)
        self.generator.begin(lambda: rows_of(self.trainer.train_dataloader))

    def on_train_batch_start(self, batch: Rows, batch_idx: int) -> None:
        """Continue a checkpoint's rollout, only now, because loading the data used random numbers."""
        self.block = self.run_state.rest_of_rollout() or self.block
        if self._reference and self.block is not None and self.block.rollout.ref_logprobs is None:
            self._score_by_reference(self.block.rollout)  # of a checkpoint of a run without a reference policy

    def teardown(self, stage: str) -> None:
        """End the processes of the reward functions."""
        super().teardown(stage)
        self.rewards.close()

    # ---------------------------------------------------------------- inside

    @property
    def _accumulate(self) -> int:
        return self.trainer.accumulate_grad_batches if self._trainer is not None else 1

    def _report_progress(self, progress: Progress) -> None:
        for callback in rollout_callbacks(self):
            callback.on_rollout_progress(self.trainer, self, progress)

    def _score_by_reference(self, rollout: Rollout) -> None:
        values = [self.reference_logprobs(piece) for piece in rollout.trimmed_parts(self.steps_per_generation)]
        rollout.ref_logprobs = torch.cat([rollout.widened(logprobs) for logprobs in values])

    def check_strategy(self) -> None:
        """Refuse, by name, options that the trainer's strategy does not support."""
        self.run_state.check_options()
