"""Rollout metrics by hand and against brute force."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_rl_lightning.metrics import (
    ConfidenceInterval,
    accuracy,
    confidence_interval,
    mean_accuracy,
    pass_at_k,
    rejection_rate,
    repetition_rates,
    rollout_metrics,
    token_mask_rate,
)
from sparse_rl_lightning.metrics.intervals import mean, ratio, share, tail
from sparse_rl_lightning.records import KVUsage, Rollout, ScoredRollout


def boolean(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def usage(stored: list[float], full: list[float], integral: list[float], full_integral: list[float]) -> KVUsage:
    return KVUsage(*map(torch.tensor, (stored, full, integral, full_integral)), 300, 1000, 40)


def scored_rollout(**fields: Any) -> ScoredRollout:
    """Two prompts, two samples each; completions of 4, 2, 3 and 1 tokens after prompts of 1 token."""
    mask = boolean([[0, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 1, 0, 0, 0]])
    rollout = Rollout(
        sequences=torch.tensor([[9, 5, 5, 5, 5], [9, 1, 2, 0, 0], [8, 1, 2, 3, 0], [8, 1, 0, 0, 0]]),
        prompt_lengths=torch.ones(4, dtype=torch.int64),
        completion_mask=mask,
        finished=torch.tensor([False, True, True, False]),
        sampler_logprobs=torch.full((4, 5), math.log(0.5)),
        kv=usage([2.0, 2, 2, 1], [4.0, 2, 3, 1], [6.0, 2, 4, 0], [9.0, 2, 5, 0]),
        rewards=torch.tensor([1.0, 0.0, 0.5, 0.5]),
        keep=mask & boolean([[1, 1, 1, 0, 1], [0] * 5, [1] * 5, [1] * 5]),
        **fields,
    )
    table = {"right": torch.tensor([1.0, 0, 1, 0]), "style": torch.tensor([1.0, math.nan, 3, math.nan])}
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    return ScoredRollout(rollout, rows, ["x"] * 4, table, 0, {"rollout": 2.0, "rescoring": 0.5, "rewards": 0.25})


def test_rollout_metrics_by_hand() -> None:
    got = {name: float(value) for name, value in rollout_metrics(scored_rollout()).items()}
    expected = {
        "completions/mean_length": 2.5,
        "completions/min_length": 1,
        "completions/max_length": 4,
        "completions/clipped_ratio": 0.5,
        "completions/mean_terminated_length": 2.5,
        "completions/min_terminated_length": 2,
        "completions/max_terminated_length": 3,
        "completions/repetition_rate": 0,  # a single 4-gram
        "rewards/right/mean": 0.5,
        "rewards/right/std": math.sqrt(1 / 3),
        "rewards/style/mean": 2,
        "rewards/style/std": math.sqrt(2),
        "reward": 0.5,
        "reward_std": math.sqrt(0.5) / 2,
        "frac_reward_zero_std": 0.5,
        "rejection_rate": 0.25,
        "token_mask_rate": 0.3,
        "kv/saving_final": 0.3,
        "kv/saving_integral": 0.25,
        "kv/stored_tokens": 1.75,
        "kv/full_tokens": 2.5,
        "kv/read_share": 0.75,  # without a retriever all that is stored
        "kv/peak_bytes": 300,
        "kv/full_peak_bytes": 1000,
        "kv/prefill_peak_bytes": 40,
        "time/rollout": 2,
        "time/rescoring": 0.5,
        "time/rewards": 0.25,
        "time/tokens_per_second": 5,
    }
    assert got == pytest.approx(expected, abs=1e-6)


def test_mismatch_needs_rescoring_and_sees_rejected_tokens() -> None:
    old = torch.full((4, 5), math.log(0.5))
    old[1, 1] = math.log(0.5e-5)  # of the rejected sequence
    got = rollout_metrics(scored_rollout(old_logprobs=old))
    assert float(got["sampling/importance_sampling_ratio/min"]) == pytest.approx(1e-5, rel=1e-4)
    assert float(got["mismatch/kl_k1"]) == pytest.approx(-math.log(1e-5) / 10, rel=1e-5)
    assert float(got["mismatch/low_ratio_sequences"]) == 0.25
    assert not [name for name in rollout_metrics(scored_rollout()) if name.startswith(("mismatch/", "sampling/"))]


def test_nothing_finished_and_one_sample_per_prompt() -> None:
    scored = scored_rollout()
    scored.rollout.finished[:] = False
    scored.rows = [{"prompt": letter} for letter in "abcd"]
    got = rollout_metrics(scored)
    assert got["completions/mean_terminated_length"] == 0
    assert got["completions/clipped_ratio"] == 1
    assert "reward_std" not in got


def test_prompts_whose_samples_all_have_the_same_reward() -> None:
    scored = scored_rollout()
    scored.rollout.rewards = torch.tensor([0.1, 0.1, 0.5, 0.5])
    got = rollout_metrics(scored)
    assert got["frac_reward_zero_std"] == 1
    assert got["reward_std"] == 0


def test_every_logged_key_is_in_the_table_of_the_documentation() -> None:
    from sparse_rl_lightning.metrics import rollout as module

    documented = {line.split()[0] for line in (module.__doc__ or "").splitlines() if len(line.split()) > 2}
    logged = rollout_metrics(scored_rollout(old_logprobs=torch.zeros(4, 5)))
    names = {name.replace("/right/", "/{function}/").replace("/style/", "/{function}/") for name in logged}
    assert names <= documented
    assert len(names) == 38


def test_rejection_counts_sequences_without_any_token_left() -> None:
    mask = boolean([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    keep = boolean([[0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 0, 0]])
    assert float(rejection_rate(keep, mask)) == pytest.approx(1 / 3)  # the last one is no completion at all
    assert float(token_mask_rate(keep, mask)) == pytest.approx(4 / 6)
    assert float(rejection_rate(mask, mask)) == float(token_mask_rate(mask, mask)) == 0


def brute_force_repetition(tokens: list[int], n: int) -> float:
    phrases = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return sum(phrase in phrases[:i] for i, phrase in enumerate(phrases)) / max(1, len(phrases))


def test_repetition_by_hand() -> None:
    rows = [[7, 7, 7, 7, 7, 7, 7], [7, 1, 2, 1, 2, 1, 2], [7, 1, 2, 3, 4, 5, 6], [7, 1, 1, 0, 0, 0, 0]]
    sequences = torch.tensor(rows)
    mask = boolean([[0, 1, 1, 1, 1, 1, 1]] * 3 + [[0, 1, 1, 0, 0, 0, 0]])
    assert repetition_rates(sequences, mask).tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert repetition_rates(sequences, mask, n=1).tolist() == pytest.approx([5 / 6, 4 / 6, 0, 1 / 2])
    assert repetition_rates(sequences[:, :3], mask[:, :3]).tolist() == [0] * 4
    with pytest.raises(ValueError, match="n=0"):
        repetition_rates(sequences, mask, n=0)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_repetition_is_that_of_brute_force(completions: list[list[int]], n: int, prompt: int) -> None:
    width = prompt + max(map(len, completions)) + 2
    sequences = torch.zeros(len(completions), width, dtype=torch.int64)
    mask = torch.zeros(len(completions), width, dtype=torch.bool)
    for row, tokens in enumerate(completions):
        sequences[row, prompt : prompt + len(tokens)] = torch.tensor(tokens)
        mask[row, prompt : prompt + len(tokens)] = True
    expected = [brute_force_repetition(tokens, n) for tokens in completions]
    assert repetition_rates(sequences, mask, n).tolist() == pytest.approx(expected)


def test_a_mean_has_the_interval_of_a_mean() -> None:
    values = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0])
    found = mean(values, torch.arange(5))
    error = 1.959964 * float(values.double().std()) / math.sqrt(5)
    assert found == pytest.approx((2.8, 2.8 - error, 2.8 + error))


def test_samples_of_a_problem_are_not_independent() -> None:
    """Copies of every sequence change nothing."""
    over, under, problems = torch.tensor([3.0, 1.0, 4.0]), torch.tensor([4.0, 2.0, 5.0]), torch.arange(3)
    copied = ratio(over.repeat_interleave(4), under.repeat_interleave(4), problems.repeat_interleave(4))
    assert copied == pytest.approx(ratio(over, under, problems))


def test_a_share_has_an_interval_where_it_is_0() -> None:
    value, low, high = share(torch.zeros(64), torch.arange(64))
    assert (value, low) == (0, pytest.approx(0, abs=1e-12))
    assert high == pytest.approx(1.959964**2 / (64 + 1.959964**2))


def test_one_problem_says_nothing_of_others() -> None:
    found = ratio(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]), torch.zeros(2, dtype=torch.long))
    assert found == (0.75, -math.inf, math.inf)
    assert tail(torch.rand(9), torch.zeros(9, dtype=torch.long)).value > 0


def test_coverage() -> None:
    """Of texts with levels of their own some 95 % of the intervals hold the truth: tokens of a text are alike."""
    draws = np.random.default_rng(0)
    levels = draws.normal(size=(20_000, 1)) + 0.5 * draws.normal(size=(20_000, 60))
    truths = {"tail": float(np.quantile(levels, 0.05)), "ratio": float((levels > 0).mean())}
    held = {"tail": 0, "ratio": 0}
    for _ in range(400):
        values = torch.from_numpy(draws.normal(size=(200, 1)) + 0.5 * draws.normal(size=(200, 60)))
        mask = torch.from_numpy(np.arange(60) < draws.integers(10, 60, size=(200, 1)))
        problems = torch.arange(200)[:, None].expand(200, 60)[mask]
        found = {"tail": tail(values[mask], problems), "ratio": mean(values[mask] > 0, problems)}
        for name, (_, low, high) in found.items():
            held[name] += low <= truths[name] <= high
    assert 0.91 < held["tail"] / 400 < 0.985
    assert 0.91 < held["ratio"] / 400 < 0.985


def test_pass_at_k_is_the_mean_over_all_subsets() -> None:
    correct = torch.rand(9, 6) < torch.linspace(0, 1, 9)[:, None]
    for k in range(1, 7):
        subsets = list(combinations(range(6), k))
        expected = torch.stack([correct[:, list(subset)].any(dim=1) for subset in subsets]).double().mean(dim=0)
        torch.testing.assert_close(pass_at_k(correct, k), expected)


@pytest.mark.parametrize("k", [0, 4])
def test_k_must_fit_the_samples(k: int) -> None:
    with pytest.raises(ValueError, match=rf"between 1 and the 3 samples of a problem, got k={k}"):
        pass_at_k(torch.ones(2, 3, dtype=torch.bool), k)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(15, 100, 0.0931, 0.2328), (0, 30, 0.0, 0.1135), (30, 30, 0.8865, 1.0), (250, 500, 0.4564, 0.5436)],
)
def test_interval_of_a_proportion_is_wilsons(right: int, count: int, low: float, high: float) -> None:
    """Newcombe 1998, and the closed form at 0 and 1: n / (n + z^2)."""
    scores = torch.tensor([1.0] * right + [0.0] * (count - right))
    assert confidence_interval(scores) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_the_mean_lies_within_its_interval_in_the_last_bit_too() -> None:
    """At 0 and 1, where rounding moves a bound past the mean and a picture's error bars would be negative."""
    for count in range(1, 200):
        for score in (0.0, 1.0):
            low, high = confidence_interval(torch.full((count,), score))
            assert low <= score <= high


