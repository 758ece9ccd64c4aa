"""EmptyRollouts: warnings if nothing, or little, is left to learn from."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from sparse_rl_lightning.callbacks.base import RolloutCallback, RolloutModule, warn_of_run
from sparse_rl_lightning.errors import check_number
from sparse_rl_lightning.records import ScoredRollout

REJECTED = (
    "Rejection takes the others: the compressed cache's policy is too far from the dense one. Stop and raise the "
    "compressor's budget, choose another compressor, or train with ReplayGRPO."
)
CUT_OFF = (
    "The others are of completions that were cut off, which mask_truncated_completions leaves out: raise "
    "max_completion_length, or name the tokens or strings that end an answer (end_tokens, stop_strings)."
)
ALIKE = (
    "The samples of every prompt had one reward in each of the last {count} rollouts, {reward:.3g} on average in the "
    "last one, so there is no policy gradient. Look at the completions: where the reward is at its lowest, the task is "
    "too hard, an answer is cut off, or the reward does not find it; at its highest, the task is learned. Other "
    "prompts, more num_generations or a higher temperature bring differences."
)
CUT_SHARE = 0.9
"""Share of the completions that were cut off, from which answers hardly ever end."""
ENDLESS = (
    "In each of the last {count} rollouts at least 90% of the completions were cut off at {length} tokens, {share:.0%} "
    "in the last one: what the reward looks for may come later. Raise max_completion_length, or name the tokens or "
    "strings that end an answer (end_tokens, stop_strings)."
)
UNREWARDED = (
    "The others got no reward: the reward functions returned None for them or failed. Look at "
    "rewards/{function}/failed and at the columns that the functions read."
)


class EmptyRollouts(RolloutCallback):
    """Count rollouts without a token for the loss, on any rank, and warn with advice if little or nothing is learned.

    Tokens are removed by rejection, if a completion got no reward, and with ``mask_truncated_completions`` if one was
    cut off. A policy that learns from the few remaining samples can forget what it knew in a few steps. Steps on no
    tokens have a policy loss of zero, so only momentum, weight decay and the KL penalty move the weights. The count so
    far is logged as ``empty_rollouts``. Where a prompt's samples all have one reward there is no advantage, and no
    policy gradient; where nine in ten completions are cut off, rewards may see no answers. Modules that roll out add
    this callback themselves.

    Args:
        warn_after: Number of rollouts in a row that are empty, have few tokens, equal rewards, or completions that are
            cut off, after which to warn, once per streak.
        few: Share of the completion tokens below which they are few.

    Raises:
        ValueError: If the number is below 1, or the share not between 0 and 1.
    """

    def __init__(self, warn_after: int = 3, few: float = 0.5) -> None:
        check_number("warn_after", warn_after, least=1, owner="EmptyRollouts")
        check_number("few", few, least=0, most=1, owner="EmptyRollouts")
        self.warn_after, self.few = warn_after, few
        self.count = self.in_a_row = self.few_in_a_row = self.alike_in_a_row = self.cut_in_a_row = 0

    def on_rollout_scored(self, trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> None:
        """Count, and warn."""
        whole, finished, rewarded, kept, differing, total, judged, cut, drawn = _numbers(trainer, module, scored)
        goes_on = {
            "in_a_row": kept == 0,
            "few_in_a_row": 0 < kept < self.few * whole,
            "alike_in_a_row": judged and not differing,
            # where the loss leaves out what was cut off, CUT_OFF warns of it
            "cut_in_a_row": cut >= CUT_SHARE * drawn and not module.loss.mask_truncated_completions,
        }
        for name, is_so in goes_on.items():
            setattr(self, name, getattr(self, name) + 1 if is_so else 0)
        self.count += kept == 0
        if self.alike_in_a_row == self.warn_after:
            warn_of_run(trainer, ALIKE.format(count=self.warn_after, reward=total / judged))
        if self.cut_in_a_row == self.warn_after:
            length = module.generator.sampling.max_completion_length
            warn_of_run(trainer, ENDLESS.format(share=cut / drawn, length=length, count=self.warn_after))
        empty = self.in_a_row == self.warn_after
        if empty or self.few_in_a_row == self.warn_after:
            seen = "no token" if empty else f"less than {self.few:.0%} of the tokens"
            gone = {CUT_OFF: whole - finished, UNREWARDED: finished - rewarded, REJECTED: rewarded - kept}
            warn_of_run(
                trainer,
                f"The loss saw {seen} of each of the last {self.warn_after} rollouts, and what is left can ruin the "
                f"policy. {max(gone, key=gone.__getitem__)}",
            )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log with every batch, so that a run resumed in the middle of a rollout has the count too."""
        pl_module.log("empty_rollouts", float(self.count), batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        names = ("count", "in_a_row", "few_in_a_row", "alike_in_a_row", "cut_in_a_row")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the counts."""
        for name in self.state_dict():
            setattr(self, name, state_dict.get(name, 0))  # the last ones are missing in older checkpoints


def _numbers(trainer: Trainer, module: RolloutModule, scored: ScoredRollout) -> list[float]:
    """Numbers of all ranks: of tokens, of prompts whose rewards differ, of rewards, and of completions.

    Tokens are those of completions, those that count, those with a reward, and those not rejected. Of rewards there are
    sum and number, of completions those that were cut off, and all.
    """
    rollout = scored.rollout
    mask = module.loss.mask(rollout)
    rewards = torch.full((len(mask),), torch.nan) if rollout.rewards is None else rollout.rewards.float()
    is_judged = ~rewards.isnan()
    rewarded = mask if rollout.rewards is None else mask & is_judged[:, None]
    kept = rewarded if rollout.keep is None or module.learns_from_rejected else rewarded & rollout.keep
    tokens = [counted.sum() for counted in (rollout.completion_mask, mask, rewarded, kept)]
    groups = rewards.view(len(scored.rows), -1)
    differing = groups.nan_to_num(nan=-torch.inf).amax(dim=1) > groups.nan_to_num(nan=torch.inf).amin(dim=1)
    cut = ~rollout.finished
    numbers = [*tokens, differing.sum(), rewards.nansum(), is_judged.sum(), cut.sum(), torch.ones_like(cut).sum()]
    counts = torch.stack([number.to(mask.device).float() for number in numbers])
    if trainer.world_size > 1:
        counts = torch.as_tensor(trainer.strategy.reduce(counts, reduce_op="sum"))
    totals: list[float] = counts.tolist()
    return totals
