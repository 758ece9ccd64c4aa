"""Losses and advantages of one's own: by a configuration, in every module, on a resume, and worked by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_grpo import fit, loaded, module, weights
from torch import Tensor

from examples.objectives import DPPO, RLOO, SAPO, ReinforcePlusPlus
from sparse_rl_lightning.advantages import AdvantageEstimator
from sparse_rl_lightning.callbacks.base import corrections_of
from sparse_rl_lightning.callbacks.corrections.naive import naive_warning
from sparse_rl_lightning.cli.plan import _Configured
from sparse_rl_lightning.learner.loss import Denominators, GRPOLoss, Loss
from sparse_rl_lightning.losses import policy_loss
from sparse_rl_lightning.modules import DistillSparse, ReplayGRPO
from sparse_rl_lightning.records import LossOutput, Rollout

NAN = math.nan


def part_of(logprobs: Tensor, old: Tensor, sampler: Tensor, advantages: list[float], **fields: Any) -> Rollout:
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    count = len(logprobs)
    return Rollout(
        sequences=mask.long(), prompt_lengths=torch.zeros(count, dtype=torch.long), completion_mask=mask,
        finished=mask.any(dim=1), sampler_logprobs=sampler, old_logprobs=old, advantages=torch.tensor(advantages),
        **{"keep": mask.clone(), **fields},
    )  # fmt: skip


class Reinforce(Loss):
    """Minus advantage x log-probability."""

    def __call__(self, part: Rollout, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        assert part.advantages is not None
        return self.token_mean(-part.advantages[:, None] * logprobs, part, denominators)


# ---------------------------------------------------------------- worked by hand


def test_dppo_by_hand() -> None:
    """Probabilities 0.5, 0.5, 0.1 of a sampler become 0.6, 0.9, 0.5 and, in a bad sample, 0.4, 0.1, 0.8."""
    now = torch.tensor([[0.6, 0.9, 0.5], [0.4, 0.1, 0.8]]).log().requires_grad_()
    sampler = torch.tensor([[0.5, 0.5, 0.1]] * 2).log()
    part = part_of(now, sampler, sampler, [2.0, -1.0])
    for two_sided, terms in ((False, [-2.4, 0, 0, 0.8, 0, 8]), (True, [-2.4, 0, 0, 0.8, 0, 0])):
        loss = DPPO(0.2, two_sided)
        output = loss(part, now, loss.denominators(part))
        assert output.loss.item() == pytest.approx(sum(terms) / 6, rel=1e-5)
        gradient = torch.autograd.grad(output.loss, now)[0].flatten()  # d exp(x) = exp(x)
        assert gradient.tolist() == pytest.approx([term / 6 for term in terms], rel=1e-5)
        assert output.metrics["dppo/left_out"].item() == pytest.approx(terms.count(0) / 6)


def test_sapo_by_hand() -> None:
    """At ratio 1 the gradient is the advantage's, whatever the temperature; at 3 a good token's is 4 s (1 - s) x 3."""
    old = torch.full((2, 2), 0.1).log()
    now = torch.tensor([[0.1, 0.3], [0.1, 0.3]]).log().requires_grad_()
    loss, part = SAPO(), part_of(now, old, old, [1.0, -1.0])
    gradient = torch.autograd.grad(loss(part, now, loss.denominators(part)).loss, now)[0] * 4
    good, bad = (4 * 3 * (s := 1 / (1 + math.exp(-2 * t))) * (1 - s) for t in (1.0, 1.05))
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, -good], [1.0, bad]]), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("estimator", "rewards", "expected"),
    [
        (RLOO(), [1.0, 0, 0, 2, 4, 6], [1, -0.5, -0.5, -3, 0, 3]),
        (RLOO(), [1.0, NAN, 0, NAN, NAN, 5], [1, 0, -1, 0, 0, 0]),
        (ReinforcePlusPlus(), [1.0, -1, 0, 0, 4, -4], [x / math.sqrt(34 / 5) for x in (1, -1, 0, 0, 4, -4)]),
        (ReinforcePlusPlus(), [1.0, -1, NAN, 3, NAN, NAN], [x / math.sqrt(2 / 2) for x in (1, -1, 0, 0, 0, 0)]),
    ],
)
def test_advantages_by_hand(estimator: AdvantageEstimator, rewards: list[float], expected: list[float]) -> None:
    advantages = estimator(torch.tensor(rewards), 3)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float32))


def test_a_token_mean_is_dapo() -> None:
    """With weights, rejected tokens, and in two micro-batches of one step."""
    dice = torch.Generator().manual_seed(0)
    now, old = -torch.rand(2, 4, 5, generator=dice)
    keep = torch.rand(4, 5, generator=dice) > 0.3
    part = part_of(now, old, old, [1.0, -1.0, 2.0, 0.5], keep=keep, weights=torch.rand(4, 5, generator=dice))

    class Ratio(Loss):
        def __call__(self, part: Rollout, logprobs: Tensor, denominators: Denominators) -> LossOutput:
            assert part.advantages is not None
            terms = -(logprobs - part.old_logprobs).exp() * part.advantages[:, None]
            return self.token_mean(terms, part, denominators)

    loss = Ratio()
    steps = loss.denominators(part)
    halves = [loss(part[rows], now[rows], steps).loss for rows in (slice(0, 2), slice(2, 4))]
    whole = policy_loss(
        now, old, part.advantages, part.completion_mask, keep=keep, weights=part.weights, loss_type="dapo", epsilon=1.0,
        epsilon_high=100.0,
    ).loss  # fmt: skip
    torch.testing.assert_close(sum(halves), whole)


class PerSequence(Loss):
    """Divides by the number of sequences, and has no other divisor, or one by sums of each micro-batch."""

    def __init__(self, counts: bool) -> None:
        self.counts = counts

    def denominators(self, window: Rollout, max_completion_length: int | None = None) -> Denominators:
        return Denominators(sequences=torch.tensor(len(window)) if self.counts else None)

    def __call__(self, part: Rollout, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        assert part.advantages is not None
        count = denominators.sequences if denominators.sequences is not None else len(part)
        return LossOutput(-(part.advantages[:, None] * logprobs * part.completion_mask).sum() / count, {})


def test_a_step_is_as_long_whatever_it_is_divided_by() -> None:
    """Shares of a step add up, and micro-batches without any divisor are averaged: by equal numbers the same."""
    ends = []
    for counts, parts in ((True, 1), (True, 4), (False, 4)):
        grpo = module(loss=PerSequence(counts), steps_per_generation=parts, lr=0.1)
        fit(grpo, 1, accumulate_grad_batches=parts)
        ends.append(weights(grpo))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(ends[2], ends[0], rtol=0, atol=1e-6)


# ---------------------------------------------------------------- in a run


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"loss": Reinforce()}, True),
        ({"loss": DPPO()}, True),
        ({"loss": SAPO()}, True),
        ({"advantage_estimator": RLOO()}, True),
        ({"loss": GRPOLoss(), "advantage_estimator": None}, False),
    ],
)
def test_a_run_trains_by_it(options: dict[str, Any], changes: bool) -> None:
    usual, mine = module(), module(**options)
    for grpo in (usual, mine):
        fit(grpo, 2)
    assert torch.equal(weights(usual), weights(mine)) != changes
    assert weights(mine).isfinite().all()


@pytest.mark.parametrize(("kind", "options"), [(ReplayGRPO, {"replay_objective": "mixed"}), (DistillSparse, {})])
def test_modules_that_replace_terms_refuse_a_loss_that_does_not_say_how(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"model\.loss: Reinforce does not say .* Override second_term"):
        module(kind=kind, loss=Reinforce(), **options)

    class Says(Reinforce):
        def second_term(self, beta: float = 0.0) -> Loss:
            return self

    fit(module(kind=kind, loss=Says(), **options), 1)


def test_replay_of_everything_takes_any_loss() -> None:
    fit(module(kind=ReplayGRPO, loss=Reinforce()), 1)


def test_a_loss_that_corrects_is_believed() -> None:
    grpo = loaded(loss=DPPO())
    assert corrections_of(grpo) == ["DPPO"]
    assert naive_warning(grpo) == ""
    other = loaded(loss=SAPO())
    assert corrections_of(other) == []
    assert "naive training" in naive_warning(other)


def test_scale_rewards_beside_an_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="scale_rewards='none' has no effect beside advantage_estimator, which is RL"):
        module(advantage_estimator=RLOO(), scale_rewards="none")


class Flat(AdvantageEstimator):
    def estimate(self, rewards: Tensor) -> Tensor:
        return rewards.flatten()


class Divides(AdvantageEstimator):
    def estimate(self, rewards: Tensor) -> Tensor:
        return rewards / 0


class Scalar(Reinforce):
    def __call__(self, part: Rollout, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        return super().__call__(part, logprobs, denominators).loss  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage_estimator": Flat()}, r"Flat\.estimate must return finite advantages \(2, 4\).*got \(8,\)\."),
        ({"advantage_estimator": Divides()}, r"Divides\.estimate .* with NaN or infinity"),
        ({"loss": Scalar()}, "Scalar must return a LossOutput with a scalar loss"),
    ],
)
def test_a_mistake_ends_the_run_before_the_policy_is_loaded(options: dict[str, Any], message: str) -> None:
    grpo = module(**options)
    with pytest.raises(ValueError, match=message) as error:
        fit(grpo, 1)
    assert "on a made-up rollout" in error.value.__notes__[0]
    assert grpo.policy is None


def test_a_change_of_either_is_told_on_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.ckpt"
    fit(module(steps_per_generation=1), 1, enable_checkpointing=True, default_root_dir=tmp_path).save_checkpoint(path)
    trainer = fit(module(loss=DPPO(0.3), advantage_estimator=RLOO()), 2, ckpt_path=path, default_root_dir=tmp_path)
    trainer.save_checkpoint(path)
    (told,) = [line for line in caplog.messages if "Resumed as configured now" in line]
    assert "loss was GRPOLoss and is examples.objectives.DPPO(delta=0.3, two_sided=False)" in told
    assert "advantage_estimator was None and is examples.objectives.RLOO" in told
    caplog.clear()
    fit(module(loss=DPPO(0.25), advantage_estimator=RLOO()), 3, ckpt_path=path, default_root_dir=tmp_path)
    (told,) = [line for line in caplog.messages if "Resumed as configured now" in line]
    assert "advantage_estimator" not in told
    assert "0.25" in told


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model.loss.loss_type=dapo", "--model.loss.epsilon=0.3"], GRPOLoss("dapo", epsilon=0.3)),
        (["--model.loss={loss_type: dapo}"], GRPOLoss("dapo")),
        (["--model.loss=examples.objectives.DPPO", "--model.loss.delta=0.3"], DPPO(0.3)),
        (["--model.advantage_estimator=examples.objectives.RLOO"], RLOO()),
    ],
)
def test_a_configuration_names_it(arguments: list[str], expected: Any) -> None:
    cli = _Configured(args=["--config", "configs/quickstart.yaml", *arguments], run=False)
    made = cli.model.loss if isinstance(expected, Loss) else cli.model.advantage_estimator
    assert type(made) is type(expected)
    assert vars(made) == vars(expected)
