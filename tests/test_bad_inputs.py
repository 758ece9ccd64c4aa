"""Every row of docs/bad_inputs.md: the input is evaluated here, and the message is the one that is printed there.

``python tests/test_bad_inputs.py`` writes the page anew after a message has changed.
"""

# ruff: noqa: F401  # the inputs below use these names

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_rl_lightning import ReplayGRPO, RolloutSampler, SamplingParams, SparseGRPO
from sparse_rl_lightning.advantages import group_advantages
from sparse_rl_lightning.callbacks import (
    CompletionsTable,
    EmptyRollouts,
    ImportanceReweighting,
    RankWatch,
    RolloutProgress,
    RunSummary,
    SparsityAwareRejection,
    StepGuard,
    ZeroSharding,
)
from sparse_rl_lightning.compressors import RKV, SnapKV, StreamingLLM
from sparse_rl_lightning.data import ArithmeticTasks, RepeatedBlockSampler
from sparse_rl_lightning.losses import kl_penalty, policy_loss
from sparse_rl_lightning.modules import Learner, LoraPolicy, PretrainedPolicy, TinyPolicy
from sparse_rl_lightning.modules.block import BlockPlan
from sparse_rl_lightning.strategies import SparseRLDeepSpeed
from sparse_rl_lightning.testing import tiny_model

PAGE = Path(__file__).parents[1] / "docs" / "bad_inputs.md"
HEAD = """# What wrong input is answered with

Every message says what was given, what is allowed and what to change. `grpo(...)` is `SparseGRPO` with a tiny policy,
`model` a tiny model, `mask` and `logprobs` of shape (2, 3). The rows are made and checked by
`tests/test_bad_inputs.py`; mistakes in configuration files and on the command line are in `tests/test_cli_mistakes.py`.

| input | message |
|---|---|
"""

INPUTS = """
grpo(num_generations=1)
grpo(temperature=0.0)
grpo(beta=-0.1)
grpo(kl_on="tokens")
grpo(steps_per_generation=0)
grpo(num_iterations=0)
grpo(oversampling=0.5)
grpo(reward_weights=[1.0, 2.0])
grpo(reward_timeout=0)
grpo(partial_rollout_steps=0, num_slots=4)
grpo(partial_rollout_steps=8)
grpo(partial_rollout_steps=8, num_slots=4, oversampling=2)
grpo(partial_rollout_steps=8, num_slots=4, keep_pool=False)
grpo(partial_rollout_steps=8, num_slots=4, partial_checkpoint="drop")
grpo(stop_strings="</answer>")
grpo(top_p=0.0)
grpo(top_k=-1)
grpo(min_p=1.5)
grpo(max_completion_length=0)
grpo(kind=ReplayGRPO, replay_objective="both")
grpo(kind=ReplayGRPO, alpha=2.0)
grpo(kind=ReplayGRPO, replay_objective="dense", rescore=False)
BlockPlan(prompts=3, num_generations=2, steps_per_generation=4, num_iterations=1, accumulate=1)
BlockPlan(prompts=4, num_generations=2, steps_per_generation=4, num_iterations=1, accumulate=3)
Learner(micro_batch_tokens=0)
Learner(head_chunk_size=0)
LoraPolicy(TinyPolicy(), r=0)
PretrainedPolicy("./no/such/folder").load()
RKV(budget=0, buffer=4)
RKV(budget=8, buffer=0)
SnapKV(budget=8, buffer=4, window=16)
StreamingLLM(budget=8, buffer=4, num_sinks=-1)
RolloutSampler(model, RKV(budget=8, buffer=4, num_sinks=0, window=2), num_slots=0)
RolloutSampler(model, RKV(budget=8, buffer=4, num_sinks=0, window=2), kv_dtype="int3")
SamplingParams(temperature=-1.0)
SamplingParams(num_generations=0)
SparsityAwareRejection(threshold=2.0)
ImportanceReweighting(mode="word_truncate")
ImportanceReweighting(clip_min=2.0, clip_max=1.0)
ImportanceReweighting(normalize="rollout")
ImportanceReweighting(normalize_clip_max=1.5)
CompletionsTable(every_n_rollouts=0)
CompletionsTable(num_samples=-1)
RunSummary(num_problems=-1)
RunSummary(batch_size=0)
RolloutProgress(refresh_seconds=-1)
ZeroSharding(shadow_dtype="int4")
StepGuard(max_in_a_row=0)
EmptyRollouts(warn_after=0)
EmptyRollouts(few=1.5)
RankWatch(timeout=1)
SparseRLDeepSpeed(stage=4)
SparseRLDeepSpeed(stage=2, offload_parameters=True)
ArithmeticTasks(prompts_per_rollout=0)
RepeatedBlockSampler(range(3), block_size=4)
RepeatedBlockSampler(range(3), block_size=1, repeats=0)
group_advantages(torch.ones(5), num_generations=2)
group_advantages(torch.ones(4), num_generations=2, scale_rewards="rank")
policy_loss(logprobs, logprobs, torch.ones(2), mask, loss_type="ppo")
policy_loss(logprobs, logprobs, torch.ones(2), mask, loss_type="cispo")
policy_loss(logprobs, logprobs, torch.ones(2), mask, loss_type="dr_grpo")
policy_loss(logprobs, logprobs, torch.ones(3), mask)
kl_penalty(logprobs, logprobs, mask, estimator="k4")
""".strip().splitlines()


def no_reward(completions: list[str], **_: Any) -> list[float | None]:
    return [0.0] * len(completions)


def grpo(kind: type[SparseGRPO] = SparseGRPO, **arguments: Any) -> SparseGRPO:
    return kind(TinyPolicy(), RKV(budget=12, buffer=4), no_reward, **arguments)


def message(source: str) -> str:
    """What the evaluation of an input is answered with."""
    names = {"model": tiny_model(), "mask": torch.ones(2, 3, dtype=torch.bool), "logprobs": torch.zeros(2, 3)}
    try:
        eval(source, globals() | names)
    except ValueError as error:
        return " ".join(str(error).split())
    raise AssertionError(f"{source} was accepted")


def row(source: str) -> str:
    text = html.escape(message(source), quote=False).replace("|", "\\|")
    return f"| `{source.replace('|', chr(92) + '|')}` | {text} |"


def test_the_page_has_these_rows() -> None:
    assert len(INPUTS) == len(set(INPUTS)) >= 40
    shown = [
        line.split("` | ")[0].removeprefix("| `") for line in PAGE.read_text().splitlines() if line.startswith("| `")
    ]
    assert shown == INPUTS


@pytest.mark.parametrize("source", INPUTS)
def test_message_is_the_page_s(source: str) -> None:
    assert row(source) in PAGE.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    PAGE.write_text(HEAD + "".join(f"{row(source)}\n" for source in INPUTS), encoding="utf-8")