def test_interval_holds_what_it_promises() -> None:
    """30 problems of their own difficulty, 32 samples each: about 95 % of the intervals hold the true mean."""
    hits = 0
    for _ in range(400):
        difficulty = torch.rand(30)
        low, high = confidence_interval((torch.rand(30, 32) < difficulty[:, None]).double().mean(dim=1))
        hits += low <= 0.5 <= high
    assert 0.91 <= hits / 400 <= 0.99


def test_samples_that_agree_are_worth_no_more_than_one() -> None:
    once = (torch.rand(40, 1) < 0.5).expand(40, 32)
    assert confidence_interval(once.double().mean(dim=1)) == pytest.approx(confidence_interval(once[:, 0].double()))


def test_accuracy_of_a_benchmark() -> None:
    correct = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
    found = accuracy(correct)
    assert (found.num_problems, found.num_samples, found.mean) == (3, 5, pytest.approx(0.4))
    assert found.pass_at == {
        1: pytest.approx(0.4), 2: pytest.approx(1.4 / 3), 4: pytest.approx(1.8 / 3), 5: pytest.approx(2 / 3)
    }  # fmt: skip
    assert 0 < found.low < 0.4 < found.high < 1
    with pytest.raises(ValueError, match="at least one problem"):
        accuracy(torch.zeros(0, 4, dtype=torch.bool))


