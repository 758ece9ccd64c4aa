"""A trial of a user's corrections on a made-up rollout, so that a mistake ends the run before the policy is loaded."""

from __future__ import annotations

import copy
import warnings
from typing import Any, NoReturn

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor

from sparse_rl_lightning.advantages import AdvantageEstimator
from sparse_rl_lightning.callbacks.base import RolloutCallback, RolloutModule, rollout_callbacks
from sparse_rl_lightning.callbacks.corrections.candidates import ReadsCandidates
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.random_state import random_state, restore_random_state
from sparse_rl_lightning.records import NEVER, EvictionRecord, KVUsage, LossOutput, Rollout

NOTE = (
    "This was a trial of {} on a made-up rollout, before the policy is loaded. If it works on real rollouts, DryRun "
    "with enabled: false in trainer.callbacks leaves the trial out."
)


class _NotLoaded(Exception):
    """Stands for the policy and the tokenizer, and is raised by any use of them."""

    def __getattr__(self, *_: Any, **__: Any) -> NoReturn:
        raise self

    __call__ = __getattr__


def try_corrections(trainer: Trainer, module: RolloutModule) -> None:
    """Run corrections, a loss and an estimator of a user's own on a made-up rollout: copies, which log nothing.

    What they write to files of their own is written. What needs something that later hooks or the trainer's optimizer
    bring is not tried.

    Raises:
        Exception: What one of them raises, with a note.
    """
    trial: Any = copy.copy(module)
    quiet = copy.copy(trainer)
    vars(quiet)["_loggers"] = [DummyLogger()]
    vars(trial).update(
        policy=_NotLoaded(), tokenizer=_NotLoaded(), log=lambda *_, **__: None,
        log_dict=lambda *_, **__: None, _trainer=quiet, _device=trainer.strategy.root_device,
    )  # fmt: skip
    random = random_state()
    callbacks = [callback for callback in rollout_callbacks(module) if callback.corrects]
    for piece in (*callbacks, module.loss, module.advantage_estimator):
        if piece is None or type(piece).__module__.startswith("sparse_rl_lightning."):
            continue
        try:
            mine = copy.deepcopy(piece, {id(trainer): quiet, id(module): trial})
        except Exception:  # it holds something that cannot be copied, and its state must stay as it is
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                _run(quiet, trial, mine, made_up_rollout(trial))
        except (_NotLoaded, IndexError):  # the trainer has no optimizer yet
            continue
        except Exception as error:
            if isinstance(error, AttributeError) and error.obj is mine:  # a later hook makes it
                continue
            error.add_note(NOTE.format(type(piece).__name__))
            raise
    restore_random_state(random)


def _run(trainer: Trainer, trial: Any, piece: Any, rollout: Rollout) -> None:
    name = type(piece).__name__
    if isinstance(piece, RolloutCallback):
        return _correct(trainer, trial, piece, rollout)
    if isinstance(piece, AdvantageEstimator):
        assert rollout.rewards is not None
        piece(rollout.rewards, trial.group_size)
        return
    denominators = piece.denominators(rollout, trial.generator.sampling.max_completion_length)
    output = piece(rollout, rollout.sampler_logprobs.clone().requires_grad_(), denominators)
    if not isinstance(output, LossOutput) or output.loss.shape != ():
        raise UserError(f"{name} must return a LossOutput with a scalar loss, as token_mean does, got {_seen(output)}.")
    if not output.loss.requires_grad:
        raise UserError(f"The loss of {name} has no gradient. Compute it from the log-probs it is called with.")


def _correct(trainer: Trainer, trial: Any, callback: Any, rollout: Rollout) -> None:
    """Call ``correct`` as a run does, and look at what it leaves.

    Raises:
        ValueError: If it returns something, or weights or kept tokens are of another kind.
    """
    name, mask = f"{type(callback).__name__}.correct", rollout.completion_mask
    with torch.no_grad():
        returned = callback.correct(trainer, trial, rollout)
    if returned is not None:
        raise UserError(f"{name} must change weights, keep or advantages, and return nothing, got {_seen(returned)}.")
    numbers = "finite numbers"
    fields = ("weights", mask, numbers), ("keep", mask, "booleans"), ("advantages", rollout.finished, numbers)
    for field, counted, wanted in fields:
        value, shape = getattr(rollout, field), counted.shape
        if value is None:  # as where no callback has any
            continue
        fits = isinstance(value, Tensor) and value.shape == shape and bool(value[counted].isfinite().all())
        if not fits or (value.dtype == torch.bool) != (field == "keep"):
            raise UserError(f"{name} must leave {wanted} {tuple(shape)} in part.{field}, got {_seen(value)}.")


def _seen(value: Any) -> str:
    """A value for a message: of a tensor its shape, and whether it has a NaN."""
    if not isinstance(value, Tensor):
        return repr(value)[:200]
    wrong = "" if value.isfinite().all() else " with NaN or infinity in it"
    return f"a tensor {tuple(value.shape)} of {value.dtype}{wrong}"


def made_up_rollout(module: RolloutModule) -> Rollout:
    """The samples of two prompts, with what corrections see in most runs."""
    sampling, count = module.generator.sampling, 2 * module.group_size
    # a length that is no other size: what does not fit cannot be broadcast
    sample, position, used = torch.arange(count), torch.arange(count + 5), torch.ones(count)
    mask = (position > 2) & (position < 5 + sample[:, None] % 4)
    sparse = -mask.float()
    partial, conversations = module.generator.partial is not None, module.generator.environment is not None
    callbacks = rollout_callbacks(module)
    candidates = max([sampling.top_logprobs, *(c.top for c in callbacks if isinstance(c, ReadsCandidates))])
    top = sparse[..., None].expand(-1, -1, max(1, candidates))
    return Rollout(
        sequences=torch.ones_like(mask, dtype=torch.int64),
        prompt_lengths=torch.full((count,), 3),
        completion_mask=mask,
        finished=used.bool(),
        sampler_logprobs=sparse,
        policy_versions=mask.int() if partial else None,
        turns=mask.int() if conversations else None,
        behavior_logprobs=sparse if sampling.truncates else None,
        topk_ids=top.int().abs() if candidates else None,
        topk_logprobs=top if candidates else None,
        support=mask.int() if candidates and sampling.truncates else None,
        evictions=(
            None
            if module.generator.retriever
            else EvictionRecord.from_dense(torch.full((1, count, 1, len(position)), NEVER))
        ),
        kv=KVUsage(used, used, used, used, 0, 0, 0),
        keys=torch.zeros(count, 2, dtype=torch.int64),
        old_logprobs=sparse * (1 + position / 100),
        ref_logprobs=sparse if module.loss.beta > 0 else None,
        replay_logprobs=sparse if module.keeps_evictions else None,
        rewards=sample / count,
        advantages=sample / count - 0.5,
        keep=mask.clone(),
        # where a callback corrects, it and the loss may rely on weights
        weights=mask.float() if any(callback.corrects for callback in callbacks) else None,
    ).to(module.device)
