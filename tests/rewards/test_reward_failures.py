"""A sample on which a reward function fails has no reward: no baseline counts it, its advantage is 0, and it is told.

"It does not apply" (None) stays what it is: the other functions pay.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from tiny_grpo import Recorder, Rows, fit, module

from sparse_rl_lightning.advantages import group_advantages
from sparse_rl_lightning.downsampling import MaxReward, MaxVariance
from sparse_rl_lightning.evaluation.evaluate import Scores, ValidationLog
from sparse_rl_lightning.modules import ReplayGRPO
from sparse_rl_lightning.records import Conversation, Rollout, ScoredRollout
from sparse_rl_lightning.rewards.scoring import Rewards


def scored(texts: str, ends: list[str] | None = None) -> ScoredRollout:
    """One prompt, a completion per letter; conversations that ended like this."""
    count = len(texts)
    sequences = torch.zeros(count, 2, dtype=torch.int64)
    mask = torch.tensor([[False, True]] * count)
    rollout = Rollout(sequences, torch.ones(count, dtype=torch.int64), mask, mask[:, 1], torch.zeros(count, 2))
    talks = None if ends is None else [Conversation(end=end, reward=1.0, error="E raised 1") for end in ends]
    return ScoredRollout(rollout, [{"prompt": "p", "answer": "1"}], list(texts), {}, 0, conversations=talks)


def pays(completions: list[str], **_: Any) -> list[float | None]:
    """1 for a, 0 for anything else."""
    return [float(text == "a") for text in completions]


FAILS: dict[str, Any] = {
    "an error": lambda: 1 / 0,
    "NaN": lambda: math.nan,
    "NaN of numpy": lambda: np.float32("nan"),
    "NaN of a tensor": lambda: torch.tensor(float("nan")),
    "infinite": lambda: math.inf,
    "minus infinite, of numpy": lambda: -np.inf,
    "beyond float32": lambda: 1e39,
    "a whole number beyond floats": lambda: 10**400,
    "a text": lambda: "1.0",
    "a list": lambda: [1.0],
}


def punishes(fault: Any) -> Any:
    """-1 for everything but x, on which it fails."""

    def penalty(completions: list[str], **_: Any) -> list[Any]:
        return [fault() if text == "x" else -1.0 for text in completions]

    return penalty


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["in this process", "in its own"])
@pytest.mark.parametrize("fault", FAILS.values(), ids=FAILS)
def test_breaking_a_penalty_takes_the_sample_out(fault: Any, timeout: float | None) -> None:
    """An a is worth 1 - 1 = 0, b 0 - 1 = -1, x was worth 0 (or NaN, and the run over); its group is a and b."""
    rewards = Rewards([pays, punishes(fault)], timeout=timeout, warn=lambda text: None)
    one = scored("abx")
    try:
        found = rewards(one)
    finally:
        rewards.close()
    assert found[:2].tolist() == [0.0, -1.0]
    assert found[2].isnan()
    assert one.reward_failures == {"pays": 0, "penalty": 1}
    advantages = group_advantages(found, 3)
    half = math.sqrt(0.5)  # the deviation of 0 and -1, Bessel-corrected; each is 0.5 from the mean
    assert torch.allclose(advantages, torch.tensor([0.5 / half, -0.5 / half, 0.0]), atol=1e-5)


def test_none_still_means_that_it_does_not_apply() -> None:
    rewards = Rewards([pays, punishes(lambda: None)], warn=pytest.fail)
    one = scored("abx")
    assert rewards(one).tolist() == [0.0, -1.0, 0.0]
    assert not one.failed
    rewards.settle()


def test_a_function_without_weight_takes_nothing_out() -> None:
    told: list[str] = []
    rewards = Rewards([pays, punishes(lambda: math.nan)], [1.0, 0.0], warn=told.append)
    assert rewards(scored("ax")).tolist() == [1.0, 0.0]
    assert "its weight is 0" in told[0]
    rewards.settle()


def test_fewer_than_two_left_teach_nothing() -> None:
    nan = math.nan
    rewards = torch.tensor([1.0, nan, nan, 0.0, 1.0, nan])
    for scale in ("group", "none"):
        half = 0.5 / math.sqrt(0.5) if scale == "group" else 0.5
        expected = torch.tensor([0.0, 0.0, 0.0, -half, half, 0.0])
        assert torch.allclose(group_advantages(rewards, 3, scale), expected, atol=1e-5)  # type: ignore[arg-type]
    # of the batch: the deviation of 1, 0, 1, which is sqrt(1/3)
    half = 0.5 / math.sqrt(1 / 3)
    expected = torch.tensor([0.0, 0.0, 0.0, -half, half, 0.0])
    assert torch.allclose(group_advantages(rewards, 3, "batch"), expected, atol=1e-5)


@pytest.mark.parametrize("rule", [MaxVariance(4), MaxReward(4)])
def test_down_sampling_keeps_samples_with_a_reward(rule: Any) -> None:
    rewards = torch.tensor([math.nan, 0.0, math.nan, 1.0])
    assert rule.choose(rewards, torch.ones(4), 2).tolist() == [1, 3]


# ---------------------------------------------------------------- when a run ends


def test_a_run_ends_at_the_share_that_is_set() -> None:
    for limit, ends in ((1.0, False), (0.5, True), (0.6, False)):
        rewards = Rewards([punishes(lambda: 1 / 0)], warn=lambda text: None, failure_limit=limit)
        rewards(scored("axax"))
        if ends:
            with pytest.raises(RuntimeError, match=r"penalty raised ZeroDivisionError.* 2 of 4 samples failed"):
                rewards.settle()
        else:
            rewards.settle()
        assert rewards.failures.judged == 0


def test_what_was_returned_ends_it_as_an_error_of_the_user() -> None:
    rewards = Rewards([punishes(lambda: math.nan)], warn=lambda text: None)
    rewards(scored("xx"))
    with pytest.raises(ValueError, match=r"penalty returned nan, not a finite number .* on sample 0, completion 'x'"):
        rewards.settle()


def test_functions_that_fail_on_different_samples_add_up() -> None:
    def other(completions: list[str], **_: Any) -> list[float]:
        return [math.nan if text == "a" else 1.0 for text in completions]

    rewards = Rewards([punishes(lambda: math.nan), other], warn=lambda text: None)
    assert rewards(scored("ax")).isnan().all()
    with pytest.raises(ValueError, match="2 of 2 samples failed"):
        rewards.settle()


def test_conversations_that_fail_are_left_out_and_end_no_validation() -> None:
    """A training rollout in which all fail ends the run elsewhere, in ``check_not_all_failed``."""
    for ends in (["timeout", "timeout"], ["failed", "timeout"], ["failed", ""]):
        rewards = Rewards([pays], environment=True, warn=lambda text: None, failure_limit=0.5)
        one = scored("ab", ends)
        assert rewards(one).isnan().tolist() == [bool(end) for end in ends]
        assert one.failed["environment"].tolist() == [bool(end) for end in ends]
        rewards.settle()


# ---------------------------------------------------------------- runs


def picky(completions: list[str], **_: Any) -> list[float]:
    """NaN for completions that begin with a, the share of a otherwise."""
    return [math.nan if text.startswith("a") else text.count("a") / 10 for text in completions]


@pytest.mark.parametrize("kind", [None, ReplayGRPO], ids=["corrected", "replayed"])
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_nan_costs_the_sample_and_not_the_run(kind: Any, scale: str) -> None:
    recorder = Recorder()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        grpo = module(picky, scale_rewards=scale, **({} if kind is None else {"kind": kind}))
        trainer = fit(grpo, 3, [recorder])
    assert trainer.global_step == 3
    assert any("They are left out: no baseline counts them" in str(one.message) for one in said)
    one = next(s for s in recorder.scored if any(text.startswith("a") for text in s.completions))
    failed = torch.tensor([text.startswith("a") for text in one.completions])
    assert one.rollout.rewards is not None
    assert one.rollout.advantages is not None
    assert torch.equal(one.rollout.rewards.isnan(), failed)
    assert float(one.rollout.advantages[failed].abs().sum()) == 0
    assert float(trainer.callback_metrics["rewards/picky/failed"]) == recorder.scored[-1].reward_failures["picky"]


def test_a_run_in_which_nothing_fails_enters_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rewards, "_without_failed", pytest.fail)
    monkeypatch.setattr(Rewards, "_warn_of_failure", pytest.fail)
    fit(module(), 2)


def validate(reward: Any) -> dict[str, float]:
    """Validation on four rows, a batch each, whose answers are 0 to 3."""
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    (found,) = trainer.validate(module(reward), datamodule=Rows(val_batch_size=1), verbose=False)
    return dict(found)


def test_one_validation_row_that_fails_ends_no_run() -> None:
    """It was "fails on every sample" of its batch; what cannot be judged is wrong."""

    def fails_on_the_first(answer: list[str], **_: Any) -> list[float]:
        return [math.nan if gold == "0" else 1.0 for gold in answer]

    found = validate(fails_on_the_first)
    assert found["val/pass@1_dense"] == 0.75
    assert found["val/reward_dense"] == 1.0


def test_a_function_that_fails_on_a_whole_validation_ends_it() -> None:
    def never(answer: list[str], **_: Any) -> list[float]:
        raise KeyError("no judge")

    with pytest.raises(RuntimeError, match=r"KeyError\('no judge'\) .* 8 of 8 samples failed"):
        validate(never)


def test_an_accuracy_counts_what_cannot_be_judged_as_wrong_and_a_reward_leaves_it_out() -> None:
    def scores(values: list[float]) -> Scores:
        one = scored("abc")
        one.reward_table = {"f": torch.tensor(values)}
        one.failed = {"f": torch.tensor([False, False, True])}
        return Scores.of(one, torch.tensor(values))

    assert scores([1.0, 0.0, math.nan]).mean == pytest.approx(1 / 3)
    assert scores([1.0, 0.5, math.nan]).mean == 0.75
    logged: dict[str, float] = {}
    log = ValidationLog(lambda name, value, **_: logged.update({name: float(value)}))
    log.batch(scores([math.nan] * 3), torch.ones(1, dtype=torch.bool), "{}", by_benchmark=False)
    assert logged["pass@1"] == 0.0