def test_mean_is_unweighted() -> None:
    large = accuracy(torch.ones(1000, 1, dtype=torch.bool))
    small = accuracy(torch.zeros(10, 1, dtype=torch.bool))
    mean, low, high = mean_accuracy([large, small])
    assert mean == 0.5
    assert low == pytest.approx(0.5 - (1 - large.low) / 2)
    assert high == pytest.approx(0.5 + small.high / 2)


# ---------------------------------------------------------------- copies of a problem


def test_copies_of_a_problem_are_one_problem() -> None:
    """Four problems written down 32 times, one of them right: Wilson's interval of 1 of 4, by hand.

    z = 1.96, p = 1/4, n = 4: (p + z^2/2n -+ z sqrt(p (1 - p) / n + z^2/4n^2)) / (1 + z^2/n).
    """
    scores = torch.tensor([0.0, 1.0, 0.0, 0.0])
    low, high = confidence_interval(scores.repeat_interleave(32), torch.arange(4).repeat_interleave(32))
    assert (low, high) == (pytest.approx(0.0456, abs=1e-4), pytest.approx(0.6994, abs=1e-4))
    assert (low, high) == pytest.approx(confidence_interval(scores))
    correct = (scores == 1).repeat_interleave(32)[:, None]
    found = accuracy(correct, torch.arange(4).repeat_interleave(32))
    assert (found.num_problems, found.mean, found.low, found.high) == (
        128,
        0.25,
        pytest.approx(low),
        pytest.approx(high),
    )


