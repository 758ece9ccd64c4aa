"""SamplerSupport: the learner's probabilities among what the sampler could draw, against whole softmaxes by hand."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_grpo import Recorder, fit, loaded, module, weights
from torch import Tensor

from sparse_rl_lightning.callbacks import TIS, RolloutCallback, SamplerSupport, ScoreCentering
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.modules import ReplayGRPO
from sparse_rl_lightning.ops.draw import truncate

RULES: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.3},
    {"top_k": 9, "top_p": 0.8, "temperature": 1.3},
]


class Keeps(RolloutCallback):
    """Keeps the rollout and what the learner says of it, with the weights that drew it."""

    def on_rollout_scored(self, trainer: Any, module: Any, scored: Any) -> None:
        rollout = scored.rollout
        assert rollout.topk_ids is not None
        self.rollout, self.logprobs = rollout, rollout.old_logprobs.clone()
        self.dense = module.learner.dense(module.policy, rollout)[0].detach()
        self.expected = by_hand(module, rollout).detach()

    def needs_rescoring(self, module: Any) -> bool:
        return True


def by_hand(module: Any, rollout: Any) -> Tensor:
    """Log-probs (B, T) of whole rows of the dense policy, of which only the sampler's recorded tokens count."""
    values = torch.zeros(rollout.completion_mask.shape)
    for row in range(len(rollout)):
        logits = module.policy(rollout.sequences[row, None, : int(rollout.lengths[row])]).logits[0]
        for at in rollout.completion_mask[row].nonzero().flatten().tolist():
            logprobs = (logits[at - 1] / module.generator.sampling.temperature).log_softmax(-1)
            left = rollout.topk_ids[row, at, : int(rollout.support[row, at])].long()
            token = rollout.sequences[row, at]
            assert token in left
            values[row, at] = logprobs[token] - logprobs[left].logsumexp(0)
    return values


@pytest.mark.parametrize("rule", RULES)
def test_log_probs_are_those_of_the_part_that_could_be_drawn(rule: dict[str, Any]) -> None:
    keeps = Keeps()
    trainer = fit(module(**rule), 1, [SamplerSupport(), keeps, TIS()])
    torch.testing.assert_close(keeps.dense, keeps.expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(keeps.logprobs, keeps.expected, rtol=0, atol=2e-5)
    assert trainer.callback_metrics["support/cut"] == 0
    assert 1 <= trainer.callback_metrics["support/mean"] < 18


@pytest.mark.parametrize("rule", RULES)
def test_the_recorded_part_is_what_the_rules_leave_of_the_sampler(rule: dict[str, Any]) -> None:
    keeps = Keeps()
    fit(module(compressor=FullKV(), **rule), 1, [SamplerSupport(), keeps])
    rollout, mask = keeps.rollout, keeps.rollout.completion_mask
    whole = rollout.topk_logprobs[mask]  # of all 18 tokens
    rules = {name: value for name, value in rule.items() if name != "temperature"}
    left = (truncate(whole.double(), **rules) > -torch.inf).sum(dim=-1)
    assert torch.equal(left.int(), rollout.support[mask])


@pytest.mark.parametrize("rule", RULES)
def test_the_ratio_is_one_where_the_sampler_is_the_learner(rule: dict[str, Any]) -> None:
    """With the full cache, and under replay of the sampler's evictions."""
    for options in ({"compressor": FullKV()}, {"kind": ReplayGRPO}):
        keeps = Keeps()
        fit(module(**options, **rule), 1, [SamplerSupport(), keeps])
        torch.testing.assert_close(keeps.logprobs, keeps.rollout.sampler_logprobs, rtol=0, atol=2e-5)
        assert keeps.rollout.behavior_logprobs is None


def test_without_it_the_ratio_is_of_whole_distributions_and_that_is_said() -> None:
    seen = Recorder()
    with pytest.warns(UserWarning, match="compares whole distributions"):
        fit(module(compressor=FullKV(), top_k=5), 1, [seen, TIS()])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*compares whole distributions")
        fit(module(compressor=FullKV(), top_k=5), 1, [SamplerSupport(), TIS()])


def test_of_more_than_are_known_both_sides_count_the_same() -> None:
    """Of nine tokens that can be drawn three are reported: the ratio is still 1 where the sampler is the learner."""
    seen = Recorder()
    trainer = fit(module(compressor=FullKV(), top_k=9), 1, [SamplerSupport(top=3), seen])
    assert trainer.callback_metrics["support/cut"] == 1
    rollout = seen.scored[0].rollout
    assert (rollout.old_logprobs[rollout.completion_mask] <= 1e-6).all()
    torch.testing.assert_close(rollout.old_logprobs, rollout.sampler_logprobs, rtol=0, atol=2e-5)


class Fails(RolloutCallback):
    def on_rollout_scored(self, trainer: Any, module: Any, scored: Any) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("callback", [SamplerSupport, ScoreCentering])
def test_an_interrupted_fit_gives_the_learner_back(callback: Any) -> None:
    grpo = module(**{"top_p": 0.9} if callback is SamplerSupport else {})
    learner, loss = grpo.learner, grpo.loss
    with pytest.raises(SystemExit):
        fit(grpo, 1, [callback(), Fails()])
    assert grpo.learner is learner
    assert grpo.loss is loss
    assert grpo.generator.top == {}


@pytest.mark.parametrize("now", [[], [SamplerSupport()]])
def test_it_comes_and_goes_between_two_rollouts_only(now: list[Any], tmp_path: Path) -> None:
    was = [] if now else [SamplerSupport()]
    options = {"top_p": 0.8, "steps_per_generation": 2}
    fit(module(**options), 1, was).save_checkpoint(tmp_path / "within.ckpt")
    with pytest.raises(ValueError, match=r"from within a rollout, and the rest would mix .*trainer\.candidates was"):
        fit(module(**options), 2, now, ckpt_path=tmp_path / "within.ckpt")
    fit(module(**options), 2, was).save_checkpoint(tmp_path / "between.ckpt")
    fit(module(**options), 3, now, ckpt_path=tmp_path / "between.ckpt")


def test_two_of_them_are_refused() -> None:
    with pytest.raises(ValueError, match="two of SamplerSupport"):
        fit(module(top_p=0.9), 1, [SamplerSupport(), SamplerSupport(9)])


@pytest.mark.parametrize(
    "options",
    [{"beta": 0.1}, {"partial_rollout_steps": 6, "num_slots": 8}, {"share_prompts": True}, {"micro_batch_tokens": 60}],
)
def test_it_goes_with_the_rest(options: dict[str, Any]) -> None:
    grpo = module(top_p=0.7, **options)
    learner = grpo.learner
    fit(grpo, 2, [SamplerSupport(), TIS()])
    assert weights(grpo).isfinite().all()
    assert grpo.learner is learner
    assert grpo.generator.top == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "truncates nothing"),
        ({"top_p": 0.9, "repetition_penalty": 1.2}, "repetition_penalty or min_completion_length"),
        ({"top_p": 0.9, "min_completion_length": 2}, "repetition_penalty or min_completion_length"),
    ],
)
def test_what_it_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"SamplerSupport: .*{message}"):
        fit(loaded(**options), 1, [SamplerSupport()])


def test_a_rollout_without_most_likely_tokens_reports_no_support() -> None:
    seen = Recorder()
    fit(module(top_p=0.9), 1, [seen])
    assert seen.scored[0].rollout.support is None
