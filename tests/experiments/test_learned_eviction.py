"""LearnedEvictionGRPO: its loss is tokens and draws, splits vanish, and nothing else of a run is another."""

from __future__ import annotations

import warnings
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_same_sums
from lightning.pytorch.callbacks import ModelCheckpoint

from experiments.learned_eviction import Drawn, LearnedEvictionGRPO
from experiments.learned_eviction.drawn import NewScore
from experiments.learned_eviction.draws import draw_statistics
from experiments.learned_eviction.loss import eviction_loss
from experiments.learned_eviction.module import FILE
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.budgets import Adaptive
from sparse_rl_lightning.callbacks import DryRun, SparsityAwareRejection
from sparse_rl_lightning.compressors import H2O, RKV, Combined, ExpectedAttention, KeyDiff, LearnedScore, SnapKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.losses import policy_loss
from sparse_rl_lightning.modules import LearnerOptions
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.testing import tiny_model
from tests.learned import learned_score, sizes_of
from tests.tiny_grpo import fit, loaded, module, weights

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


@pytest.mark.parametrize(("weight", "loss_type"), [(1.0, "grpo"), (0.3, "dapo"), (0.0, "dr_grpo")])
def test_loss_is_that_of_tokens_and_draws(weight: float, loss_type: str) -> None:
    clip = {"epsilon": 0.02, "epsilon_high": 0.03, "delta": 1.05}
    grpo = loaded(**KIND, eviction_weight=weight, loss_type=loss_type, **clip)
    rollout = part_of(grpo)
    disturb(grpo)
    before = grpo.draws_of(rollout)
    assert before is not None
    found = grpo.micro_batch_loss(rollout, grpo.denominators(rollout))
    logprobs, _, draws = grpo._statistics(rollout)
    mask, options = rollout.completion_mask, {"loss_type": loss_type, "max_completion_length": 12, **clip}
    want = policy_loss(logprobs, rollout.old_logprobs, rollout.advantages, mask, **options).loss
    ratio = (draws.logprobs - before.logprobs).exp()
    assert (ratio - 1).abs().max() > 0.01
    side = rollout.advantages[:, None, None, None]
    steps, ends = before.steps, rollout.prompt_lengths + rollout.completion_lengths - 1
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


def test_a_network_has_a_learning_rate_of_its_own() -> None:
    for rate, want in ((None, [0.1, 0.1]), (0.03, [0.1, 0.03])):
        compressor = Drawn(NewScore(**SIZES), temperature=0.5)
        grpo = loaded(**KIND | {"compressor": compressor}, network_lr=rate)
        optimizer, _ = grpo.configured()
        assert [group["lr"] for group in optimizer.param_groups] == want
        assert [len(group["params"]) for group in optimizer.param_groups] == [
            len([*own.parameters()]) for own in (grpo.policy, grpo.network)
        ]


def test_micro_batches_do_not_change_the_step() -> None:
    results = []
    for parts in (1, 2, 8):
        grpo = module(**KIND, steps_per_generation=parts, beta=0.01)
        fit(grpo, 2, [SparsityAwareRejection(0.3)], accumulate_grad_batches=parts)
        results.append(weights(grpo))
        assert (grpo.draws.steps >= 0).any()
    for other in results[1:]:
        assert_same_sums(other, results[0], size=weights(loaded(**KIND)))


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


# ---------------------------------------------------------------- a network

NETWORK: dict[str, Any] = {"kind": LearnedEvictionGRPO, "lr": 0.05}


def drawn(**options: Any) -> Drawn:
    return Drawn(NewScore(**SIZES, **options), temperature=0.5)


def network_of(grpo: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in grpo.network.parameters()])


def test_the_network_learns_with_the_policy_at_its_own_rate() -> None:
    before = network_of(loaded(**NETWORK, compressor=drawn()))
    moved = []
    for rate in (None, 1e-6):
        grpo = module(**NETWORK, compressor=drawn(), network_lr=rate)
        fit(grpo, 4)
        moved.append(float((network_of(grpo) - before).abs().max()))
        assert grpo.state_dict().keys() >= {"network.key", "network.recency"}
    assert moved[0] > 1e-3
    assert 0 < moved[1] < 1e-4


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_the_network_stays_float32_whatever_the_precision(precision: str) -> None:
    grpo = module(**NETWORK, compressor=drawn())
    fit(grpo, 2, precision=precision)
    assert {parameter.dtype for parameter in grpo.network.parameters()} == {torch.float32}
    assert not torch.equal(network_of(grpo), network_of(loaded(**NETWORK, compressor=drawn())))