def test_copies_in_unequal_numbers_weigh_as_they_are_many() -> None:
    """A right three times and B wrong once: mean 3/4, and 16 / (9 + 1) = 1.6 problems as sure as equal ones."""
    low, high = confidence_interval(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([7, 7, 7, -2]))
    z, n, p = 1.959964, 1.6, 0.75
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert low == pytest.approx((p + z**2 / (2 * n) - half) / (1 + z**2 / n), abs=1e-5)
    assert high == pytest.approx((p + z**2 / (2 * n) + half) / (1 + z**2 / n), abs=1e-5)


def test_copies_that_differ_by_chance_are_averaged() -> None:
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    copies = torch.tensor([0, 0, 1, 1, 2, 2])
    assert confidence_interval(scores, copies) == pytest.approx(confidence_interval(torch.tensor([0.5, 1.0, 0.0])))


def test_copies_are_found_in_whatever_batches_they_come() -> None:
    scores, problems = torch.tensor([0.0, 1.0, 0.0, 0.0]).repeat(8), torch.arange(4).repeat(8)
    interval = ConfidenceInterval()
    for part in torch.arange(32).split(5):
        interval.update(scores[part], problems[part])
    interval.update(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert interval.compute() == pytest.approx(confidence_interval(scores, problems))
    interval.reset()
    assert all(map(math.isnan, interval.compute()))


def test_the_one_sequence_of_a_micro_batch_is_all_of_it() -> None:
    mask = boolean([[0, 1, 1], [0, 0, 0]])
    assert float(rejection_rate(boolean([[1, 0, 0], [1, 1, 1]]), mask)) == 1.0
    assert float(rejection_rate(mask, mask)) == 0.0
