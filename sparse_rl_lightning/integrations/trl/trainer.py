"""SparseGRPOTrainer: TRL's trainer, whose completions come from the sampler of this library and are corrected."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from itertools import groupby
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from trl import GRPOTrainer

from sparse_rl_lightning.callbacks.base import CorrectionCallback, correct_by
from sparse_rl_lightning.callbacks.corrections.naive import naive_training
from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.corrections import normalize_weights
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.trl.checks import (
    check_arguments,
    check_loss,
    check_method,
    check_noise,
    check_trainer,
    sampling_of,
)
from sparse_rl_lightning.metrics.rollout import sampling_metrics
from sparse_rl_lightning.policies.modes import exact_angles
from sparse_rl_lightning.policies.windows import deaths_by_layer
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.replay.hooks import REPLAY, attention_implementation
from sparse_rl_lightning.replay.logprobs import replayable
from sparse_rl_lightning.rollout import RolloutOptions

DRAWN = "drawn"
"""Key of the rollout's sequences among the tensors that TRL buffers, shuffles and splits."""
OVERRIDDEN = (
    "_generate_single_turn", "_generate_and_score_completions", "_compute_loss", "_get_per_token_logps_and_entropies",
)  # fmt: skip
"""TRL's own methods that a version of it may drop."""


class SparseGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL is an extra
    """TRL's ``GRPOTrainer`` with rollouts under a compressed cache, and the loss that they need.

    Completions are drawn by :class:`~sparse_rl_lightning.rollout.RolloutSampler` on the live weights, in evaluation
    too. Everything else is TRL's: arguments, rewards, advantages, loss, logging, checkpoints. The loss of each token is
    multiplied by what corrections leave of it, or the learner replays the sampler's evictions.

    Args:
        *args: Arguments of ``GRPOTrainer``.
        compressor: Compressor of the rollout's cache.
        corrections: Corrections for drawing with another policy than the learner's, e.g.
            ``[ImportanceReweighting(clip_max=1.5)]``. What they reject counts as zeros, as in the paper.
        replay: Whether the learner, and with ``beta`` the reference policy, attend as the sampler did.
        rollout: Memory and speed of rollouts.
        **kwargs: Arguments of ``GRPOTrainer``.

    Raises:
        ValueError: If an option of TRL is not supported, or an argument does not fit the others.
    """

    def __init__(
        self,
        *args: Any,
        compressor: Compressor,
        corrections: Sequence[CorrectionCallback] = (),
        replay: bool = False,
        rollout: RolloutOptions = RolloutOptions(),  # noqa: B008  # frozen
        **kwargs: Any,
    ) -> None:
        check_arguments(inspect.signature(GRPOTrainer.__init__).bind(self, *args, **kwargs).arguments, rollout)
        self._replays = False  # until there is something to replay
        super().__init__(*args, **kwargs)
        self.reward_funcs: list[Any] = [reads_texts(function) for function in self.reward_funcs]
        check_method(compressor, corrections, replay, self.args.loss_type)
        check_trainer(self, replay)
        if corrections:
            check_loss(type(self), SparseGRPOTrainer, GRPOTrainer)
        self._sampling = sampling_of(self.args)
        self._correct = Corrections(corrections, self.accelerator)
        self._replays = replay
        self._measures = bool(corrections) or (compressor.evicts and not replay)
        if self._measures or replay:
            check_noise(self)
        self._active: Rollout | None = None  # the sequences of TRL's present call
        with self.own_forward() as policy:
            self.sampler = rollout.sampler(policy, self._tokenizer, compressor)
        self.eos_token_ids = self.sampler.end_token_ids  # TRL tells by them what was cut off
        if compressor.evicts and not (corrections or replay):
            evicts = f"{type(compressor).__name__} evicts"
            correct = "corrections=[ImportanceReweighting(clip_max=1.5)]"
            warnings.warn(naive_training(evicts, correct, "replay=True"), stacklevel=2)

    @contextmanager
    def own_forward(self) -> Iterator[PreTrainedModel]:
        """The policy without the forward that TRL (fused head) and accelerate (autocast) put on it, for the context.

        A ``RolloutSampler``, a ``CompressedCache`` and ``sequence_logprobs`` take it this way, also after training.
        """
        policy = self._policy(self.model)
        replaced = vars(policy).pop("forward", None)
        try:
            yield policy
        finally:
            if replaced is not None:
                policy.forward = replaced

    # ---------------------------------------------------------------- rollouts

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, num_generations: int, *_: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Draw one completion for each of these prompts, in which TRL has repeated the samples of a group."""
        prompts, samples = grouped(prompt_ids)
        seed = int(torch.randint(2**62, ()))  # a checkpoint of TRL restores torch's random state of every process
        params = replace(self._sampling, num_generations=samples, seed=seed)
        with self.own_forward(), self.accelerator.autocast():
            rollout = self.sampler.generate(prompts, params)
        self._active = rollout
        pairs = zip(rollout.sampler_logprobs, rollout.completion_mask, strict=True)
        return rollout.completion_ids, [logprobs[mask].tolist() for logprobs, mask in pairs]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Draw, score and correct a generation batch, and let each sequence's record go with its tensors."""
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        rollout = self._active
        assert rollout is not None
        # without those that mask_truncated_completions leaves out
        rollout.completion_mask = by_token(output["completion_mask"], rollout).bool()
        if self._measures:
            if "old_per_token_logps" not in output:
                output["old_per_token_logps"] = self._rescored(output)
            rollout.old_logprobs = by_token(output["old_per_token_logps"], rollout)
            self._correct(rollout)
        self._note(sampling_metrics(rollout))
        rollout.evictions = rollout.evictions if self._replays else None
        self._active = None
        return output | {DRAWN: [Drawn(rollout, row) for row in range(len(rollout))]}

    @torch.no_grad()
    def _rescored(self, output: dict[str, Any]) -> Tensor:
        """Log-probs (B, C) of the dense policy before the update, which TRL leaves out where they are the learner's."""
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        size = self.args.per_device_train_batch_size if self.model.training else self.args.per_device_eval_batch_size
        width = output["completion_ids"].shape[1]
        logprobs: Tensor = self._get_per_token_logps_and_entropies(self.model, ids, mask, width, batch_size=size)[0]
        return logprobs

    def _note(self, metrics: dict[str, Tensor | float]) -> None:
        """Log means over all processes with TRL's metrics."""
        device, numbers = self.accelerator.device, metrics.values()
        values = torch.stack([torch.as_tensor(number, dtype=torch.float32, device=device) for number in numbers])
        values = self.accelerator.reduce(values, reduction="mean")
        for name, value in zip(metrics, values.tolist(), strict=True):
            self._metrics["train" if self.model.training else "eval"][name].append(value)

    # ---------------------------------------------------------------- loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss, with an advantage for each token: the sequence's, times what corrections leave of the token."""
        inputs = dict(inputs)  # the buffer's own, which further iterations read
        micro_batch, width = together(inputs.pop(DRAWN)), inputs["completion_ids"].shape[1]
        drawn = by_completion(micro_batch.sequences, micro_batch, width)
        assert torch.equal(drawn, inputs["completion_ids"] * inputs["completion_mask"]), "the record of another sample"
        if self._correct.callbacks:
            left = by_completion(factors(micro_batch), micro_batch, width)
            inputs["advantages"] = inputs["advantages"][:, None] * left
        self._active = micro_batch
        try:
            loss: Tensor = super()._compute_loss(model, inputs)
        finally:
            self._active = None
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, batch_size: int | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """Log-probs and entropies (B, C) of TRL's own forward pass, under the sampler's evictions if it replays."""
        compute = super()._get_per_token_logps_and_entropies
        rollout, policy = self._active, self._policy(model)
        if not self._replays:
            with exact_angles(policy):
                plain: tuple[Tensor, Tensor | None, Tensor | None] = compute(
                    model, input_ids, attention_mask, logits_to_keep, batch_size, **options
                )
            return plain
        if rollout is None:
            raise UserError(
                "With replay=True this method knows the sequences of the trainer's own rollouts, in its own steps, and "
                "what was evicted there. For others use sparse_rl_lightning.logprobs.sequence_logprobs, "
                "`with trainer.own_forward() as policy:`."
            )
        size = batch_size or len(rollout)
        logprobs: list[Tensor] = []
        entropies: list[Tensor] = []
        for start in range(0, len(rollout), size):
            micro_batch = rollout[start : start + size]
            call = partial(_under, model, deaths_by_layer(policy.config, replayable(policy, micro_batch)))
            sequences = micro_batch.sequences
            with attention_implementation(policy, REPLAY), exact_angles(policy):
                both = compute(call, sequences, micro_batch.completion_mask, sequences.shape[1] - 1, **options)[:2]
            for gathered, values in zip((logprobs, entropies), both, strict=True):
                if values is not None:
                    gathered.append(by_completion(F.pad(values, (1, 0)), micro_batch, logits_to_keep))
        return torch.cat(logprobs), torch.cat(entropies) if entropies else None, None

    def _policy(self, model: Any) -> PreTrainedModel:
        """The causal language model inside what accelerate and peft wrap around it."""
        inner = self.accelerator.unwrap_model(model)
        policy: PreTrainedModel = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        return policy


