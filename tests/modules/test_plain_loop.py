"""The module trains as a plain loop does that is written out by hand, several optimizer steps per rollout included.

Differences between runs of the two are chance, then: `docs/results.md` compares arms of which single runs differ much.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import assert_same_sums
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.callbacks import ImportanceReweighting, RolloutCallback, SparsityAwareRejection
from sparse_rl_lightning.compressors import RKV
from sparse_rl_lightning.modules import SparseGRPO
from sparse_rl_lightning.records import Rollout, Rows
from tests.tiny_grpo import fit, likes_a, loaded, module, weights

STEPS, ROLLOUTS, GROUP = 4, 3, 4
THRESHOLD, CAP = 0.7, 1.5
OPTIONS: dict[str, Any] = {
    "steps_per_generation": STEPS,
    "compressor": RKV(budget=6, buffer=2, num_sinks=0, window=2),
    "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
}


class Prompts(RolloutCallback):
    """Keeps the rows of every rollout."""

    def __init__(self) -> None:
        self.rows: list[Rows] = []

    def on_rollout_start(self, trainer: Any, module: Any, rows: Rows) -> None:
        self.rows.append(rows)


def logprobs_of(policy: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Log-probs (B, T) of every token but the first, by transformers alone."""
    everything = policy(rollout.sequences).logits.log_softmax(dim=-1)[:, :-1]
    own = everything.gather(-1, rollout.sequences[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(own, (1, 0))


def plain_loop(grpo: SparseGRPO, rows: list[Rows], corrects: bool) -> list[float]:
    """Train on the library's samples with nothing else of the library; returns the largest ratio of every step."""
    policy, largest = grpo.policy, []
    optimizer = grpo.optimizer_factory(policy.parameters())
    for index, own in enumerate(rows):
        scored = grpo.generator.roll_out(own, index)
        rollout, mask = scored.rollout, scored.rollout.completion_mask
        rewards = torch.tensor(likes_a([], scored.completions)).view(-1, GROUP)
        deviations = rewards.std(dim=1, keepdim=True)
        advantages = ((rewards - rewards.mean(dim=1, keepdim=True)) / (deviations + 1e-6)).flatten()
        with torch.no_grad():
            old = logprobs_of(policy, rollout)
        xi = torch.where(mask, old - rollout.sampler_logprobs, 0.0).exp()
        keep, factor = mask, torch.ones_like(old)
        if corrects:
            lost = (torch.where(mask, xi, 1.0) < THRESHOLD).any(dim=1, keepdim=True)
            assert 0 < int(lost.sum()) < len(lost)
            keep, factor = mask & ~lost, xi.clamp(max=CAP)
        for part in grpo.plan(len(own)).order(index, grpo.generator.sampling.seed, old.device).chunk(STEPS):
            ratio = (logprobs_of(policy, rollout[part]) - old[part]).exp()
            one = torch.minimum(ratio * advantages[part, None], ratio.clamp(0.8, 1.2) * advantages[part, None])
            per_sequence = (one * factor[part] * keep[part]).sum(dim=1) / mask[part].sum(dim=1)
            optimizer.zero_grad()
            (-per_sequence.mean()).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            largest.append(float(ratio.detach().where(keep[part], 0.0).max()))
    return largest


@pytest.mark.parametrize("corrects", [False, True])
def test_weights_are_those_of_a_plain_loop(corrects: bool) -> None:
    prompts, callbacks = Prompts(), [SparsityAwareRejection(THRESHOLD), ImportanceReweighting(clip_max=CAP)]
    trained = module(**OPTIONS)
    used = [prompts, *(callbacks if corrects else [])]
    fit(trained, steps=STEPS * ROLLOUTS, callbacks=used, gradient_clip_val=1.0)
    other = loaded(**OPTIONS)
    before = weights(other).clone()
    largest = plain_loop(other, prompts.rows, corrects)
    assert len(prompts.rows) == ROLLOUTS
    assert [largest[0], max(largest) > 1.05] == [pytest.approx(1.0, abs=1e-5), True]  # later steps are off-policy
    assert_same_sums(weights(trained), weights(other), size=before, share=1e-3)