def test_draws_follow_finite_differences_of_the_network() -> None:
    """The log-probability of fixed draws along a direction of all weights, in its gradient and in two evaluations."""
    policy, score = tiny_model(initializer_range=0.3, eos_token_id=None), learned_score(**SIZES)
    compressor, network = Drawn(score, temperature=0.7), score.network
    params = SamplingParams(num_generations=3, max_completion_length=24, seed=2)
    rollout = RolloutSampler(policy, compressor).generate([list(range(5, 20)), [3, 4, 5]], params)
    _, _, fixed = draw_statistics(policy, rollout, compressor)
    parameters = list(network.parameters())
    slopes = torch.autograd.grad(fixed.logprobs.sum(), parameters)
    generator = torch.Generator().manual_seed(9)
    for name, slope, parameter in zip(dict(network.named_parameters()), slopes, parameters, strict=True):
        step = 1e-2 * torch.randn(parameter.shape, generator=generator) / parameter.numel() ** 0.5
        totals = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * step)
                totals.append(float(draw_statistics(policy, rollout, compressor, fixed)[2].logprobs.double().sum()))
                parameter.sub_(sign * step)
        along = float((slope.double() * step.double()).sum())
        assert (totals[0] - totals[1]) / 2 == pytest.approx(along, rel=0.05, abs=2e-4), name
        assert slope.abs().max() > 0, name


@pytest.mark.parametrize("make", [drawn, lambda: SNAPKV], ids=["network", "rule"])
def test_a_resumed_run_goes_on_within_a_rollout(make: Any, tmp_path: Path) -> None:
    """With the draws of the policy before the update, and with none other."""

    def run(steps: int, compressor: Drawn, **options: Any) -> Any:
        grpo = module(**NETWORK, compressor=compressor, steps_per_generation=2)
        fit(grpo, steps, callbacks=options.pop("callbacks", None), **options)
        return grpo

    straight = run(5, make())
    keep = ModelCheckpoint(dirpath=tmp_path, save_last=True, every_n_train_steps=3, save_top_k=0)
    run(3, make(), callbacks=[keep], enable_checkpointing=True)
    resumed = run(5, make(), ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(weights(resumed), weights(straight))
    if straight.network is not None:
        assert torch.equal(network_of(resumed), network_of(straight))
    hotter = copy(make())
    hotter.temperature = 0.6
    with pytest.raises(UserError, match=r"that Drawn\(.*0.5\) drew, and the compressor is Drawn\(.*0.6"):
        run(5, hotter, ckpt_path=tmp_path / "last.ckpt")


@pytest.mark.parametrize("normalization", ["rank", "standard"])
def test_a_combination_is_learned_where_it_has_a_gradient(normalization: Any) -> None:
    both = Combined([NewScore(**SIZES), KeyDiff(**SIZES)], normalization=normalization)
    assert Drawn(both).has_gradient == (normalization == "standard")


def test_a_method_with_a_network_of_several_heads_can_be_learned() -> None:
    assert Drawn(learned_score(**SIZES)).has_gradient
    assert Drawn(NewScore(60, buffer=4, num_sinks=1, window=40)).has_gradient


def test_what_has_no_network_has_no_rate_and_only_one_is_learned() -> None:
    with pytest.raises(UserError, match=r"network_lr=0.1 .*KeyDiff"):
        loaded(**NETWORK, compressor=Drawn(KeyDiff(**SIZES)), network_lr=0.1)
    two = Combined([NewScore(**SIZES), NewScore(**SIZES)], normalization="standard")
    with pytest.raises(UserError, match="one compressor that is learned, got 2"):
        loaded(**NETWORK, compressor=Drawn(two))


def test_a_checkpoint_of_another_network_says_so() -> None:
    grpo, narrow = loaded(**NETWORK, compressor=drawn()), loaded(**NETWORK, compressor=drawn(width=3))
    plain = loaded(compressor=KeyDiff(**SIZES))
    for other in (narrow, plain):
        with pytest.raises(UserError, match=r"another model: .*'network\.bias'"):
            other.on_load_checkpoint({"state_dict": grpo.state_dict()})
    grpo.on_load_checkpoint({"state_dict": grpo.state_dict()})


def test_export_writes_it_beside_the_policy(tmp_path: Path) -> None:
    grpo = module(**NETWORK, compressor=drawn())
    fit(grpo, 2)
    grpo.export(tmp_path / "policy")
    again = LearnedScore(**SIZES, weights=str(tmp_path / "policy" / FILE))
    again.check_model(sizes_of(grpo.policy))
    own = torch.cat([parameter.detach().flatten() for parameter in again.network.parameters()])
    assert torch.equal(own, network_of(grpo))
