"""StepGuard: skips steps with a gradient that is not finite, ends the run after several, and warns of long ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.distributed.tensor import DTensor

from sparse_rl_lightning.callbacks.base import warn_of_run
from sparse_rl_lightning.callbacks.corrections.naive import REPLAY, learns_from_less, naive_warning
from sparse_rl_lightning.checkpoints.files import save_tensors
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.files import own_folder, write_files
from sparse_rl_lightning.learner.block import RolloutBlock
from sparse_rl_lightning.learner.loss import GRPOLoss

BEHIND = ("staleness_ratio/max", "top10_token_share")
"""Numbers of every micro-batch that explain a long step."""


class StepGuard(Callback):
    """Skip optimizer steps with a NaN or infinite gradient of any rank, count them, and stop after some in a row.

    A skipped step leaves weights and optimizer unchanged. The count so far is logged as ``skipped_steps``, and the
    gradient's norm before clipping, for steps that were not skipped, as ``grad_norm``. When the run stops, every
    rank's sequences of the last step are in ``bad_steps/`` below ``trainer.default_root_dir``, as tensors that
    ``torch.load(weights_only=True)`` reads. Steps that float16 skips while it searches its loss scale (one above 1, or
    any of DeepSpeed's) are counted, but not as steps in a row. Modules that roll out add this callback themselves.

    A step whose gradient is far longer than those before it is taken, with a warning that names the likely cause and
    what helps: tokens whose staleness ratio has exploded are trained on for a while before the reward shows it. Under a
    compressed cache without weights or replay, the first ratio above ``max_staleness_ratio`` triggers a warning by
    itself, because a loss that bounds the ratio has no long steps. Such training without any correction triggers one at
    the start.

    Args:
        max_in_a_row: Number of steps skipped in a row after which the run stops.
        spike_factor: Multiple of the median norm of the last 50 steps from which a step is warned of, null for never.
        max_staleness_ratio: Staleness ratio above which a step without weights or replay is warned of, null for never.

    Raises:
        ValueError: If a number is below 1; in training, if that many steps in a row were skipped.
    """

    def __init__(
        self, max_in_a_row: int = 3, spike_factor: float | None = 20.0, max_staleness_ratio: float | None = 100.0
    ) -> None:
        check_number("max_in_a_row", max_in_a_row, least=1, owner="StepGuard")
        check_number("spike_factor", spike_factor, least=1, owner="StepGuard", or_none=True)
        check_number("max_staleness_ratio", max_staleness_ratio, least=1, owner="StepGuard", or_none=True)
        self.max_in_a_row = max_in_a_row
        self.watch = None if spike_factor is None else SpikeWatch(spike_factor)
        self.max_staleness_ratio = max_staleness_ratio
        self.has_warned_of_ratio = False
        self.skipped = 0  # since the start of the run
        self.in_a_row = 0
        self._skips_now = False
        self._norm: float | None = None
        self._worst: torch.Tensor | None = None  # of the step so far: ratio, and share beside it

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn of naive training."""
        naive = naive_warning(pl_module)
        if naive:
            warn_of_run(trainer, naive)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Remove bad gradients: an optimizer passes over weights without any."""
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            return  # DeepSpeed checks its own gradients, see on_train_batch_end
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in parameters]
        norms = _norms(gradients, 2.0)
        finite = _are_finite(norms) or _are_finite(_norms(gradients))  # squares may overflow where no element does
        self._skips_now = not trainer.strategy.reduce_boolean_decision(finite, all=True)
        sharded = any(isinstance(gradient, DTensor) for gradient in gradients)
        self._norm = None if self._skips_now else _length(trainer, norms, sharded) / _scale(trainer, optimizer)
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        if self._skips_now and not (scaled and getattr(optimizer, "_step_supports_amp_scaling", False)):
            for parameter in parameters:  # a fused optimizer in float16 looks and skips itself
                parameter.grad = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Count at the end of an optimizer step."""
        if self.watch is not None or self.max_staleness_ratio is not None:
            self._note_micro_batch(trainer)
        if trainer.fit_loop._should_accumulate():
            return
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            engine = trainer.strategy.deepspeed_engine
            self._skips_now = not engine.was_step_applied()
            self._norm = None if self._skips_now else engine.get_global_grad_norm()
        if not self._skips_now:
            self.in_a_row = 0
        elif not _seeks_scale(trainer):
            self.in_a_row += 1
        self.skipped += self._skips_now
        pl_module.log("skipped_steps", float(self.skipped))
        if self._norm is not None:
            key = getattr(pl_module, "grad_norm_key", "grad_norm")  # most modules have one kind of step
            pl_module.log(key, float(self._norm))
            if key == "grad_norm":  # an adapter's steps are of another size
                self._look_at_step(trainer, pl_module, float(self._norm))
        self._worst = None
        if self._skips_now:
            self._report_skip(trainer, pl_module)
        self._skips_now = False

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        watched = {} if self.watch is None else {"watch": self.watch.state()}
        counts = {"skipped": self.skipped, "in_a_row": self.in_a_row, "told_of_ratio": self.has_warned_of_ratio}
        return counts | watched

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the counts."""
        self.skipped, self.in_a_row = state_dict["skipped"], state_dict["in_a_row"]
        if self.watch is not None:
            self.watch = replace(self.watch, **state_dict.get("watch", {}))
        self.has_warned_of_ratio = state_dict.get("told_of_ratio", False)

    def _note_micro_batch(self, trainer: Trainer) -> None:
        """Keep what the micro-batch with the largest ratio logged, on its device until it is needed."""
        logged, device = trainer.callback_metrics, trainer.strategy.root_device
        nothing = torch.zeros((), device=device)  # created there: no copy in every micro-batch
        numbers = torch.stack([logged.get(name, nothing).to(device, torch.float32) for name in BEHIND])
        self._worst = (
            numbers if self._worst is None else torch.where(numbers[0] >= self._worst[0], numbers, self._worst)
        )

    def _look_at_step(self, trainer: Trainer, module: LightningModule, norm: float) -> None:
        times = None if self.watch is None else self.watch.see(norm)
        limit = math.inf if self.has_warned_of_ratio else self.max_staleness_ratio or math.inf
        is_watched = limit < math.inf and learns_from_less(module)
        if self._worst is None or (times is None and not is_watched):  # on all ranks alike
            return
        # ranks may differ in whether their rollouts have weights: that must not decide who gathers
        local = torch.cat([self._worst.nan_to_num(), self._worst.new_tensor([_can_correct(module)])])
        ranks = torch.as_tensor(trainer.strategy.all_gather(local)).view(-1, len(local))
        ratio, share, _ = ranks[ranks[:, 0].argmax()].tolist()
        can_correct = bool(ranks[:, 2].min())
        is_large = can_correct and ratio > limit
        self.has_warned_of_ratio |= is_large
        if times is not None:
            loss = getattr(module, "loss", None)  # any module may have the guard
            can_bound = isinstance(loss, GRPOLoss) and loss.delta is None and loss.loss_type != "cispo"
            warn_of_run(
                trainer,
                f"The gradient of optimizer step {trainer.global_step} is {times:,.0f} times as long as usual "
                f"({norm:.3g}). {long_step_advice(ratio, share, can_correct, can_bound)}",
            )
        elif is_large:
            warn_of_run(trainer, large_ratio_warning(trainer.global_step, ratio))

    def _report_skip(self, trainer: Trainer, module: LightningModule) -> None:
        message = f"The gradient of optimizer step {trainer.global_step} is not finite: the step is skipped"
        if self.in_a_row < self.max_in_a_row:
            warn_of_run(trainer, f"{message} ({self.in_a_row} in a row, {self.skipped} in all).")
            return
        folder = Path(trainer.default_root_dir) / "bad_steps"
        path = folder / f"step_{trainer.global_step:06d}_rank_{trainer.global_rank}.pt"
        block: Any = getattr(module, "block", None)
        window = {} if block is None else block.last_window().state()
        try:
            own_folder(folder)
            state = {"rollout": window, "step": trainer.global_step}
            write_files({path: lambda new: save_tensors(state, new)}, durable=True)
            kept = f"are in {path}"
        except OSError as error:
            kept = f"could not be written ({error})"
        raise UserError(
            f"{message}, as the {self.in_a_row - 1} before it. The sequences of this step {kept}. Lower the "
            "learning rate or gradient_clip_val, bound the weights (ImportanceReweighting.clip_max), or check the "
            "reward functions and the policy's weights; --ckpt_path=last goes back to the last checkpoint."
        )


def _can_correct(module: LightningModule) -> bool:
    """Whether training is naive, judged by the current rollout: its weights are what corrections leave."""
    block = getattr(module, "block", None)
    return learns_from_less(module) and isinstance(block, RolloutBlock) and block.rollout.weights is None


def _seeks_scale(trainer: Trainer) -> bool:
    """Whether half precision may have overflowed because of its loss scale, which is lowered until it does not."""
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        engine = trainer.strategy.deepspeed_engine
        return bool(engine.fp16_enabled() and engine.dynamic_loss_scale())  # DeepSpeed itself stops at the lowest
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler is not None and scaler.get_scale() > 1


def _scale(trainer: Trainer, optimizer: Any) -> float:
    """The factor of float16 on the gradient; a fused optimizer divides by it only inside its step."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler.get_scale() if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False) else 1.0


def _norms(gradients: list[torch.Tensor], order: float = torch.inf) -> list[torch.Tensor]:
    """One norm per gradient, float32 or wider, infinite or NaN if any element is."""
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    local = [gradient for gradient in local if gradient.numel()]  # a rank may have no element of a small weight
    dtype = reduce(torch.promote_types, (gradient.dtype for gradient in local), torch.float32)
    return list(torch._foreach_norm(local, order, dtype=dtype)) if local else []


def _are_finite(norms: list[torch.Tensor]) -> bool:
    return not norms or bool(torch.stack(norms).isfinite().all())


def _length(trainer: Trainer, norms: list[torch.Tensor], sharded: bool) -> float:
    """The Euclidean norm of all gradients together from the norm of each; of sharded ones every rank has a part."""
    squares = torch.stack(norms).square().sum() if norms else torch.tensor(0.0)
    if sharded:
        squares = torch.as_tensor(trainer.strategy.reduce(squares.to(trainer.strategy.root_device), reduce_op="sum"))
    return float(squares.sqrt())


MOVED = (
    "tokens that the policy before the rollout's first step found unlikely, and that steps on the same rollout have "
    "moved"
)
FEWER = "fewer optimizer steps per rollout (a larger accumulate_grad_batches, or a smaller num_iterations)"
CORRECTED = f"ImportanceReweighting with clip_max: 1.5, or {REPLAY} (no replay follows a retriever)"
LARGE_RATIO = 10.0
"""Staleness ratio from which tokens moved far are taken for the cause; naive training's long steps have more."""


@dataclass
class SpikeWatch:
    """Compares every gradient's norm with the median of the steps before it.

    Args:
        factor: Multiple of the median from which a step is a spike.
        window: Steps that the median is of, and after a warning the steps without another.
        least: Steps before anything is judged.
    """

    factor: float = 20.0
    window: int = 50
    least: int = 10
    norms: list[float] = field(default_factory=list)
    silent: int = 0  # steps until the next warning
    spikes: int = 0  # since the start of the run

    def see(self, norm: float) -> float | None:
        """Add a step's norm before clipping; returns its multiple of the usual one if that is to be warned of."""
        usual = median(self.norms) if len(self.norms) >= self.least else 0.0
        self.norms = [*self.norms, norm][-self.window :]
        self.silent = max(0, self.silent - 1)
        if not 0 < self.factor * usual < norm:
            return None
        self.spikes += 1
        if self.silent:
            return None
        self.silent = self.window
        return norm / usual

    def state(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint."""
        return {"norms": list(self.norms), "silent": self.silent, "spikes": self.spikes}


def long_step_advice(ratio: float, share: float, can_correct: bool, can_bound: bool) -> str:
    """What a long step is made of, judged by its worst micro-batch, and what helps.

    Args:
        ratio: Largest staleness ratio of the micro-batch's tokens, 0 if not known.
        share: Share of the policy term's derivative that ten of its tokens have.
        can_correct: Whether the sampler sees less than the whole cache, and no weights or replay account for it.
        can_bound: Whether ``loss.delta`` is open to be set; else the loss bounds the ratio already.
    """
    largest = f"Its largest staleness ratio is {ratio:.2g}" if ratio else ""
    if ratio < LARGE_RATIO or not (can_correct or can_bound):
        return (
            f"{largest}{'. ' if largest else ''}Look at rewards and completions of this rollout; a lower learning rate "
            "or gradient_clip_val keeps single steps short."
        )
    correct = f"{CORRECTED}; then " if can_correct else ""
    free, bound = (
        (" With a negative advantage nothing bounds them.", ", model.loss.delta: 2") if can_bound else ("", "")
    )
    return (
        f"{largest}, and ten tokens carry {share:.0%} of its micro-batch: {MOVED}.{free} What helps: "
        f"{correct}{FEWER}{bound}."
    )


def large_ratio_warning(step: int, ratio: float) -> str:
    """The warning of tokens whose staleness ratio has grown large under eviction without weights or replay.

    A loss that bounds the ratio keeps such a step short, so that its gradient shows nothing. Most runs of
    docs/results.md that passed 100 so ended behind dense training.
    """
    return (
        f"The largest staleness ratio of optimizer step {step} is {ratio:.2g}: {MOVED}. The step need not be a long "
        "one (with model.loss.delta it is not), but most runs that went so far ended behind dense training. What "
        f"helps: {CORRECTED}; else {FEWER}."
    )
