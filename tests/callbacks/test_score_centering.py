"""ScoreCentering in a run: the gradient of a micro-batch by enumeration, what goes with it, memory and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_grpo import Recorder, fit, loaded, module, weights
from torch import Tensor

from sparse_rl_lightning.callbacks import (
    CIS,
    MIS,
    TIS,
    AcceptanceMonitor,
    CorrectionCallback,
    IcePop,
    ImportanceReweighting,
    SamplerSupport,
    ScoreCentering,
    SequenceTIS,
    SparsityAwareRejection,
)
from sparse_rl_lightning.callbacks.base import corrections_of
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.modules import DistillSparse, GRPOLoss, Loss, ReplayGRPO

ONE_STEP: dict[str, Any] = {"steps_per_generation": 1}


class Kept(CorrectionCallback):
    """Keeps the module's gradient of the first micro-batch, and what it came from."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if not self.seen:
            self.seen = {
                "rollout": module.block.rollout,
                "gradient": [p.grad.clone() for p in module.policy.parameters()],
                "policy": module.policy,
            }
            self.seen["expected"] = brute_force(module)


def brute_force(module: Any) -> list[Tensor]:
    """The gradient of -sum A (w log p - sum_v q_v f_v log p_v) / N from whole distributions, row by row."""
    rollout, policy = module.block.rollout, module.policy
    total = torch.zeros((), dtype=torch.float64)
    sampler = torch.full((*rollout.completion_mask.shape, policy.config.vocab_size), -torch.inf, dtype=torch.float64)
    sampler.scatter_(-1, rollout.topk_ids.long(), rollout.topk_logprobs.double())
    (weighing,) = [c for c in module.trainer.callbacks if getattr(c, "weighs", False)] or (None,)
    for row in range(len(rollout)):
        ids, mask = rollout.sequences[row], rollout.completion_mask[row]
        length = int(rollout.lengths[row])
        logits = policy(ids[None, :length]).logits[0, :-1].double()
        for at in mask.nonzero().flatten().tolist():
            log_p, log_q = logits[at - 1].log_softmax(-1), sampler[row, at]
            ratio = (log_p - log_q).detach().exp()
            factor = torch.ones_like(ratio)
            if isinstance(weighing, TIS):
                factor = ratio.clamp(max=weighing.clip_max)
            elif isinstance(weighing, IcePop):
                factor = ratio * ((ratio >= weighing.clip_min) & (ratio <= weighing.clip_max))
            elif isinstance(weighing, CIS):
                unsure = (1 - log_p.detach().exp()).clamp(min=weighing.floor)
                factor = torch.minimum(ratio, 1 + weighing.threshold * unsure)
            token = ids[at]
            centered = factor[token] * log_p[token] - (log_q.exp() * factor * log_p).sum()
            total = total - rollout.advantages[row] * centered
    total = total / rollout.completion_mask.sum()
    return list(torch.autograd.grad(total, list(policy.parameters())))


@pytest.mark.parametrize("weighing", [None, TIS(1.1), IcePop(0.8, 1.3), CIS(0.3)])
def test_the_gradient_is_that_of_enumeration(weighing: Any) -> None:
    kept = Kept()
    callbacks = [ScoreCentering(top=99), kept, *([weighing] if weighing else [])]
    fit(module(loss_type="dapo", **ONE_STEP), 1, callbacks)
    assert kept.seen["rollout"].topk_ids.shape[-1] == kept.seen["policy"].config.vocab_size  # of which 99 are too many
    scale = max(gradient.abs().max() for gradient in kept.seen["expected"])
    assert scale > 1e-3
    for ours, expected in zip(kept.seen["gradient"], kept.seen["expected"], strict=True):
        torch.testing.assert_close(ours, expected.float(), rtol=0, atol=1e-4 * scale.item())


