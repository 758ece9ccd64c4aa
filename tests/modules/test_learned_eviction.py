"""LearnedEvictionGRPO: its loss is tokens and draws, splits vanish, and nothing else of a run is another."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs, assert_same_sums

from sparse_rl_lightning.budgets import Adaptive
from sparse_rl_lightning.callbacks import DryRun, SparsityAwareRejection
from sparse_rl_lightning.compressors import (
    H2O,
    RKV,
    Combined,
    Compressor,
    Drawn,
    ExpectedAttention,
    KeyDiff,
    KNorm,
    LearnedScore,
    RandomEviction,
    SnapKV,
    StreamingLLM,
)
from sparse_rl_lightning.losses import eviction_loss, policy_loss
from sparse_rl_lightning.modules import LearnedEvictionGRPO, LearnerOptions, ReplayGRPO
from sparse_rl_lightning.records import Rollout
from tests.tiny_grpo import Recorder, fit, loaded, module, weights

SIZES: dict[str, Any] = {"budget": 8, "buffer": 3, "num_sinks": 1, "window": 2}
SNAPKV = Drawn(SnapKV(**SIZES, kernel_size=3), temperature=0.5)
KIND: dict[str, Any] = {"kind": LearnedEvictionGRPO, "compressor": SNAPKV, "lr": 0.1}


def disturb(grpo: Any) -> None:
    with torch.no_grad():
        for index, parameter in enumerate(grpo.policy.parameters()):
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))


def gradient(grpo: Any, loss: torch.Tensor) -> torch.Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(grpo.policy.parameters()))])


ROWS = [{"prompt": "0123456789abcdef"[i:] + "a", "answer": ""} for i in (0, 3, 11)]


def part_of(grpo: Any) -> Rollout:
    scored = grpo.generator.generate(ROWS)
    grpo.rescore(scored)
    grpo.score(scored)
    rollout: Rollout = scored.rollout
    return rollout


@pytest.mark.parametrize("weight", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_loss_is_that_of_tokens_and_draws(weight: float, loss_type: str) -> None:
    clip = {"epsilon": 0.02, "epsilon_high": 0.03, "delta": 1.05}
    grpo = loaded(**KIND, eviction_weight=weight, loss_type=loss_type, **clip)
    rollout = part_of(grpo)
    disturb(grpo)
    assert rollout.draws is not None
    found = grpo.micro_batch_loss(rollout, grpo.denominators(rollout))
    logprobs, _, draws = grpo._statistics(rollout)
    mask, options = rollout.completion_mask, {"loss_type": loss_type, "max_completion_length": 12, **clip}
    want = policy_loss(logprobs, rollout.old_logprobs, rollout.advantages, mask, **options).loss
    ratio = (draws.logprobs - rollout.draws.logprobs).exp()
    assert (ratio - 1).abs().max() > 0.01
    side = rollout.advantages[:, None, None, None]
    steps, ends = rollout.draws.steps, rollout.prompt_lengths + rollout.completion_lengths - 1
    # not the draws at a prompt's end, which its samples share, nor at the very end, which nothing sees
    assert rollout.evictions is not None
    assert (rollout.evictions.death == rollout.prompt_lengths[:, None, None]).any()
    assert (steps[steps >= 0] > rollout.prompt_lengths[:, None].expand_as(steps)[steps >= 0]).all()
    credited = (steps >= 0) & (steps < ends[:, None])
    assert credited.sum() > 10
    terms = torch.minimum(ratio.clamp(max=1.05) * side, ratio.clamp(0.98, 1.03) * side) * credited[..., None, None]
    per_sequence = terms.sum(dim=(1, 2, 3))
    divided = {
        "grpo": (per_sequence / mask.sum(dim=1)).mean(), "dapo": per_sequence.sum() / mask.sum(),
        "dr_grpo": per_sequence.sum() / (12 * len(rollout)),
    }[loss_type]  # fmt: skip
    want = want - weight * divided
    assert_same_sums(found.loss, want, size=1.0, share=1e-5)
    assert_same_sums(gradient(grpo, found.loss), gradient(grpo, want))
    assert found.metrics["draws/logprob"] < 0
    assert found.metrics["draws/ratio_max"] > 1


def test_tokens_are_scored_at_the_temperature_they_were_drawn_at() -> None:
    rollout = part_of(loaded(**KIND, temperature=1.6))
    assert_same_logprobs(rollout.old_logprobs, rollout.sampler_logprobs)


def test_a_network_has_a_learning_rate_of_its_own() -> None:
    for rate, want in ((None, [0.1, 0.1]), (0.03, [0.1, 0.03])):
        compressor = Drawn(LearnedScore(**SIZES), temperature=0.5)
        grpo = loaded(**KIND | {"compressor": compressor}, network_lr=rate)
        optimizer, _ = grpo.configured()
        assert [group["lr"] for group in optimizer.param_groups] == want
        assert [len(group["params"]) for group in optimizer.param_groups] == [
            len([*own.parameters()]) for own in (grpo.policy, grpo.network)
        ]


def test_without_weight_tokens_alone_are_learned() -> None:
    """As by ReplayGRPO, under the same drawn evictions."""
    results = []
    for kind, options in ((LearnedEvictionGRPO, {"eviction_weight": 0.0}), (ReplayGRPO, {})):
        grpo = module(**KIND | {"kind": kind}, steps_per_generation=2, **options)
        fit(grpo, 4)
        results.append(weights(grpo))
    assert_same_sums(results[0], results[1], size=weights(loaded(**KIND)))
    grpo = module(**KIND, steps_per_generation=2)
    fit(grpo, 4)
    assert (weights(grpo) - results[0]).abs().max() > 1e-4


def test_micro_batches_do_not_change_the_step() -> None:
    results = []
    for parts in (1, 2, 8):
        grpo, recorder = module(**KIND, steps_per_generation=parts, beta=0.01), Recorder()
        fit(grpo, 2, [SparsityAwareRejection(0.3), recorder], accumulate_grad_batches=parts)
        results.append(weights(grpo))
        draws = recorder.scored[0].rollout.draws
        assert draws is not None
        assert (draws.steps >= 0).any()
    for other in results[1:]:
        assert_same_sums(other, results[0], size=weights(loaded(**KIND)))


def test_draws_travel_with_a_checkpointed_rollout() -> None:
    rollout = part_of(loaded(**KIND))
    again = Rollout.from_state(rollout.state())
    assert rollout.draws is not None
    assert again.draws is not None
    for name, value in vars(rollout.draws).items():
        assert torch.equal(value, getattr(again.draws, name)), name
    assert torch.equal(rollout[torch.tensor([2, 0])].draws.order, rollout.draws.order[[2, 0]])


def test_sequences_without_events_have_no_term() -> None:
    """Slots that hold everything: nothing is drawn, and the loss is that of the tokens."""
    grpo = loaded(**KIND | {"compressor": Drawn(KeyDiff(budget=60, buffer=3, num_sinks=1, window=2))})
    rollout = part_of(grpo)
    disturb(grpo)
    found = grpo.micro_batch_loss(rollout, grpo.denominators(rollout))
    want = policy_loss(
        grpo.learner.replayed(grpo.policy, rollout)[0], rollout.old_logprobs, rollout.advantages,
        rollout.completion_mask,
    ).loss  # fmt: skip
    torch.testing.assert_close(found.loss, want)
    assert found.metrics["draws/logprob"] == 0


def test_a_draw_is_clipped_like_a_token() -> None:
    steps, advantages = torch.tensor([[3, -1], [2, 4]]), torch.tensor([1.0, -1.0])
    mask = torch.arange(6).expand(2, 6) >= 2
    new = torch.tensor([[0.5, 9.0], [0.5, -0.5]])[..., None, None].requires_grad_()
    found = eviction_loss(new, torch.zeros(2, 2, 1, 1), steps, advantages, mask)
    want = -(1.2 / 4 - (torch.tensor(0.5).exp() + 0.8) / 4) / 2  # what is not there does not count
    assert float(found.loss.detach()) == pytest.approx(float(want))
    (own,) = torch.autograd.grad(found.loss, new)
    assert own.flatten().tolist() == pytest.approx([0, 0, float(torch.tensor(0.5).exp()) / 8, 0])
    assert float(found.metrics["draws/clip_ratio"]) == pytest.approx(2 / 3)
    # the mean of all 8 tokens; to cispo epsilon_high is a cap of weights, which draws have not
    capped = eviction_loss(new, torch.zeros(2, 2, 1, 1), steps, advantages, mask, loss_type="cispo", epsilon_high=5.0)
    assert float(capped.loss.detach()) == pytest.approx(float(want))


def test_draws_in_an_answer_of_a_tool_are_credited_with_what_is_sampled_next() -> None:
    """Sampled are 2, 3, 6 and 7: what has died when so many were fed is missing for the tokens behind the next one."""
    mask = torch.tensor([[False, False, True, True, False, False, True, True, False]])
    steps = torch.tensor([[3, 4, 5, 6, 7, 8, -1]])
    new = torch.zeros(1, 7, 2, 1, requires_grad=True)
    found = eviction_loss(new, torch.zeros(1, 7, 2, 1), steps, torch.ones(1), mask)
    (own,) = torch.autograd.grad(found.loss, new)
    # each by four tokens; nothing that was sampled has seen the others
    assert own[0, :, :, 0].tolist() == [[-0.25, -0.25]] * 4 + [[0.0, 0.0]] * 3
    assert float(found.loss.detach()) == pytest.approx(-8 / 4)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"compressor": RKV(**SIZES)}, "draws none. Wrap it"),
        ({"compressor": Drawn(RKV(**SIZES), temperature=0.0)}, "draws none. Wrap it"),
        *(
            ({"compressor": Drawn(method)}, "recomputes scores, with gradient, .* normalization: standard")
            for method in (
                H2O(**SIZES),
                RandomEviction(**SIZES),
                StreamingLLM(**SIZES),
                Combined([KeyDiff(**SIZES)]),
                ExpectedAttention(**SIZES),
            )
        ),
        ({"compressor": Drawn(KeyDiff(**SIZES, budget_rule=Adaptive()))}, "no probability is known for that"),
        ({"learner": LearnerOptions(gradient_checkpointing=True)}, "gradient_checkpointing to false"),
        ({"learner": LearnerOptions(share_prompts=True)}, "share_prompts to false"),
        ({"learner": LearnerOptions(micro_batch_tokens=100)}, "micro_batch_tokens to null"),
        ({"eviction_weight": -1.0}, "eviction_weight"),
    ],
)
def test_what_cannot_be_learned_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        module(**KIND | options)


def test_a_rehearsal_before_training_passes() -> None:
    """Of the largest update, whose made-up sequences lose their oldest tokens, by draws."""
    grpo, rehearsed = module(**KIND), []
    own = grpo.micro_batch_loss

    def watched(part: Rollout, denominators: Any) -> Any:
        output = own(part, denominators)
        if not rehearsed:
            rehearsed.append((len(part), grpo._statistics(part)[2]))
        return output

    grpo.micro_batch_loss = watched  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        trainer = fit(grpo, 1, [DryRun(enabled=True)])
    assert trainer.global_step == 1
    ((count, draws),) = rehearsed
    assert draws.steps.shape[0] == count
    # as many as the longest may have, without that at the prompt's end
    assert (draws.steps >= 0).sum(dim=1).tolist() == [draws.steps.shape[1] - 1] * count
    assert draws.steps.shape[1] >= 4
    assert draws.logprobs.isfinite().all()


@pytest.mark.parametrize(
    "method", [KNorm(**SIZES), Combined([SnapKV(**SIZES), KeyDiff(**SIZES)], normalization="standard")], ids=repr
)
def test_other_scores_have_a_gradient_too(method: Compressor) -> None:
    grpo = loaded(**KIND | {"compressor": Drawn(method, temperature=0.5)})
    rollout = part_of(grpo)
    grpo.micro_batch_loss(rollout, grpo.denominators(rollout)).loss.backward()