def _under(model: Any, death: Any, *, attention_mask: Tensor, **inputs: Any) -> Any:
    """The model's forward pass over right-padded sequences, which need no mask of the padding, under a record."""
    return model(**inputs, death=death)


def reads_texts(function: Any) -> Any:
    """A reward of this library, which reads texts, for TRL's chats: lists of messages, of which the last counts."""
    inner = getattr(function, "func", function)  # of a partial
    modules = (getattr(owner, "__module__", "") for owner in (inner, *type(inner).__mro__))
    if not any(module.startswith("sparse_rl_lightning.") for module in modules):
        return function

    @wraps(function, updated=())
    def reward(completions: Sequence[Any], **columns: Any) -> Any:
        texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
        return function(completions=texts, **columns)

    return reward


class Corrections:
    """Corrections, applied one after the other.

    Args:
        callbacks: Corrections.
        accelerator: Accelerator of the processes that share a rollout, for means over all of them.

    Raises:
        ValueError: If two are of one kind.
    """

    def __init__(self, callbacks: Sequence[CorrectionCallback], accelerator: Any) -> None:
        self.callbacks = list(callbacks)
        strategy = SimpleNamespace(reduce=lambda total, reduce_op: accelerator.reduce(total, reduction=reduce_op))
        world = SimpleNamespace(callbacks=self.callbacks, world_size=accelerator.num_processes, strategy=strategy)
        self._context = (cast(Any, world), cast(Any, None))  # what corrections read of a trainer and a module
        for callback in self.callbacks:
            callback.setup(*self._context, "fit")

    def __call__(self, rollout: Rollout) -> None:
        """Reject and weigh the sequences of a rollout with dense log-probs."""
        correct_by(self.callbacks, *self._context, rollout)


def factors(micro_batch: Rollout) -> Tensor:
    """What the clipped term of each token (B, T) of a micro-batch is multiplied by, 0 where it is rejected."""
    mask = micro_batch.completion_mask
    keep = mask if micro_batch.keep is None else mask & micro_batch.keep
    weights = mask.float() if micro_batch.weights is None else micro_batch.weights
    if micro_batch.weight_reference is not None:
        weights = normalize_weights(weights, micro_batch.weight_reference, mask)
    return torch.where(keep, weights, 0.0)


class Drawn(NamedTuple):
    """One sequence of a rollout, in a list that TRL shuffles and splits with its tensors."""

    rollout: Rollout
    row: int


def together(drawn: Sequence[Drawn]) -> Rollout:
    """These sequences of one rollout, in this order."""
    rollout = drawn[0].rollout
    assert all(sample.rollout is rollout for sample in drawn), "TRL trains on one generation batch at a time"
    return rollout[torch.tensor([sample.row for sample in drawn], device=rollout.sequences.device)]


def by_completion(values: Tensor, rollout: Rollout, width: int) -> Tensor:
    """Values (B, T) at tokens of the sequences as TRL has them, (B, width) by place in the completion; 0 elsewhere."""
    index = rollout.prompt_lengths[:, None] + torch.arange(width, device=values.device)
    inside = index < values.shape[1]
    index = index.clamp(max=values.shape[1] - 1)
    inside &= rollout.completion_mask.gather(1, index)
    return torch.where(inside, values.gather(1, index), 0)


def by_token(values: Tensor, rollout: Rollout) -> Tensor:
    """Values (B, C) by place in the completion as a rollout has them, (B, T) at the tokens; 0 elsewhere."""
    index = torch.arange(rollout.sequences.shape[1], device=values.device) - rollout.prompt_lengths[:, None]
    gathered = values.gather(1, index.clamp(0, values.shape[1] - 1))
    return torch.where(rollout.completion_mask, gathered, torch.zeros_like(gathered))


def grouped(prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
    """The prompts without their repeats, and the number of samples of each.

    TRL repeats a prompt for each of its samples, and hands a process any piece of that; a prompt that is read once for
    several samples saves time. The order stays: a prompt's samples are adjacent.
    """
    runs = [(list(prompt), len(list(same))) for prompt, same in groupby(list(ids) for ids in prompts)]
    samples = math.gcd(*(count for _, count in runs))
    return [prompt for prompt, count in runs for _ in range(count // samples)], samples
