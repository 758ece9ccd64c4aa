"""Problems solved under a cache: the one measure of accuracy of the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.evaluation.evaluate import draw_from, evaluate
from sparse_rl_lightning.records import Rollout, Rows
from sparse_rl_lightning.rewards import arithmetic_reward
from sparse_rl_lightning.rewards.scoring import Rewards


def solved(
    sampler: RolloutSampler,
    tokenizer: PreTrainedTokenizerBase,
    rows: Rows,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    judge: Rewards | None = None,
) -> float:
    """Share of arithmetic problems that are solved, or the mean reward of a judge.

    Args:
        sampler: Sampler of the policy under the cache.
        tokenizer: The policy's tokenizer.
        rows: Rows that the judge knows, of ``ArithmeticTasks`` without one.
        prompts: Token ids of each row.
        params: How to draw, one sample per row.
        judge: Judge of the answers, None for that of arithmetic.
    """

    def decode(rollout: Rollout) -> list[str]:
        texts: list[str] = tokenizer.batch_decode(rollout.completion_ids, skip_special_tokens=True)
        return texts

    return evaluate(draw_from(sampler, decode, params, prompts), rows, judge or Rewards(arithmetic_reward)).mean or 0.0