def test_a_few_most_likely_tokens_are_near_all_of_them_and_nothing_is_far() -> None:
    trained = []
    for top in (8, 18, None):
        grpo = module(**ONE_STEP)
        fit(grpo, 2, [] if top is None else [ScoreCentering(top)])
        trained.append(weights(grpo))
    few, whole, without = trained
    assert (few - whole).norm() < 0.3 * (without - whole).norm()


def test_it_changes_nothing_where_the_sampler_is_the_learner() -> None:
    trained = []
    for callbacks in ([], [ScoreCentering()]):
        grpo = module(compressor=FullKV(), **ONE_STEP)
        fit(grpo, 2, callbacks)
        trained.append(weights(grpo))
    torch.testing.assert_close(*trained, rtol=0, atol=2e-6)


@pytest.mark.parametrize("options", [{"micro_batch_tokens": 60}, {"share_prompts": True}])
def test_other_ways_to_pass_through_the_policy_are_the_same(options: dict[str, Any]) -> None:
    trained = []
    for more in ({}, options):
        grpo = module(loss_type="dapo", **more, **ONE_STEP)
        fit(grpo, 2, [ScoreCentering(6), TIS()])
        trained.append(weights(grpo))
    torch.testing.assert_close(*trained, rtol=0, atol=2e-6)


# ---------------------------------------------------------------- what the sampler reports


@pytest.mark.parametrize("first", [0, 1])
def test_it_goes_with_the_monitor_of_acceptance_in_either_order(first: int) -> None:
    """Of two rollouts the monitor measures one, and wants fewer tokens."""
    seen = Recorder()
    callbacks: list[Any] = [ScoreCentering(9), AcceptanceMonitor(2, top_k=4, ceiling_prompts=0)]
    grpo = module(**ONE_STEP)
    widths = []

    class Widths(Recorder):
        def on_rollout_scored(self, trainer: Any, module: Any, scored: Any) -> None:
            widths.append(scored.rollout.topk_ids.shape[-1])

    fit(grpo, 2, [callbacks[first], callbacks[1 - first], Widths(), seen])
    assert widths == [9, 9]
    assert grpo.generator.top == {}
    assert grpo.generator.drawing is grpo.generator.sampling


@pytest.mark.parametrize(
    ("reader", "options"), [(ScoreCentering(3), {}), (SamplerSupport(3), {"top_k": 9})], ids=["centering", "support"]
)
def test_who_asks_for_more_tokens_changes_nothing(reader: Any, options: dict[str, Any]) -> None:
    trained, logged = [], []
    for more in ([], [AcceptanceMonitor(1, top_k=18, ceiling_prompts=0)]):
        grpo = module(**ONE_STEP, **options)
        metrics = fit(grpo, 1, [reader, TIS(), *more]).callback_metrics
        trained.append(weights(grpo))
        logged.append([float(value) for name, value in metrics.items() if name.startswith(("centering", "support"))])
    assert torch.equal(*trained)
    assert logged[0] == logged[1] != []


def test_rollouts_without_it_keep_no_candidates() -> None:
    seen = Recorder()
    fit(module(top_logprobs=3, **ONE_STEP), 1, [seen])
    assert seen.scored[0].rollout.topk_ids is None


def test_learner_and_loss_are_given_back() -> None:
    grpo = module(**ONE_STEP)
    learner, loss = grpo.learner, grpo.loss
    fit(grpo, 1, [ScoreCentering()])
    assert grpo.learner is learner
    assert grpo.loss is loss


def test_a_report_names_it_and_the_log_says_how_much_it_knows(tmp_path: Path) -> None:
    grpo = loaded(**ONE_STEP)
    trainer = fit(grpo, 1, [ScoreCentering(12)])
    assert corrections_of(grpo) == ["ScoreCentering"]
    assert 0.5 < trainer.callback_metrics["centering/covered"].item() < 1


