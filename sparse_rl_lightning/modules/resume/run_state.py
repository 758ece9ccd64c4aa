"""RunState: everything that a resumed run depends on besides its weights, and what becomes of it if it has changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from sparse_rl_lightning.checkpoints.sharded import ANEW
from sparse_rl_lightning.data.base import PromptDataModule
from sparse_rl_lightning.data.sampler import RepeatedBlockSampler
from sparse_rl_lightning.distributed import ranks
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.fingerprints import change, fingerprint, without_code
from sparse_rl_lightning.learner.block import RolloutBlock
from sparse_rl_lightning.learner.random_state import random_state, restore_random_state
from sparse_rl_lightning.modules.resume import optimizer as optimizers
from sparse_rl_lightning.modules.resume.resumable import ResumableModule, ResumableRollouts
from sparse_rl_lightning.modules.resume.run_rules import Rule, rule_of
from sparse_rl_lightning.modules.resume.run_settings import defaults_of, policy_facts, seeds_of, settings_of
from sparse_rl_lightning.records import tensors_to

KEY = "sparse_rl_run"
"""Entry of a checkpoint."""


class RunState:
    """The description of a run, which its checkpoints hold and a resumed run is compared with.

    The module calls it from its hooks, :meth:`load` before a single tensor is overwritten: a callback's hook would come
    too late. What changed is applied with a notice, refused by name, or irrelevant (``run_rules.py``). An option
    that an older checkpoint does not have was its default; other entries that it lacks are not compared.

    Args:
        module: Module that is trained.
    """

    def __init__(self, module: ResumableModule) -> None:
        self.module = module
        self.seeds: dict[str, int] = {}
        self.settings: dict[str, str] = {}
        self.policy: dict[str, Any] = {}
        self.optimizer: dict[str, str] | None = None
        self._aside: dict[str, Any] | None = None  # random state, while a validation draws its own numbers
        self._changes: list[str] = []
        self._steps: int | None = None  # done by a schedule that has changed

    @property
    def _trains(self) -> bool:
        return self.module._trainer is not None and self.module.trainer.state.fn == TrainerFn.FITTING

    def set_up(self) -> None:
        """Describe settings and seeds, when the trainer sets the module up."""
        self._changes, self._steps = [], None  # from an earlier fit without any step
        self._aside = None  # from a validation that was interrupted
        self.seeds, self.settings = seeds_of(self.module), settings_of(self.module)
        self.module.same_on_ranks["seeds"] = str(self.seeds)

    @property
    def random(self) -> dict[str, Any]:
        """The random state of training; ModelCheckpoint with a ``monitor`` saves before a validation ends."""
        return random_state() if self._aside is None else self._aside

    def begin_validation(self) -> None:
        """Set the random state aside: numbers drawn during a validation must not affect training."""
        self._aside = random_state()

    def end_validation(self) -> None:
        """Continue as if there had been no validation, since a resumed run does not repeat it."""
        restore_random_state(self.random)
        self._aside = None

    def see_policy(self) -> None:
        """Describe the policy that was just loaded."""
        self.policy = policy_facts(self.module.policy, self.module.tokenizer, with_weights=self._trains)

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Store the description."""
        checkpoint[KEY] = {"seeds": self.seeds, "described": self.settings, "policy": self.policy}
        if self.optimizer is not None:
            checkpoint[optimizers.KEY] = self.optimizer

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another policy, or in ``fit`` of a run that this one cannot go on with.

        Raises:
            ValueError: If it is one of these.
        """
        weights, m = checkpoint.get("state_dict", {}), self.module
        if weights:  # sharded strategies bring their own checks
            optimizers.check_weights(weights, m.state_dict())
        self.check_policy(checkpoint)
        if not self._trains:
            return
        if m.trainer.world_size > 1:  # for all ranks to compare
            m.same_on_ranks["checkpoint"] = f"one with the hash {fingerprint(checkpoint=_thinned(checkpoint))}"
        state = ["optimizer_states"] if m.trainer.strategy.lightning_restore_optimizer else []
        optimizers.check_parts(checkpoint, ["loops", "lr_schedulers", KEY, *state, *m.resumed_parts])
        self._check_seeds(checkpoint)
        self._check_reference(checkpoint)
        self._check_data(checkpoint)
        self._check_settings(checkpoint)
        if m.has_own_optimizer:
            self._check_optimizer(checkpoint)

    def apply(self) -> None:
        """Apply what has changed to optimizer and schedule, and report all changes, when training begins.

        A resumed checkpoint is not saved again before the next step, when a part of its gradient is there already.
        """
        for callback in self.module.trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                callback._last_global_step_saved = self.module.trainer.global_step
        changes, self._changes = self._changes, []
        if self._steps is not None:
            trainer, (optimizer, schedule) = self.module.trainer, self.module.configured()
            optimizers.advance(schedule, self._steps)
            changes = optimizers.apply_settings(trainer.optimizers[0], optimizer) + changes
            if schedule is not None:
                trainer.lr_scheduler_configs[0].scheduler.load_state_dict(schedule.state_dict())
            self._steps = None
        if changes:
            rank_zero_info(f"Resumed as configured now, not as the checkpoint was: {', '.join(changes)}.")

    def check_policy(self, checkpoint: dict[str, Any]) -> None:
        """Refuse weights that would make another policy under this configuration.

        Raises:
            ValueError: If they would.
        """
        was = checkpoint.get(KEY, {})
        changed = _changes(was.get("policy", {}).get("config", {}), self.policy["config"])
        if was.get("policy", {}).get("vocabulary", self.policy["vocabulary"]) != self.policy["vocabulary"]:
            changed.append("its tokenizer has another vocabulary")
        now = self.settings or settings_of(self.module)  # without a trainer nothing was described yet
        changed += _changes(_described(was, {}), {n: v for n, v in now.items() if rule_of(n) is Rule.REFUSED})
        if changed:
            raise UserError(
                f"ckpt_path: with this configuration the checkpoint's weights would make another policy: "
                f"{', '.join(changed)}. Give model.policy as it was trained."
            )

    def is_within(self, checkpoint: dict[str, Any]) -> bool:
        """Whether the checkpoint is from within what some settings must stay the same for."""
        return False

    def _check_seeds(self, checkpoint: dict[str, Any]) -> None:
        changed = _changes(checkpoint.get(KEY, {}).get("seeds", {}), self.seeds)
        if changed:
            raise UserError(
                f"ckpt_path: this checkpoint is of a run with other seeds: {', '.join(changed)}. Resume with the same, "
                "seed_everything included, which decides those that are not set; or start anew from the checkpoint's "
                "weights: sparse-rl export, and model.policy."
            )

    def _check_reference(self, checkpoint: dict[str, Any]) -> None:
        """Refuse another policy as the KL penalty's reference than the one that the run began with."""
        was, now = checkpoint.get(KEY, {}).get("policy", {}).get("weights"), self.policy.get("weights")
        if was is not None and was != now and self.module.compares_with_start:
            raise UserError(
                "ckpt_path: model.policy has other weights, or another dtype, than the policy that this run began "
                "with, and loss.beta compares with that one. Name it again (the trained weights come from the "
                "checkpoint), set model.loss.beta to 0, or start anew from the checkpoint's weights."
            )
        self.policy["weights"] = was or now

    def _check_data(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a place in other data, which the loader itself would find out only when weights are loaded."""
        data = getattr(self.module.trainer, "datamodule", None)
        loaders = checkpoint["loops"].get("fit_loop", {}).get("state_dict", {}).get("combined_loader") or [None]
        state = ((loaders[0] or {}).get("_sampler_iter_state") or {}).get("sampler_state")
        if state is not None and isinstance(data, PromptDataModule):
            sampler = getattr(data.train_dataloader(), "sampler", None)  # created for this check
            if isinstance(sampler, RepeatedBlockSampler):
                sampler.load_state_dict(state)

    def _check_settings(self, checkpoint: dict[str, Any]) -> None:
        was, now = _described(checkpoint.get(KEY, {}), defaults_of(self.module)), self.settings
        if now["versions"] != was.get("versions"):  # which changes code that nobody has touched
            was, now = ({name: without_code(text) for name, text in each.items()} for each in (was, now))
        changed = {name: text for name in now for text in _changes(was, {name: now[name]})}
        drawn_by = [n for n in changed if rule_of(n) is Rule.BETWEEN_ROLLOUTS and self.is_within(checkpoint)]
        mixed = [changed[name] for name in drawn_by if without_code(was[name]) != without_code(now[name])]
        accumulated = changed.get("trainer.accumulate_grad_batches")
        done = checkpoint["loops"].get("fit_loop", {}).get("epoch_loop.batch_progress", {})
        processed, every = done.get("current", {}).get("processed", 0), self.module.trainer.accumulate_grad_batches
        if accumulated and processed % every and not done["is_last_batch"]:
            raise UserError(
                f"ckpt_path: {accumulated}, and {processed} micro-batches of this epoch are done, no multiple of it: "
                "the next optimizer step would have a part of its gradient. Resume as it was, or from another one."
            )
        if mixed:
            raise UserError(
                f"ckpt_path: this checkpoint is from within a rollout, and the rest would mix with what changed: "
                f"{', '.join(mixed)}. Resume as it was and change it after a checkpoint between two rollouts, or start "
                "anew from the checkpoint's weights: sparse-rl export, and model.policy."
            )
        ends = checkpoint.get(KEY, {}).get("policy", {}).get("ends", {})
        self._changes = [*changed.values(), *_changes(ends, self.policy["ends"])]

    def _check_optimizer(self, checkpoint: dict[str, Any]) -> None:
        optimizer, schedule = self.module.configured()
        if checkpoint.get(ANEW):
            checkpoint.pop(optimizers.KEY, None)
        optimizers.check_optimizer(checkpoint, optimizer)
        was, now = checkpoint.get(optimizers.KEY, {}), optimizers.describe_optimizer(optimizer, schedule)
        if was == now:
            return  # everything is the checkpoint's, bit by bit
        state = (checkpoint["lr_schedulers"] or [{}])[0]
        counts_steps = "num_bad_epochs" not in state  # else it counts how often its metric was looked at
        steps = state.get("last_epoch") if counts_steps else None
        self._steps = checkpoint["global_step"] if steps is None else steps
        self._changes = optimizers.schedule_change(was, now) + self._changes
        checkpoint["lr_schedulers"] = []  # the schedule has changed: apply() does it


class RolloutState(RunState):
    """The state of a run of rollouts: the rest of one, rows of unfinished groups, their number, and random numbers."""

    def __init__(self, module: ResumableRollouts) -> None:
        super().__init__(module)
        self.module: ResumableRollouts = module
        self._resumed: dict[str, Any] | None = None  # what a checkpoint has of this rank, until the first batch

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Store all of it as tensors, numbers and texts."""
        super().save(checkpoint)
        m, accumulate = self.module, self.module.trainer.accumulate_grad_batches
        if m.block is not None and m.block.cursor % accumulate:
            rank_zero_warn(
                "This checkpoint falls between two optimizer steps: the gradient accumulated so far is not in it. For "
                "an exact resume, save with ModelCheckpoint.every_n_train_steps."
            )
        state: dict[str, Any] = {
            "num_rollouts": m.num_rollouts,
            "num_sequences": m.num_sequences,
            "block": None,
            "partial": None if m.generator.partial is None else m.generator.partial.state(),
            "random_state": self.random,
            "reported": {name: float(value) for name, value in m.trainer.callback_metrics.items()},
        }
        if m.block is not None and not m.block.is_spent:
            state["block"] = m.block.state() | m.old_logprobs.state(m.block.plan)
        sent = state if m._world_size == 1 else tensors_to(state, "cpu")  # else rank zero reads it onto others' GPUs
        checkpoint["sparse_rl"] = state | {"other_ranks": ranks.gather_to_zero(sent, m._world_size)[1:]}

    def is_within(self, checkpoint: dict[str, Any]) -> bool:
        """Whether the checkpoint has the rest of a rollout."""
        return (self._of_rank(checkpoint) or {}).get("block") is not None

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Check it, and keep it for the first batch."""
        super().load(checkpoint)
        m, state = self.module, checkpoint.get("sparse_rl")
        if m.generator.shadow is not None:
            m.generator.shadow.version = None  # its weights are outdated, even from the same step
        if state is None or not self._trains:
            return
        done = checkpoint["loops"].get("fit_loop", {}).get("epoch_loop.batch_progress", {}).get("current", {})
        if done.get("ready") != done.get("processed"):
            raise UserError(
                "ckpt_path: this checkpoint was saved within a training step (save_on_exception), which cannot be gone "
                "on with. Give one of RolloutCheckpoint."
            )
        m.num_rollouts, m.num_sequences = state["num_rollouts"], state["num_sequences"]
        of_rank = self._of_rank(checkpoint)
        if of_rank is None:
            rank_zero_warn(
                f"The checkpoint is of {1 + len(state.get('other_ranks', []))} rank(s), this run has {m._world_size}: "
                "the rest of its last rollout and its random state are dropped, training goes on with a new rollout."
            )
            return
        self._resumed = of_rank
        if m.generator.partial is not None:
            count = m.generator.partial.load_state(of_rank.get("partial"), m.generator.sampling.num_generations)
            if count:
                rank_zero_info(
                    f"{count} prompts of partial rollouts had unfinished samples at the checkpoint: all of theirs are "
                    "drawn anew with the next rollout."
                )
        elif of_rank.get("partial") is not None:
            rank_zero_warn(
                "The checkpoint holds unfinished sequences of partial rollouts, which are dropped: model.rollout."
                "partial_rollout_steps is null now."
            )

    @property
    def has_rest(self) -> bool:
        """Whether training continues in the middle of a checkpoint's rollout."""
        return self._resumed is not None and self._resumed["block"] is not None

    def check_options(self) -> None:
        """Refuse, by name, options that several ranks do not support."""
        m = self.module
        is_partial, packs = m.generator.partial is not None, m.learner.options.packs
        ranks.check_options(m.policy, m._world_size, is_partial=is_partial, packs=packs)

    def check_agreement(self) -> None:
        """Check that ranks were configured alike, before the end of training is looked for in different checkpoints."""
        ranks.check_agreement(self.module.same_on_ranks)

    def begin(self) -> None:
        """Check that ranks begin alike and steps are whole.

        Raises:
            ValueError: If ranks differ, or an optimizer step would have a part of its gradient.
        """
        m = self.module
        check_batches(m.trainer)
        if m._world_size > 1:
            m.same_on_ranks["optimizer steps"] = str(m.trainer.global_step)
            ranks.check_training(m.trainer, m.same_on_ranks)

    def rest_of_rollout(self) -> RolloutBlock | None:
        """Restore a checkpoint's random state, and what is left of its rollout, once; None if there is nothing left."""
        m, resumed = self.module, self._resumed
        self._resumed = None
        if resumed is None:
            return None
        restore_random_state(resumed["random_state"])
        state = resumed["block"]
        if state is None:
            return None
        # for those who follow what a rollout has logged
        m.trainer.callback_metrics.update({n: torch.tensor(value) for n, value in resumed.get("reported", {}).items()})
        plan = m.plan(len(state["rollout"]["sequences"]) // m.group_size)
        m.old_logprobs.load(state, plan)
        state = state | {"rollout": tensors_to(state["rollout"], m.device)}
        return RolloutBlock.from_state(plan, state, m.generator.sampling.seed or 0, m.denominators)

    def _of_rank(self, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
        """What the checkpoint has of this rank, None if it is of another number of them."""
        state = checkpoint["sparse_rl"]
        states: list[dict[str, Any]] = [state, *state.get("other_ranks", [])]
        return states[self.module.global_rank] if len(states) == self.module._world_size else None


def check_batches(trainer: Any) -> None:  # Lightning sets overfit_batches where no type says so
    """Refuse limits of Lightning's that cut an optimizer step, or draw other batches than a rollout consists of.

    Raises:
        ValueError: If there is such a limit.
    """
    if trainer.overfit_batches:
        raise UserError(
            f"trainer.overfit_batches={trainer.overfit_batches} replaces the order in which rollouts read prompts. "
            "Give data with few rows instead, such as num_train."
        )
    count, every = trainer.num_training_batches, trainer.accumulate_grad_batches
    if math.isfinite(count) and count % every:
        raise UserError(
            f"An epoch has {count} batches (trainer.limit_train_batches={trainer.limit_train_batches}), no multiple of "
            f"trainer.accumulate_grad_batches={every}: Lightning would take a step with a part of its gradient at the "
            "end. Set limit_train_batches to a multiple."
        )


def _thinned(value: Any) -> Any:
    """The same with a few thousand numbers of each large tensor: hashing all takes minutes where weights are many."""
    if isinstance(value, Tensor):
        return value if value.numel() <= 2**16 else value.flatten()[:: value.numel() // 2**12]
    if isinstance(value, dict):
        return {name: _thinned(item) for name, item in value.items()}
    return [_thinned(item) for item in value] if isinstance(value, list | tuple) else value


def _described(was: Mapping[str, Any], defaults: Mapping[str, str]) -> dict[str, str]:
    """The settings of a checkpoint; of version 0.2 those that are written alike, such as numbers, without objects."""
    older: dict[str, str] = was.get("settings", {})
    return (
        {**defaults, **was["described"]}
        if "described" in was
        else {name: text for name, text in older.items() if name != "module" and not {*"([{"} & {*text}}
    )


def _changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Descriptions of the differences in what both have."""
    return [change(name, was[name], value) for name, value in now.items() if was.get(name, value) != value]
