"""Rollout metrics by hand and against brute force."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_rl_lightning.metrics import rejection_rate, repetition_rates, rollout_metrics, token_mask_rate
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
    sequences = torch.tensor(
        [[7, 7, 7, 7, 7, 7, 7], [7, 1, 2, 1, 2, 1, 2], [7, 1, 2, 3, 4, 5, 6], [7, 1, 1, 0, 0, 0, 0]]
    )
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
