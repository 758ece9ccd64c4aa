"""Steps far longer than usual are told of once, with their cause; the share of ten tokens is what it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_naive_training import ACCOUNTED, NAIVE

from sparse_rl_lightning.callbacks import ImportanceReweighting, SparsityAwareRejection, StepGuard
from sparse_rl_lightning.callbacks.guards import step_guard
from sparse_rl_lightning.callbacks.guards.step_guard import BEHIND, SpikeWatch, long_step_advice
from sparse_rl_lightning.losses import policy_loss, top_token_share
from tests.tiny_grpo import Stale, fit, module


def test_spike_is_a_multiple_of_the_median_and_told_of_once_in_a_while() -> None:
    watch = SpikeWatch(factor=20.0, window=50, least=10)
    told = [watch.see(norm) for norm in [1000.0, *[0.1, 0.2] * 10]]
    assert told == [None] * 21  # the first steps are judged by nothing
    assert watch.see(3.9) is None
    assert watch.see(71.0) == pytest.approx(355)
    assert [watch.see(71.0) for _ in range(15)] == [None] * 15  # counted, not told
    assert watch.spikes == 16
    again = SpikeWatch(**watch.state())
    assert again == SpikeWatch(20.0, 50, 10, watch.norms, watch.silent, watch.spikes)


def test_cause_is_tokens_only_if_they_are_moved_far() -> None:
    found = long_step_advice(590.0, 0.35, can_correct=True, can_bound=True)
    told = "Its largest staleness ratio is 5.9e+02, and ten tokens carry 35% of its micro-batch: tokens"
    assert found.startswith(told)
    replay = "ReplayGRPO with replay_objective: sparse (no replay follows a retriever)"
    assert f"ImportanceReweighting with clip_max: 1.5, or {replay}; then fewer optimizer steps per rollout" in found
    done = long_step_advice(590.0, 0.35, can_correct=False, can_bound=True)  # or none is needed
    assert "Reweighting" not in done
    bounded = long_step_advice(590.0, 0.35, can_correct=True, can_bound=False)  # by delta or cispo
    assert f"or {replay}; then fewer" in bounded
    assert "delta" not in bounded
    assert "Look at rewards" in long_step_advice(590.0, 0.35, can_correct=False, can_bound=False)
    assert long_step_advice(1.3, 0.93, True, True).startswith("Its largest staleness ratio is 1.3. Look at rewards")
    assert long_step_advice(0.0, 0.0, True, True).startswith("Look at rewards")


def test_share_of_ten_tokens_is_that_of_the_derivative() -> None:
    """One token of a ratio of 1,000 outweighs 39 others; with a bound on the ratio it has no gradient at all."""
    old = torch.full((4, 10), -2.0)
    new = old.clone()
    new[2, 3] += torch.tensor(1000.0).log()
    new.requires_grad_()
    mask, advantages = torch.ones(4, 10, dtype=torch.bool), torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss = policy_loss(new, old, advantages, mask)
    assert float(loss.metrics["staleness_ratio/max"]) == pytest.approx(1000.0, rel=1e-4)
    assert float(top_token_share(loss.loss, new)) == pytest.approx((1000 + 9) / (1000 + 39), rel=1e-3)
    bounded = policy_loss(new, old, advantages, mask, delta=2.0)
    assert float(top_token_share(bounded.loss, new)) == pytest.approx(10 / 39, rel=1e-3)
    assert float(top_token_share(loss.loss.detach(), new)) == 0
    keep = mask & (torch.arange(4) != 2)[:, None]
    assert float(policy_loss(new, old, advantages, mask, keep=keep).metrics["staleness_ratio/max"]) == 1


def told_by(ranks: list[list[tuple[float, ...]]], module: Any) -> str:
    """What the first rank warns of when a long step follows the micro-batches of each."""
    guards = []
    gather = lambda own: torch.stack([torch.cat([one._worst, own[len(BEHIND) :]]) for one in guards])  # noqa: E731
    strategy = SimpleNamespace(root_device="cpu", all_gather=gather)
    trainer = SimpleNamespace(callback_metrics={}, strategy=strategy, global_step=7, callbacks=[])
    for batches in ranks:
        guards.append(StepGuard())
        for numbers in batches:
            trainer.callback_metrics = dict(zip(BEHIND, map(torch.tensor, numbers), strict=True))
            guards[-1]._note_micro_batch(trainer)
    for _ in range(20):
        guards[0].watch.see(1.0)
    with pytest.warns(UserWarning, match="optimizer step 7 is 90 times as long as usual") as record:
        guards[0]._look_at_step(trainer, module, 90.0)
    return str(record[0].message)


def test_what_is_told_is_of_the_micro_batch_with_the_largest_ratio() -> None:
    """Of all of the step, on all ranks: not the largest share of another one."""
    ranks = [[(2.0, 0.9), (80.0, 0.1), (3.0, 0.8)], [(2.0, 0.9)]]
    grpo = module()
    assert "staleness ratio is 80, and ten tokens carry 10% of its" in told_by(ranks, grpo)
    assert "staleness ratio is 91, and ten tokens carry 20%" in told_by([*ranks, [(91.0, 0.2)]][::2], grpo)


def test_exploding_ratio_is_told_of_before_the_reward_shows_it() -> None:
    guard = StepGuard()
    guard.watch.least = 3
    told = r"optimizer step 5 is .* times as long .*staleness ratio is 1.6e\+05.*: ImportanceReweighting.*delta"
    with pytest.warns(UserWarning, match=told):
        trainer = fit(module(lr=1e-4, steps_per_generation=2), 5, [guard, Stale(first=4)], accumulate_grad_batches=2)
    assert guard.watch.spikes == 1
    assert guard.has_warned_of_ratio  # with the long step, and not again
    assert float(trainer.callback_metrics["staleness_ratio/max"]) > 1e5
    assert float(trainer.callback_metrics["top10_token_share"]) > 0.5


BOUNDED: dict[str, Any] = {"lr": 1e-4, "steps_per_generation": 2, "delta": 2.0}


def watched(callbacks: list[Any], **options: Any) -> tuple[StepGuard, float]:
    """A guard that has seen steps enough to judge, and the largest ratio of the last step of a stale run."""
    guard = StepGuard()
    guard.watch.least = 1
    stale = [*callbacks, guard, Stale(first=2)]
    trainer = fit(module(**BOUNDED, **options), 4, stale, accumulate_grad_batches=2)
    return guard, float(trainer.callback_metrics["staleness_ratio/max"])


def test_ratio_is_told_of_once_where_the_loss_keeps_the_step_short() -> None:
    """With delta nothing is long. Rejection is no cure: what is kept is trained on as it is."""
    for callbacks in ([], [SparsityAwareRejection()]):
        match = r"ratio of optimizer step \d+ is 1.6e\+05.*ImportanceReweighting"
        with pytest.warns(UserWarning, match=match) as record:
            guard, _ = watched(callbacks)
        said = [str(one.message) for one in record if "optimizer step" in str(one.message)]
        assert len(said) == 1
        assert guard.watch.spikes == 0
        again = StepGuard()
        again.load_state_dict(guard.state_dict())
        assert again.has_warned_of_ratio  # a run that goes on does not say it again


@pytest.mark.parametrize("kind", ["pages", "replayed for nothing", "nothing is rejected"])
def test_ratio_is_told_of_wherever_training_is_naive(kind: str) -> None:
    """As the start of the run says: one definition."""
    with pytest.warns(UserWarning, match=r"ratio of optimizer step \d+ is .*ReplayGRPO with replay_objective: sparse"):
        guard, _ = watched([], **NAIVE[kind])
    assert guard.has_warned_of_ratio


@pytest.mark.parametrize("kind", ["weights", *ACCOUNTED])
def test_ratio_is_not_told_of_where_evictions_are_accounted_for_or_none(kind: str) -> None:
    callbacks = [ImportanceReweighting(clip_max=1.5)] if kind == "weights" else []
    guard, ratio = watched(callbacks, **ACCOUNTED.get(kind, {}))
    assert not guard.has_warned_of_ratio
    assert ratio > 100


@pytest.mark.parametrize(
    ("limit", "ratio", "warns"),
    [(100.0, 101.0, True), (100.0, 99.0, False), (100.0, float("nan"), False), (None, 1e5, False)],
)
@pytest.mark.filterwarnings("ignore:The largest staleness ratio")
def test_ratio_is_told_of_above_the_limit_alone(
    limit: float | None, ratio: float, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_guard, "_can_correct", lambda module: True)
    guard = StepGuard(max_staleness_ratio=limit)
    guard._worst = torch.tensor([ratio, 0.5])
    strategy = SimpleNamespace(all_gather=lambda numbers: numbers)
    guard._look_at_step(SimpleNamespace(strategy=strategy, global_step=1, callbacks=[]), module(), 1.0)
    assert guard.has_warned_of_ratio == warns


def test_spikes_need_not_be_looked_for() -> None:
    guard = StepGuard(spike_factor=None)
    fit(module(lr=1e-4), 2, [guard, Stale(first=1)])
    assert guard.watch is None
