"""BlockModule: rollouts become blocks of micro-batches, and a run can be killed and resumed at any moment."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DistributedSampler

from sparse_rl_lightning.data.sampler import RepeatedBlockSampler
from sparse_rl_lightning.distributed.ranks import check_agreement, check_shared, gather_to_zero
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.fingerprints import fingerprint
from sparse_rl_lightning.learner.block import BlockPlan, RolloutBlock
from sparse_rl_lightning.learner.forward import Learner
from sparse_rl_lightning.learner.loss import Items, Objective
from sparse_rl_lightning.learner.random_state import restore_random_state
from sparse_rl_lightning.modules.generation import GenerationModule, Rows
from sparse_rl_lightning.policies.sharding import is_sharded
from sparse_rl_lightning.ranges import check_number
from sparse_rl_lightning.records import Rollout, ScoredRollout
from sparse_rl_lightning.rollout.checks import check_prompts
from sparse_rl_lightning.rollout.partial import PartialRollouts, check_storable


class BlockModule(GenerationModule):
    """Draws a rollout per block of prompts and keeps what a resumed run needs; subclasses write ``training_step``.

    Args:
        *generation: Arguments of GenerationModule.
        objective: Counts the items of an optimiser step.
        steps_per_generation: As in SparseGRPO.
        num_iterations: As in SparseGRPO.
        oversampling: As in SparseGRPO.
        learner: As in SparseGRPO.
        partial: None draws every rollout to its end.
        **options: Arguments of GenerationModule.

    Raises:
        ValueError: If a number is out of range, or partial rollouts meet a setting that they cannot work with.
    """

    trains_whole_policy = True
    """Whether every step has a gradient for every trainable weight."""

    resumed_parts = ("sparse_rl",)

    replays = False
    """Whether the learner attends under the sampler's evictions."""

    def __init__(
        self,
        *generation: Any,
        objective: Objective,
        steps_per_generation: int,
        num_iterations: int,
        oversampling: float,
        learner: Learner | None,
        partial: PartialRollouts | None,
        **options: Any,
    ) -> None:
        super().__init__(*generation, **options)
        check_number("steps_per_generation", steps_per_generation, least=1)
        check_number("num_iterations", num_iterations, least=1)
        check_number("oversampling", oversampling, least=1)
        self.objective = objective
        self.steps_per_generation = steps_per_generation
        self.num_iterations = num_iterations
        self.oversampling = oversampling
        self.learner = learner or Learner()
        self.partial = partial
        self.block: RolloutBlock | None = None
        self.num_rollouts = 0
        self._random_state: dict[str, Any] | None = None
        self._block_state: dict[str, Any] | None = None
        self._check_partial()
        self._refuse_flash(self.policy_source.attn_implementation)

    @property
    def steps_per_rollout(self) -> int:
        """How many batches the loader must yield per block of prompts."""
        return self.steps_per_generation * self.num_passes

    @property
    def num_passes(self) -> int:
        """How many times a rollout is served from beginning to end."""
        return self.num_iterations

    def plan(self, num_prompts: int) -> BlockPlan:
        """How a rollout of so many prompts becomes optimiser steps.

        Raises:
            ValueError: If a division leaves a rest.
        """
        return BlockPlan(
            num_prompts, self.num_generations, self.steps_per_generation, self.num_passes, self._accumulate,
            self.learner.packs,
        )  # fmt: skip

    def draw(self, rows: Rows) -> ScoredRollout:
        """The next rollout: of these rows, or in partial rollouts of those whose samples have all ended by now."""
        if self.partial is None:
            return self.generate(rows, index=self.num_rollouts, progress=self._report_progress)
        start, prompts, sampler = time.perf_counter(), self.encode(rows), self.sampler()
        ids = self.sequence_ids(self.num_rollouts, len(prompts), self.num_generations)
        unit = self.steps_per_generation // math.gcd(self.steps_per_generation, self.num_generations)
        rollout, own = self.partial.draw(
            sampler, self.sampling, rows, prompts, ids, unit=unit, progress=self._report_progress
        )
        assert self.partial.session is not None
        self._tell_memory_plan(self.partial.session.memory_plan, dense=False)
        return self._decoded(rollout, own, self.num_rollouts, start)

    def places(self, prompts: int) -> list[int]:
        """As one rank has them in its blocks of training, so that a prompt is drawn alike on any number of ranks."""
        is_dealt_out = self._world_size > 1 and self.trainer.training  # validation's batches are no blocks
        sampler = getattr(self.trainer.train_dataloader, "sampler", None) if is_dealt_out else None
        if isinstance(sampler, RepeatedBlockSampler) and sampler.block_size == prompts:
            return sampler.places
        return super().places(prompts)

    def longest_row(self) -> dict[str, Any]:
        """The row with the longest prompt, in tokens, of the training loader.

        Raises:
            ValueError: If the loader's data set cannot be looked at as a whole.
        """
        rows = self._training_rows()
        lengths = [len(prompt) for prompt in self.encode(rows)]
        return rows[lengths.index(max(lengths))]

    # ---------------------------------------------------------------- Lightning

    def configure_callbacks(self) -> list[Callback]:
        """What every run has, unless the trainer has its own: DryRun, ZeroSharding and the guards against faults."""
        from sparse_rl_lightning.callbacks import defaults  # it needs this package

        return [*defaults.added_to(self.trainer, defaults.ROLLING_OUT), *super().configure_callbacks()]

    def configure_model(self) -> None:
        """Load the policy, make it ready for the learner, and refuse attention that takes no mask where it replays.

        Raises:
            ValueError: If the policy runs flash attention.
        """
        first = self.policy is None
        super().configure_model()
        assert self.policy is not None
        self._refuse_flash(self.policy.config._attn_implementation)
        if first:
            self.learner.prepare(self.policy)

    def on_fit_start(self) -> None:
        """Check that prompts, generations and steps fit together, and say how."""
        super().on_fit_start()
        self.block = None  # of an earlier, interrupted fit
        self._check_ranks()
        if self._world_size > 1:  # before the end of training is looked for, in checkpoints of different steps
            check_agreement(self.same_on_ranks)
        data = getattr(self.trainer, "datamodule", None)
        if data is not None and hasattr(data, "prompts_per_rollout"):
            rank_zero_info(f"Each rollout: {self.plan(max(1, round(data.prompts_per_rollout / self.oversampling)))}.")

    def on_train_start(self) -> None:
        """Ranks must have the same to start from; partial rollouts must know the longest prompt, and store all rows."""
        super().on_train_start()
        if self._world_size > 1:
            self._check_agreement()
        for callback in self.trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):  # a resumed one would save again after the first micro-batch
                callback._last_global_step_saved = self.trainer.global_step
        if self.partial is None:
            return
        check_storable(self._training_rows())
        (longest,) = self.encode([self.longest_row()])
        check_prompts([longest], self.sampling, self.dense_policy)
        self.partial.begin(len(longest))

    def on_train_batch_start(self, batch: Rows, batch_idx: int) -> None:
        """After a resume, take up block and random state only now: loading the data consumed random numbers."""
        if self._block_state is not None:
            state, self._block_state = self._block_state, None
            plan = self.plan(len(state["rollout"]["sequences"]) // self.num_generations)
            self.block = RolloutBlock.from_state(plan, state, self.seed, self.count_items)
            self.block.rollout = self.block.rollout.to(self.device)
        if self._random_state is not None:
            restore_random_state(self._random_state)
            self._random_state = None

    def on_train_end(self) -> None:
        """Say what partial rollouts leave behind."""
        if self.partial is not None and self.partial.num_unfinished:
            rank_zero_info(f"{self.partial.num_unfinished} unfinished sequences of partial rollouts were not trained.")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store block, unfinished sequences, number of rollouts and random state, as tensors, numbers and texts."""
        super().on_save_checkpoint(checkpoint)
        if self.block is not None and self.block.cursor % self._accumulate:
            rank_zero_warn(
                "This checkpoint falls between two optimiser steps: the gradient accumulated so far is not in it. For "
                "an exact resume, save with ModelCheckpoint.every_n_train_steps."
            )
        unspent = self.block is not None and not self.block.is_spent
        own = {
            "num_rollouts": self.num_rollouts,
            "block": self.block.state() if unspent and self.block is not None else None,
            "partial": None if self.partial is None else self.partial.state(),
            "random_state": self.random_state_of_training(),
        }
        checkpoint["sparse_rl"] = own | {"other_ranks": gather_to_zero(own, self._world_size)[1:]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the weights' checks from the base, and keep the rest for the first batch."""
        super().on_load_checkpoint(checkpoint)
        state = checkpoint.get("sparse_rl")
        if state is None:
            return
        self.num_rollouts = state["num_rollouts"]
        ranks = [state, *state.get("other_ranks", [])]
        if len(ranks) != self._world_size:
            rank_zero_warn(
                f"The checkpoint is of {len(ranks)} rank(s), this run has {self._world_size}: the rest of its last "
                "rollout and its random state are dropped, training goes on with a new rollout."
            )
            return
        state = ranks[self.global_rank]
        self._block_state, self._random_state = state["block"], state["random_state"]
        if self.partial is not None:
            self.partial.load_state(state.get("partial"))
        elif state.get("partial") is not None:
            rank_zero_warn(
                "The checkpoint holds unfinished sequences of partial rollouts, which are dropped: model."
                "partial_rollout_steps is null now."
            )

    @property
    def starts_rollout(self) -> bool:
        """Whether the next training step begins with a rollout."""
        return self._block_state is None and (self.block is None or self.block.is_spent)

    def count_items(self, window: Rollout) -> Items:
        """The items of one optimiser step over all ranks; ``window`` holds this rank's sequences of it."""
        own = self.objective.items(window)
        return own if self._world_size == 1 else own.summed(lambda t: self.trainer.strategy.reduce(t, reduce_op="sum"))

    @property
    def _accumulate(self) -> int:
        return self.trainer.accumulate_grad_batches if self._trainer is not None else 1

    def _training_rows(self) -> Rows:
        data: Any = getattr(self.trainer.train_dataloader, "dataset", None)
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise UserError(
                "The longest training prompt must be known before the first rollout: fit with a data module of "
                f"prompts (PromptDataModule), or with a loader over a list of rows, not over {type(data).__name__}."
            )
        return [data[index] for index in range(len(data))]

    def _check_ranks(self) -> None:
        """Refuse, by name, what several ranks cannot do."""
        if self.trainer.world_size > 1 and self.partial is not None:
            raise UserError(
                "partial_rollout_steps works in one process so far: set model.partial_rollout_steps to null, or "
                "trainer.devices and trainer.num_nodes to 1."
            )
        if self.trainer.world_size > 1 and not self.trains_whole_policy:
            raise UserError(
                f"{type(self).__name__} trains one part of the policy at a time, which works in one process so far: "
                "set trainer.devices and trainer.num_nodes to 1."
            )
        if self.learner.packs and is_sharded(self.dense_policy):
            raise UserError(
                "learner.micro_batch_tokens splits micro-batches differently on every rank, but ranks that share "
                "weights (ZeRO-3, FSDP2) must pass through the model equally often. Set it to null, or use ZeRO-2."
            )

    def _check_resumed(self, checkpoint: dict[str, Any]) -> None:
        """Note which checkpoint training goes on from, for all ranks to compare."""
        if self._world_size > 1:
            self.same_on_ranks["checkpoint"] = f"one with the hash {fingerprint(checkpoint=checkpoint)}"
        super()._check_resumed(checkpoint)

    def _check_agreement(self) -> None:
        """Refuse ranks that have other data, weights or checkpoints than the others, or a folder of their own."""
        loaders: dict[str, Any] = {
            "training": self.trainer.train_dataloader,
            "validation": self.trainer.val_dataloaders,
        }
        for name, loader in loaders.items():
            if isinstance(getattr(loader, "sampler", None), DistributedSampler):  # which deals the rows out
                rows = loader.dataset
                found = fingerprint(rows=[rows[index] for index in range(len(rows))])
                self.same_on_ranks[f"{name} rows"] = f"{len(rows)} of the hash {found}"
        self.same_on_ranks["optimiser steps"] = str(self.trainer.global_step)
        check_agreement(self.same_on_ranks)
        if isinstance(self.trainer.strategy, (DeepSpeedStrategy, ModelParallelStrategy)):  # all ranks write
            folders = (getattr(callback, "dirpath", None) for callback in self.trainer.checkpoint_callbacks)
            check_shared([Path(folder) for folder in folders if folder and "://" not in str(folder)])

    def _check_partial(self) -> None:
        """Refuse, by name, what partial rollouts cannot work with."""
        if self.partial is None:
            return
        reasons = {
            "num_slots=null": (
                self.sampler_options.num_slots is None,
                "unfinished sequences stay in a fixed number of slots. Set model.num_slots",
            ),
            f"oversampling={self.oversampling}": (
                self.oversampling > 1,
                "a block may hold fewer groups than prompts, so none can be left out. Set model.oversampling to 1",
            ),
            type(self).__name__: (
                self.replays,
                "no replay reproduces a sequence that several versions of the policy drew. Use SparseGRPO",
            ),
            "keep_pool=False": (
                not self.sampler_options.keep_pool,
                "unfinished sequences stay in the pool while the learner works. Set model.keep_pool to true",
            ),
        }
        for setting, (given, why) in reasons.items():
            if given:
                raise UserError(
                    f"partial_rollout_steps={self.partial.max_steps} does not work with {setting}: {why}, or "
                    "model.partial_rollout_steps to null."
                )

    def _refuse_flash(self, name: str | None) -> None:
        """Before a model is loaded or a package asked for, where the source of the policy names its attention."""
        if self.replays and name is not None and "flash" in name:
            raise UserError(
                f"{type(self).__name__} attends under the sampler's evictions, and attn_implementation={name!r} takes "
                "no such mask (and dense log-probs of other kernels would bring rounding back into xi). Set the "
                "policy's attn_implementation to 'sdpa', or train with SparseGRPO."
            )
