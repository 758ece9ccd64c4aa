"""Greedy completions of held-out problems: what a policy is worth, whatever its validation draws."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.pytorch import Trainer

from sparse_rl_lightning.callbacks.outputs.worst_completions import LONGEST_TEXT
from sparse_rl_lightning.records import Rows
from sparse_rl_lightning.rewards.scoring import Rewards
from sparse_rl_lightning.rollout import Generator, SamplingParams
from sparse_rl_lightning.text import prompt_text, shortened


@dataclass
class HeldOutResults:
    """What an evaluation found."""

    means: dict[str, float] = field(default_factory=dict)  # reward by cache, "dense" and "sparse"
    is_binary: bool = True  # all rewards are 0 or 1
    samples: list[dict[str, Any]] = field(default_factory=list)  # of the cache that was evaluated last


def evaluate(
    generator: Generator, judge: Rewards, sampling: SamplingParams, rows: Rows, batch_size: int, num_samples: int
) -> HeldOutResults:
    """Mean reward of one greedy completion per row, by cache; the same on every rank.

    Args:
        generator: Draws.
        judge: Its first reward function counts.
        sampling: Limits of the completions.
        rows: Problems.
        batch_size: Problems completed at the same time.
        num_samples: Completions to keep.
    """
    found = HeldOutResults()
    for cache in ("dense", "sparse") if generator.is_sparse else ("dense",):
        found.samples = []
        greedy = replace(sampling, num_generations=1, temperature=0.0)
        judged = _judged(generator, judge, greedy, rows, cache, batch_size, found.samples, num_samples)
        rewards = [reward for reward in judged if not math.isnan(reward)]
        found.is_binary = found.is_binary and set(rewards) <= {0.0, 1.0}
        if rewards:
            found.means[cache] = sum(rewards) / len(rewards)
    return found


def _judged(
    generator: Generator,
    judge: Rewards,
    greedy: SamplingParams,
    rows: Rows,
    cache: str,
    batch_size: int,
    samples: list[dict[str, Any]],
    num_samples: int,
) -> list[float]:
    """The first reward function's word on every completion; the first completions become the samples."""
    rewards: list[float] = []
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        scored = generator.generate(batch, greedy, dense=cache == "dense")
        judge(scored)
        new = next(iter(scored.reward_table.values())).tolist()
        for row, text, reward in zip(batch, scored.completions, new, strict=True):
            if len(samples) < num_samples:
                samples.append(_sample(cache, row, text, reward))
        rewards += new
    generator.sampler(dense=cache == "dense").release()  # the memory back, and training's pool gets its own size
    return rewards


def _sample(cache: str, row: dict[str, Any], text: str, reward: float) -> dict[str, Any]:
    answer = row.get("answer")
    return {
        "cache": cache,
        "reward": reward,
        "prompt": shortened(prompt_text(row["prompt"]), LONGEST_TEXT),
        "completion": shortened(text, LONGEST_TEXT),
        "answer": None if answer is None else shortened(str(answer), LONGEST_TEXT),
    }


def held_out_rows(trainer: Trainer, count: int) -> Rows:
    """The first ``count`` validation rows of the data module, or of the loader that ``fit`` was given."""
    data = getattr(trainer, "datamodule", None)
    loader = trainer.val_dataloaders if data is None else data.val_dataloader()
    if isinstance(loader, (list, tuple)):
        loader = loader[0] if loader else None
    rows: Rows = []
    for batch in loader or []:
        if len(rows) >= count:
            break
        rows.extend(batch)
    return rows[:count]