def test_a_run_resumed_within_a_rollout_is_the_run_that_went_on(tmp_path: Path) -> None:
    """Micro-batches of one step, of which the checkpoint has the rest, candidates included."""
    options = {"steps_per_generation": 4}
    whole = module(**options)
    fit(whole, 3, [ScoreCentering(6), TIS()], accumulate_grad_batches=4)
    first = module(**options)
    path = tmp_path / "a.ckpt"
    fit(first, 2, [ScoreCentering(6), TIS()], accumulate_grad_batches=4).save_checkpoint(path)
    second = module(**options)
    fit(second, 3, [ScoreCentering(6), TIS()], accumulate_grad_batches=4, ckpt_path=path)
    assert torch.equal(weights(whole), weights(second))


# ---------------------------------------------------------------- what does not go with it


class Reinforce(Loss):
    def __call__(self, micro_batch: Any, logprobs: Any, denominators: Any) -> Any:
        return self.token_mean(-logprobs, micro_batch, denominators)


class Derived(GRPOLoss):
    """A user's, which must not be replaced in silence."""


class Halves(CorrectionCallback):
    def correct(self, trainer: Any, module: Any, part: Any) -> None:
        part.weights = part.weights / 2


@pytest.mark.parametrize(
    ("options", "others", "message"),
    [
        ({"importance_sampling_level": "sequence"}, [], "model.loss.importance_sampling_level is 'sequence'"),
        ({"off_policy_delta": 0.1}, [], "model.loss.off_policy_delta leaves out sequences"),
        ({"loss": Reinforce()}, [], "model.loss is Reinforce"),
        ({"loss": Derived()}, [], "model.loss is Derived"),
        ({"loss_type": "cispo", "epsilon_high": 0.9}, [], "model.loss.epsilon_high is below 1"),
        ({}, [Halves()], "Halves does not weigh each token by itself"),
        ({"kind": ReplayGRPO}, [], "ReplayGRPO replays everything"),
        ({"top_p": 0.9}, [], "a part of the distribution is never drawn, and it is for .*top_p=1"),
        ({}, [MIS()], "SparsityAwareRejection leaves out tokens by low and high"),
        ({}, [SequenceTIS()], "SequenceTIS does not weigh each token by itself"),
        ({}, [ImportanceReweighting(normalize="batch")], "ImportanceReweighting does not weigh each token by itself"),
    ],
)
def test_what_it_cannot_go_with_is_refused_by_name(options: dict[str, Any], others: list[Any], message: str) -> None:
    grpo = module(**{**ONE_STEP, **options})
    with pytest.raises(ValueError, match=f"ScoreCentering: {message}"):
        fit(grpo, 1, [ScoreCentering(), *others])


@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({"kind": ReplayGRPO, "replay_objective": "dense"}, [TIS()]),
        ({"kind": ReplayGRPO, "replay_objective": "mixed"}, []),
        ({"kind": DistillSparse}, []),
        ({"beta": 0.1, "loss_type": "bnpo"}, [SparsityAwareRejection(baseline="kept")]),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, [SparsityAwareRejection(), ImportanceReweighting()]),
        ({"oversampling": 2.0}, [IcePop()]),
    ],
)
def test_it_goes_with_the_rest(options: dict[str, Any], others: list[Any]) -> None:
    grpo = module(**{**ONE_STEP, **options})
    fit(grpo, 2, [ScoreCentering(), *others])
    assert weights(grpo).isfinite().all()


@pytest.mark.parametrize(("options", "steps"), [({}, 0), ({"steps_per_generation": 2}, 2), ({"num_iterations": 3}, 3)])
def test_later_steps_of_a_rollout_are_told(
    options: dict[str, int], steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    grpo = module(**{**ONE_STEP, **options})
    fit(grpo, 2, [ScoreCentering(), TIS()])
    assert weights(grpo).isfinite().all()
    assert (f"a rollout has {steps} optimizer steps, of which the first" in caplog.text) == (steps > 0)


@pytest.mark.parametrize("top", [0, -1])
def test_at_least_one_token(top: int) -> None:
    with pytest.raises(ValueError, match="top must be at least 1"):
        ScoreCentering(top)
