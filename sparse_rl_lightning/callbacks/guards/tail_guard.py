"""TailGuard: reacts to signs of a collapse before the reward shows it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from sparse_rl_lightning.acceptance import tail_target
from sparse_rl_lightning.budgets import Budgeted
from sparse_rl_lightning.callbacks.base import RolloutCallback, RolloutModule, rollout_module, warn_of_run
from sparse_rl_lightning.callbacks.monitors.acceptance import AcceptanceMonitor, TailReport
from sparse_rl_lightning.errors import UserError, check_choice, check_number
from sparse_rl_lightning.files import writable_folder
from sparse_rl_lightning.metrics import rejection_rate
from sparse_rl_lightning.policies.sharding import of_all_ranks
from sparse_rl_lightning.records import Rows, ScoredRollout
from sparse_rl_lightning.rollout import Generator

Mode = Literal["off", "warn", "raise", "stop"]
SIGNS = ("tail", "rejection", "rise", "length")
HARMLESS = 0.05
"""Share of rejected sequences up to which no rise counts."""
ADVICE = {
    "rejection": "Raise the budget; reweight with a bound (ImportanceReweighting with clip_max: 1.5) in place of "
    "rejecting, by which nothing is learned from these sequences; or train under the sampler's evictions (ReplayGRPO).",
    "other": "Raise the budget, or train under the sampler's evictions (ReplayGRPO) if you do not.",
}


@dataclass(frozen=True)
class Limits:
    """The limits that define a sign; arguments as in TailGuard."""

    max_rejection_rate: float = 0.25
    length_drop: float = 0.4
    min_tokens: int = 200
    window: int = 10
    patience: int = 2
    rejection_rise: float = 3.0

    def __post_init__(self) -> None:
        for name in ("max_rejection_rate", "length_drop"):
            check_number(name, getattr(self, name), above=0, most=1, owner="TailGuard")
        for name in ("min_tokens", "window", "patience"):
            check_number(name, getattr(self, name), least=1, owner="TailGuard")
        check_number("rejection_rise", self.rejection_rise, least=1, owner="TailGuard")


@dataclass
class TailWatch:
    """Keeps as much of the rollouts as is necessary to distinguish a sign from noise."""

    limits: Limits
    lengths: list[float] = field(default_factory=list)  # of the newest rollouts, at most a window
    rejections: list[float] = field(default_factory=list)
    longest: float = 0.0  # mean length of the window in which responses were longest
    fewest: float = 1.0  # mean share of rejected sequences in the window in which it was least
    strikes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIGNS, 0))  # in a row

    @property
    def length_ratio(self) -> float | None:
        """The newest window's mean length over that of the longest window; None before there is a window."""
        is_full = len(self.lengths) == self.limits.window
        return fmean(self.lengths) / self.longest if is_full and self.longest else None

    def see(self, length: float, rejection_rate: float) -> None:
        """Add a rollout's mean response length and its share of rejected sequences."""
        self.lengths = [*self.lengths, length][-self.limits.window :]
        self.rejections = [*self.rejections, rejection_rate][-self.limits.window :]
        is_full = len(self.lengths) == self.limits.window
        if is_full:
            self.longest = max(self.longest, fmean(self.lengths))
            self.fewest = min(self.fewest, fmean(self.rejections))
        ratio = self.length_ratio
        self._strike("length", ratio is not None and ratio < 1 - self.limits.length_drop)
        rejected, limit = fmean(self.rejections), self.limits.max_rejection_rate
        self._strike("rejection", is_full and rejected > limit)
        risen = self.limits.rejection_rise * max(self.fewest, HARMLESS / self.limits.rejection_rise)
        self._strike("rise", is_full and risen < rejected <= limit)  # above the limit it is a sign by itself

    def see_tail(self, tail: Mapping[str, float], tokens: Mapping[str, int], target: float) -> tuple[str, float] | None:
        """Add the percentiles of a rollout by length bin; bins with too few tokens are not judged.

        Returns:
            The worst bin and its distance above the target (below: negative); None if no bin could be judged.
        """
        judged = {name: value - target for name, value in tail.items() if tokens[name] >= self.limits.min_tokens}
        if not judged:
            return None  # a strike is neither added nor removed
        worst = min(judged, key=lambda name: judged[name])
        self._strike("tail", judged[worst] < 0)
        return worst, judged[worst]

    @property
    def alarms(self) -> list[str]:
        """The signs that have persisted: ``tail``, ``rejection``, ``rise``, ``length``."""
        return [name for name, count in self.strikes.items() if count >= self.limits.patience]

    def start_over(self) -> None:
        """Restart after a reaction: of old observations only the longest responses and the fewest rejections count."""
        self.lengths, self.rejections = [], []
        self.strikes = dict.fromkeys(self.strikes, 0)

    def state(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint."""
        return {name: value for name, value in asdict(self).items() if name != "limits"}

    def _strike(self, sign: str, is_seen: bool) -> None:
        self.strikes[sign] = self.strikes.get(sign, 0) + 1 if is_seen else 0  # an older checkpoint may not know it


class TailGuard(RolloutCallback):
    """Watch the acceptance's tail, the rejection rate and the response length, and warn, raise the budget, or stop.

    A collapse under sparse rollouts shows first in the 5th percentile of the acceptance, then in shrinking responses,
    last in reward (Sparrow, arXiv 2606.08446). There are three signs. A length bin's 5th percentile is below the
    target, as ``AcceptanceMonitor`` measures it. The mean rejection rate is above its limit, or rising.
    Responses have become shorter on average. The reaction to a sign that persists is the ``mode``:

    - ``warn``: warn once, until the sign is gone.
    - ``raise``: enlarge the budget of the compressor, of the retriever (in whole pages) or of both by a step of its
      schedule (a single budget by a quarter), for the next rollout; slots and their memory are planned again. A resumed
      run keeps the enlarged budget, at most ``max_raises`` steps of it.
    - ``stop``: end the run after the optimizer step that is due, with a checkpoint ``tail_guard_{rollout}.ckpt``.

    Logged: ``guard/tail_margin`` (the worst bin's distance above the target), ``guard/rejection_rate`` (over the
    window), ``guard/length_ratio`` (to the longest window so far), ``guard/budget`` (of the
    compressor, or of the retriever without eviction) and ``guard/raises``.

    Args:
        mode: Reaction, ``off``, ``warn``, ``raise`` or ``stop``.
        target: 5th percentile to keep, null for 0.86 x the run's own ceiling / 0.945.
        max_rejection_rate: Limit on the share of rejected sequences, as a mean over the window.
        length_drop: Share by which the mean response of a window may be shorter than in the longest window.
        min_tokens: Number of tokens below which a length bin is not judged.
        window: Number of rollouts over which rejection rate and length are averaged.
        patience: Number of observations in a row that make a sign; for the tail those of ``AcceptanceMonitor``.
        max_raises: Limit on the steps by which the budget is raised.
        rejection_rise: Multiple of the least share of rejected sequences so far that is a rise, from 5 % to the limit.
        folder: Folder of the checkpoint, default that of ``ModelCheckpoint``.

    Raises:
        ValueError: If an argument is out of range; at the start of ``fit``, if ``AcceptanceMonitor`` is missing or
            measures no ceiling without a target, or the budget cannot be raised.
    """

    def __init__(
        self,
        mode: Mode | bool = "warn",
        target: float | None = None,
        max_rejection_rate: float = 0.25,
        length_drop: float = 0.4,
        min_tokens: int = 200,
        window: int = 10,
        patience: int = 2,
        max_raises: int = 4,
        rejection_rise: float = 3.0,
        folder: str | Path | None = None,
    ) -> None:
        mode = "off" if mode is False else mode  # YAML reads the word off as false
        check_choice("mode", mode, Mode, "TailGuard")
        check_number("target", target, least=0, most=1, owner="TailGuard", or_none=True)
        check_number("max_raises", max_raises, least=0, owner="TailGuard")
        self.mode = mode
        self.target = target
        self.max_raises = max_raises
        self.folder = folder
        self.watch = TailWatch(Limits(max_rejection_rate, length_drop, min_tokens, window, patience, rejection_rise))
        self.num_raises = 0
        self._in_use = 0  # raises in effect when the rollout in training was drawn
        self._monitor: AcceptanceMonitor | None = None
        self._scored: tuple[int, float, float] | None = None  # a rollout's number, length and rejection rate
        self._judged: str = ""  # description of the worst bin
        self._warned_signs: list[str] = []  # signs that have been warned of
        self._stop = False

    # ---------------------------------------------------------------- before training

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse settings that cannot be watched or acted on."""
        if stage != "fit" or self.mode == "off":
            return
        monitors = [c for c in trainer.callbacks if isinstance(c, AcceptanceMonitor)]  # type: ignore[attr-defined]  # Lightning sets it where no type says so
        if not monitors:
            raise UserError("TailGuard reads what AcceptanceMonitor measures: add it to trainer.callbacks.")
        self._monitor = monitors[0]
        if self.target is None and not self._monitor.ceiling_prompts:
            raise UserError(
                "TailGuard: without a ceiling (AcceptanceMonitor.ceiling_prompts=0) there is no target. Give "
                "TailGuard.target, or let the ceiling be measured."
            )
        if self.mode == "raise":
            self._check_raisable(rollout_module(pl_module, self).generator)
        if self.mode == "stop" and trainer.is_global_zero:
            if "://" not in self._folder(trainer):
                writable_folder(self._folder(trainer), "TailGuard: folder")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give a resumed run the budget under which its current rollout was drawn."""
        self._stop, generator = False, rollout_module(pl_module, self).generator
        if (self.num_raises or self.mode == "raise") and _limited(generator):
            _raise(generator, self._in_use)
            budget = _budget(generator, self.num_raises)
            rank_zero_info(f"TailGuard: the budget is {budget} tokens, raised {self.num_raises} times so far.")

    def _check_raisable(self, generator: Generator) -> None:
        if not _limited(generator):
            raise UserError(
                f"TailGuard: mode='raise' needs a compressor that evicts or a retriever, {generator.compressor} keeps "
                "and reads everything. Use mode='warn' or 'stop'."
            )
        if generator.partial is not None:
            raise UserError(
                "TailGuard: mode='raise' does not work with partial rollouts, whose unfinished sequences stay in slots "
                "of the old size. Use mode='warn' or 'stop', or set model.rollout.partial_rollout_steps to null."
            )

    # ---------------------------------------------------------------- observation

    def on_rollout_start(self, trainer: Trainer, module: RolloutModule, rows: Rows) -> None:
        """Set the budget that was decided on: the rollout before may have been replayed until now."""
        if self.num_raises != self._in_use and _limited(module.generator):
            self._in_use = self.num_raises
            _raise(module.generator, self._in_use)

    def on_rollout_scored(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """Record length and rejection rate; the monitor may come after this callback, so nothing is judged yet."""
        if self.mode == "off":
            return
        rollout = scored.rollout
        mask = rollout.completion_mask
        rejected = 0.0 if rollout.keep is None else float(rejection_rate(rollout.keep, mask))
        numbers = torch.tensor([float(rollout.completion_lengths.float().mean()), rejected], device=mask.device)
        length, rejected = trainer.strategy.reduce(numbers, reduce_op="mean").tolist()  # the same judgment on all ranks
        self._scored = (scored.index, length, rejected)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Judge a new rollout after its first micro-batch; stop if an optimizer step is complete."""
        module = rollout_module(pl_module, self)
        if self._scored is not None:
            (index, length, rejected), self._scored = self._scored, None
            self._judge(module, index, length, rejected)
        if self._stop and module.block is not None and not module.block.cursor % trainer.accumulate_grad_batches:
            self._end(trainer, module)

    def _judge(self, module: RolloutModule, index: int, length: float, rejected: float) -> None:
        self.watch.see(length, rejected)
        logged = {"guard/rejection_rate": fmean(self.watch.rejections)}
        if self.watch.length_ratio is not None:
            logged["guard/length_ratio"] = self.watch.length_ratio
        assert self._monitor is not None
        reports = [report for report in of_all_ranks(self._monitor.report) if report is not None]
        report = TailReport.mean(reports) if reports else None  # all ranks judge alike
        target = self.target
        if target is None and report is not None and report.ceiling is not None:
            target = tail_target(report.ceiling)
        if report is not None and report.index == index and target is not None:
            worst = self.watch.see_tail(report.tail, report.tokens, target)
            if worst is not None:
                logged["guard/tail_margin"] = worst[1]
                self._judged = f"is {worst[1] + target:.3f} at {worst[0]} tokens, the target is {target:.3f}"
        self._act(module, index)
        logged["guard/budget"] = float(_budget(module.generator, self.num_raises))
        logged["guard/raises"] = float(self.num_raises)
        module.log_dict(logged, batch_size=1)

    # ---------------------------------------------------------------- reaction

    def _act(self, module: RolloutModule, index: int) -> None:
        alarms = self.watch.alarms
        self._warned_signs = [sign for sign in self._warned_signs if self.watch.strikes[sign]]
        if not alarms:
            return
        if self.mode == "raise" and self.num_raises < self.max_raises:
            why, before = self._describe(alarms), _budget(module.generator, self.num_raises)
            self.num_raises += 1
            self.watch.start_over()
            after = _budget(module.generator, self.num_raises)
            warn_of_run(
                module.trainer,
                f"TailGuard: {why} The budget grows from {before} to {after} tokens per layer and head, step "
                f"{self.num_raises} of {self.max_raises}.",
            )
        elif self.mode == "stop":
            self._stop = True
            warn_of_run(module.trainer, f"TailGuard: {self._describe(alarms)} The run is stopped at rollout {index}.")
        elif new := [sign for sign in alarms if sign not in self._warned_signs]:
            self._warned_signs += new
            done = f" The budget was raised {self.num_raises} times already." if self.mode == "raise" else ""
            advice = ADVICE["rejection"] if {"rise", "rejection"} & set(new) else ADVICE["other"]
            warn_of_run(module.trainer, f"TailGuard: {self._describe(new)}{done} {advice}")

    def _describe(self, alarms: list[str]) -> str:
        watch, limits = self.watch, self.watch.limits
        rejected = fmean(watch.rejections)
        words = {
            "tail": f"The 5th percentile of the acceptance {self._judged}.",
            "rejection": f"{rejected:.1%} of the sequences of {limits.window} rollouts were rejected, more than "
            f"{limits.max_rejection_rate:.1%}.",
            "rise": f"{rejected:.1%} of the sequences of {limits.window} rollouts were rejected, {watch.fewest:.1%} at "
            "the best: what is rejected teaches nothing, not even to avoid it.",
            "length": f"Responses have shrunk to {watch.length_ratio or 0:.0%} of their mean length of "
            f"{watch.longest:.1f} tokens.",
        }
        return " ".join(words[sign] for sign in alarms)

    def _end(self, trainer: Trainer, module: RolloutModule) -> None:
        self._stop = False
        path = os.path.join(self._folder(trainer), f"tail_guard_{module.num_rollouts - 1:05d}.ckpt")
        self.watch.start_over()  # a user who resumes from it has changed something
        trainer.save_checkpoint(path, weights_only=False)
        trainer.should_stop = True
        rank_zero_info(f"TailGuard: stopped; resume from {path}.")

    def _folder(self, trainer: Trainer) -> str:
        dirpath = getattr(trainer.checkpoint_callback, "dirpath", None)
        return os.path.expanduser(self.folder or dirpath or os.path.join(trainer.default_root_dir, "checkpoints"))

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The observations, and by how much the budget was raised."""
        return {
            "watch": self.watch.state(), "num_raises": self.num_raises, "in_use": self._in_use,
            "told": list(self._warned_signs), "judged": self._judged,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both; the budget itself when training starts."""
        self.watch = TailWatch(self.watch.limits, **state_dict["watch"])
        self.num_raises = min(state_dict["num_raises"], self.max_raises)  # lower it if no slot fits any more
        self._in_use = min(state_dict["in_use"], self.num_raises)
        self._warned_signs, self._judged = list(state_dict["told"]), state_dict["judged"]


def _limited(generator: Generator) -> list[Budgeted]:
    """The parts of the sampler that have a budget: its compressor, its retriever, or both."""
    parts: list[Budgeted | None] = [generator.compressor, generator.retriever]
    return [budgeted for budgeted in parts if budgeted is not None and budgeted.is_limited]


def _raise(generator: Generator, steps: int) -> None:
    for budgeted in _limited(generator):
        budgeted.raise_budget(steps)


def _budget(generator: Generator, steps: int) -> int:
    """The budget in tokens ``steps`` steps up, kept or (without eviction) read; unchanged if nothing has a budget."""
    limited = _limited(generator)
    return limited[0].raised(steps).maximum if limited else int(generator.compressor.budget)
