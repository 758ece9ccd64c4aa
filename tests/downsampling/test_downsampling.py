"""Rules that choose samples: against every subset, by hand, and without a reward."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_rl_lightning.downsampling import DownSampling, MaxReward, MaxVariance, Shortest, down_sample
from sparse_rl_lightning.modules import RolloutOptions
from sparse_rl_lightning.records import Rollout, ScoredRollout
from sparse_rl_lightning.rollout import SamplingParams

NAN = float("nan")
LENGTHS = torch.tensor([5, 3, 9, 1, 7, 2])


def kept(rule: DownSampling, rewards: list[float], count: int) -> list[int]:
    return rule.choose(torch.tensor(rewards), LENGTHS[: len(rewards)], count).tolist()


class Best(DownSampling):
    """A rule of one's own that takes samples for granted."""

    def ranking(self, rewards: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
        assert rewards.max() >= rewards.min()
        return rewards.argsort(descending=True)


def test_a_rule_is_not_asked_about_no_samples() -> None:
    assert kept(Best(6), [NAN, NAN, NAN], 2) == [0, 1]
    assert kept(Best(6), [NAN, 1.0, 2.0], 2) == [1, 2]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [2, 3, 5, 6])
def test_max_variance_is_the_best_of_all_subsets(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    levels = 2 + seed % 4  # 2: right or wrong
    rewards = torch.randint(levels, (6,), generator=generator).double() / 3 - 0.2
    best = max(float(rewards[list(own)].var(correction=0)) for own in combinations(range(6), count))
    own = MaxVariance(6).choose(rewards, LENGTHS, count)
    assert len(set(own.tolist())) == count
    assert own.tolist() == sorted(own.tolist())
    assert float(rewards[own].var(correction=0)) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("others", [0.0, 3.0])
def test_rewards_in_tenths_are_split_like_whole_ones(others: float, dtype: torch.dtype) -> None:
    """Of four whole numbers variances are exact, so that equal ones are told; of tenths they differ by rounding."""
    for seed in range(100):
        whole = torch.randint(4, (6,), generator=torch.Generator().manual_seed(seed)).double()
        tenths = (whole / 10 + others).to(dtype)
        assert torch.equal(MaxVariance(6).choose(tenths, LENGTHS, 4), MaxVariance(6).choose(whole, LENGTHS, 4))


@pytest.mark.parametrize(
    ("rule", "rewards", "count", "expected"),
    [
        (MaxVariance(6), [1, 0, 1, 1, 1, 0], 4, [1, 3, 4, 5]),  # both wrong ones, and as many right ones
        (MaxVariance(6), [0, 0, 0, 1, 0, 0], 4, [0, 1, 3, 5]),  # the only right one; wrong ones are alike
        (MaxVariance(6), [1, 1, 1, 1, 1, 1], 4, [0, 1, 4, 5]),  # nothing to choose by: half each
        (MaxVariance(6), [NAN, 1, NAN, 0, 0, NAN], 4, [0, 1, 3, 4]),
        (MaxReward(6), [1, 0, 2, 1, 0, 1], 3, [0, 2, 3]),
        (MaxVariance(6), [NAN] * 6, 4, [0, 1, 2, 3]),
        (MaxReward(6), [NAN] * 6, 3, [0, 1, 2]),
        (MaxReward(6), [NAN, -1, NAN, NAN, -2, NAN], 3, [0, 1, 4]),
        (Shortest(6), [1, 0, 2, 1, 0, 1], 3, [1, 3, 5]),
    ],
)
def test_choices_by_hand(rule: DownSampling, rewards: list[float], count: int, expected: list[int]) -> None:
    assert kept(rule, rewards, count) == expected


def scored(rewards: Tensor, prompts: int) -> ScoredRollout:
    size = len(rewards)
    mask = torch.arange(4) < torch.arange(size)[:, None] % 3 + 1
    rollout = Rollout(
        sequences=torch.arange(size)[:, None].expand(size, 4), prompt_lengths=torch.ones(size, dtype=torch.int64),
        completion_mask=mask, finished=mask[:, 0], sampler_logprobs=torch.zeros(size, 4), rewards=rewards,
    )  # fmt: skip
    rows: list[dict[str, Any]] = [{"prompt": str(i)} for i in range(prompts)]
    return ScoredRollout(rollout, rows, [str(i) for i in range(size)], {"likes": rewards.clone()}, 0)


def test_a_rollout_keeps_what_belongs_together_and_says_what_it_dropped() -> None:
    rewards = torch.tensor([0.0, 0.5, 1.0, 0.5, 2.0, 2.0, 2.0, 2.0])
    own = scored(rewards, 2)
    found = down_sample(own, MaxVariance(4), 2)
    assert found.tolist() == own.rollout.rewards.tolist() == own.reward_table["likes"].tolist() == [0, 1, 2, 2]
    assert own.completions == ["0", "2", "4", "7"]
    assert own.rollout.sequences[:, 0].tolist() == [0, 2, 4, 7]
    assert own.num_generations == 2
    numbers = {name.removeprefix("downsampling/"): float(value) for name, value in own.downsampling.items()}
    assert numbers == pytest.approx({
        "drawn/reward": 1.25, "drawn/reward_std": (0.5 / 3) ** 0.5 / 2, "drawn/frac_reward_zero_std": 0.5,
        "dropped/reward": 1.25, "dropped/mean_length": 7 / 4,
    })  # fmt: skip


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least sampling.num_generations=8 samples, .*got num_samples=6"):
        RolloutOptions(downsampling=MaxReward(6)).for_training(SamplingParams(num_generations=8))
    with pytest.raises(ValueError, match="partial_rollout_steps=4 does not work with downsampling=Shortest"):
        RolloutOptions(downsampling=Shortest(6), partial_rollout_steps=4, num_slots=2)
    with pytest.raises(ValueError, match=r"rollout\.downsampling is of training"):
        RolloutOptions(downsampling=Shortest(6)).for_evaluation(SamplingParams())
    with pytest.raises(ValueError, match="num_samples must be at least 2, got num_samples=1"):
        MaxVariance(1)


@pytest.mark.parametrize("rule", [None, MaxVariance(4)])
def test_where_nothing_is_dropped_nothing_changes(rule: DownSampling | None) -> None:
    own = scored(torch.rand(8), 2)
    before = vars(own).copy()
    assert down_sample(own, rule, 4) is own.rollout.rewards
    assert all(value is before[name] for name, value in vars(own).items())


@pytest.mark.parametrize("order", [
    [0, 1], [0, 0, 0, 0], [0, 1, -1, 2], [0, 1, 2, 6], [], [0.0, 1.0, 2.0, 3.0], [True, False, True, True],
    [[0, 1, 2, 3]], [0, 1, 2, 3, 3],
])  # fmt: skip
def test_a_rule_of_ones_own_that_names_no_samples_is_refused(order: list[Any]) -> None:
    """Too few would make groups across prompts, doubles count a sample twice, -1 is counted from the end."""

    class Mine(DownSampling):
        def ranking(self, rewards: Tensor, lengths: Tensor, count: int) -> Tensor:
            return torch.tensor(order)

    said = r"rollout.downsampling: ranking of Mine returned \[.* for 6 samples, of which 4 are kept: return at least"
    with pytest.raises(ValueError, match=said):
        kept(Mine(6), [1.0] * 6, 4)


def test_a_rule_of_ones_own_may_name_as_many_as_are_kept_or_have_rewards() -> None:
    class Mine(DownSampling):
        def ranking(self, rewards: Tensor, lengths: Tensor, count: int) -> Any:
            return rewards.argsort(descending=True)[:count].to(torch.int32)

    assert kept(Mine(6), [0, 1, 2, 3, 4, 5], 4) == [2, 3, 4, 5]
    assert kept(Mine(6), [NAN, 1, NAN, NAN, NAN, NAN], 4) == [0, 1, 2, 3]
    assert kept(Mine(6), [NAN] * 6, 4) == [0, 1, 2, 3]
