"""The evaluator by hand: batches in order, judged and added up, drawn by a sampler alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.evaluation.evaluate import Scores, draw_from, evaluate
from sparse_rl_lightning.evaluation.problems import problem_numbers
from sparse_rl_lightning.records import Rollout, Rows, ScoredRollout
from sparse_rl_lightning.testing import tiny_model

ROWS: Rows = [{"prompt": text, "answer": text} for text in "abcde"]


def drawn(rows: Rows) -> ScoredRollout:
    """Two completions per row, of as many tokens as the row's letter says; the second one is cut off."""
    lengths = torch.tensor([ord(row["prompt"]) - ord("a") + 1 for row in rows for _ in range(2)])
    mask = torch.arange(6) < lengths[:, None]
    rollout = Rollout(
        sequences=mask.long(), prompt_lengths=torch.zeros_like(lengths), completion_mask=mask,
        finished=torch.arange(len(lengths)) % 2 == 0, sampler_logprobs=torch.zeros(mask.shape),
    )  # fmt: skip
    return ScoredRollout(rollout, rows, [row["prompt"] * n for row in rows for n in (1, 2)], {}, 0)


def judge(scored: ScoredRollout) -> Tensor:
    """Pays 1 for a single letter; ``d`` has no reward, ``style`` pays the length."""
    first = [math.nan if "d" in text else float(len(text) == 1) for text in scored.completions]
    scored.reward_table = {"single": torch.tensor(first), "style": torch.tensor([len(t) for t in scored.completions])}
    return scored.reward_table["single"] * 2


@pytest.mark.parametrize("batch_size", [None, 1, 2, 7])
def test_batches_add_up_whatever_their_size(batch_size: int | None) -> None:
    scores = evaluate(drawn, ROWS, judge, batch_size)
    assert scores.rows == ROWS
    assert scores.completions == ["a", "aa", "b", "bb", "c", "cc", "d", "dd", "e", "ee"]
    assert scores.num_samples == 2
    assert scores.lengths.tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert scores.finished.tolist() == [True, False] * 5
    assert scores.table["style"].tolist() == [1, 2] * 5
    assert scores.rewards.nansum() == 2 * 4
    assert scores.first.shape == (5, 2)
    assert (scores.mean, scores.is_binary, scores.kv) == (0.5, True, None)


def test_rewards_that_are_no_accuracy_and_none_at_all() -> None:
    def pays(reward: float) -> Scores:
        def table(scored: ScoredRollout) -> Tensor:
            scored.reward_table = {"only": torch.full((len(scored.completions),), reward)}
            return scored.reward_table["only"]

        return evaluate(drawn, ROWS, table)

    assert (pays(0.5).mean, pays(0.5).is_binary) == (0.5, False)
    assert pays(math.nan).mean is None
    assert evaluate(drawn, ROWS).rewards.isnan().all()


def test_a_samplers_draws_depend_on_the_rows_numbers_and_not_on_batches() -> None:
    sampler = RolloutSampler(tiny_model("qwen3", initializer_range=0.3), FullKV())
    params = SamplingParams(num_generations=2, max_completion_length=5, seed=3)
    prompts = [[5, 6, 7], [8, 9], [5, 6, 7]]

    def texts(size: int, starts: list[int] | None = None) -> list[str]:
        draw = draw_from(sampler, lambda rollout: list(map(str, rollout.completion_ids)), params, prompts, starts)
        return evaluate(draw, ROWS[:3], batch_size=size).completions

    whole = texts(3)
    assert texts(1) == texts(2) == texts(2, [0, 2, 4]) == whole
    assert whole[:2] != whole[4:]  # the same prompt under another number
    assert texts(3, [4, 2, 0]) == [*whole[4:], *whole[2:4], *whole[:2]]


def test_rows_are_copies_by_prompt_and_answer() -> None:
    chat = [{"role": "user", "content": "a"}]
    rows = [{"prompt": "a", "answer": "1", "index": 0}, {"prompt": "a", "answer": "1", "index": 1},
            {"prompt": "a", "answer": "2"}, {"prompt": chat, "answer": "1"}, {"prompt": list(chat), "answer": "1"},
            {"prompt": "\ud800"}]  # fmt: skip
    first, again, other, talk, same, lone = problem_numbers(rows).tolist()
    assert (first, talk) == (again, same)
    assert len({first, other, talk, lone}) == 4
    assert len(set(problem_numbers(rows[:2], whole=True).tolist())) == 2  # an environment may read any column
    assert problem_numbers([]).dtype == torch.int64
