"""Sampling from a vocabulary of real size: whole rollouts beside ``model.generate``, and what the draw alone takes."""

from __future__ import annotations

import statistics

import torch
from transformers import PreTrainedModel

from benchmarks.common.pages import say
from benchmarks.common.tables import Table, label, median_ratio, met
from benchmarks.rollout.bound import seconds
from benchmarks.rollout.policies import random_policy, random_prompts
from benchmarks.rollout.speed import WHOLE, Rule, Setting, generate_runner, own_runner
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.engine.sampling import draw

SAMPLED = "temperature 1"
DRAWS: dict[str, Rule] = {
    "greedy": {**WHOLE, "temperature": 0.0},
    SAMPLED: WHOLE,
    "top-k 50": {**WHOLE, "top_k": 50},
    "top-p 0.95": {**WHOLE, "top_p": 0.95},
}
RATIO_GOAL = 2.5  # to generate, when sampling
SHARE_GOAL = 0.1  # of a step, for the draw
HEADER = (
    "draw", "ms per step", "generate, ms per step", "ratio to generate", "goal", "met", "draw alone, ms",
    "share of the step", "goal", "met",
)  # fmt: skip


@torch.no_grad()
def draw_alone(policy: PreTrainedModel, prompts: list[list[int]], rule: Rule) -> float:
    """Seconds of a draw from the logits of these prompts, the median of a few."""
    logits = policy(torch.tensor(prompts), logits_to_keep=1).logits[:, 0]
    params, rows = SamplingParams(**rule), torch.arange(len(logits))
    return seconds(lambda: draw(logits, params, rows, rows, rows[:0]), "cpu")


def vocabulary_table(setting: Setting, new_tokens: int, rounds: int) -> Table:
    """Every kind of draw, all contenders in turns."""
    policy = random_policy(setting.shape, torch.float32, "cpu")
    prompts = random_prompts(setting.num_sequences, setting.prompt_length, setting.shape.vocab)
    sampler = RolloutSampler(policy, setting.compressor(), end_token_ids=[])
    per_token = setting.shape.kv_bytes_per_token(torch.float32)
    ours, rival, alone = ({name: list[float]() for name in DRAWS} for _ in range(3))
    runners = {
        name: (own_runner(sampler, prompts, per_token, rule), generate_runner(policy, prompts, rule))
        for name, rule in DRAWS.items()
    }
    for runner in runners[SAMPLED]:
        runner(new_tokens)  # neither's first rollout counts
    for turn in range(rounds):
        for name, rule in DRAWS.items():
            for times, runner in zip((ours[name], rival[name]), runners[name], strict=True):
                times.append(runner(new_tokens).seconds / new_tokens)
            alone[name].append(draw_alone(policy, prompts, rule))
            say(f"vocabulary, round {turn + 1}: {name} {ours[name][-1]:.3f} s, generate {rival[name][-1]:.3f} s")
    note = (
        f"Random Qwen2 ({setting.shape.name}), {setting.shape.vocab:,} tokens, {label(policy.dtype)}, "
        f"{setting.num_sequences} sequences, prompt {setting.prompt_length}, {new_tokens} new tokens; a step is the "
        "whole rollout over its new tokens."
    )
    table = Table("A vocabulary of real size", HEADER, note)
    for name in DRAWS:
        ratio = median_ratio(rival[name], ours[name])
        share = median_ratio(alone[name], ours[name])
        ms = [f"{1e3 * statistics.median(times[name]):.2f}" for times in (ours, rival, alone)]
        judged = (f">= {RATIO_GOAL:g}", met(ratio, RATIO_GOAL)) if name == SAMPLED else ("", "")
        few = (f"{100 * share:.0f} %", f"<= {100 * SHARE_GOAL:.0f} %", met(SHARE_GOAL, share))
        table.add(name, ms[0], ms[1], f"{ratio:.2f}", *judged, ms[2], *few)
    return table
