"""Sampling from a vocabulary of real size: whole rollouts beside ``model.generate``, and what the draw alone takes."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.common.pages import say
from benchmarks.common.tables import Table, label, median_ratio, met
from benchmarks.rollout.bound import seconds
from benchmarks.rollout.policies import random_policy, random_prompts
from benchmarks.rollout.speed import Setting
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.engine.sampling import draw

DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
}
SAMPLED = "temperature 1"
RATIO_GOAL = 2.5  # to generate, when sampling
SHARE_GOAL = 0.1  # of a step, for the draw
HEADER = (
    "draw", "ms per step", "generate, ms per step", "ratio to generate", "goal", "met", "draw alone, ms",
    "share of the step", "goal", "met",
)  # fmt: skip


@dataclass
class Rollouts:
    """Own engine and ``generate`` on one policy, by equal lengths."""

    policy: PreTrainedModel
    sampler: RolloutSampler
    prompts: list[list[int]]
    new_tokens: int

    @classmethod
    def of(cls, setting: Setting, new_tokens: int) -> Rollouts:
        """A policy of random weights in float32; nothing ends a sequence but its length."""
        policy = random_policy(setting.shape, torch.float32, "cpu")
        prompts = random_prompts(setting.num_sequences, setting.prompt_length, setting.shape.vocab)
        return cls(policy, RolloutSampler(policy, setting.compressor(), end_token_ids=[]), prompts, new_tokens)

    def own(self, rule: dict[str, Any]) -> float:
        """Seconds of a rollout."""
        start = time.perf_counter()
        self.sampler.generate(self.prompts, SamplingParams(max_completion_length=self.new_tokens, **rule))
        return time.perf_counter() - start

    def rival(self, rule: dict[str, Any]) -> float:
        """Seconds of ``model.generate``."""
        ids, is_greedy = torch.tensor(self.prompts), rule.get("temperature") == 0
        start = time.perf_counter()
        self.policy.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=self.new_tokens, max_new_tokens=self.new_tokens,
            pad_token_id=0, do_sample=not is_greedy,
            **({} if is_greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | rule),
        )  # fmt: skip
        return time.perf_counter() - start

    @torch.no_grad()
    def draw_alone(self, rule: dict[str, Any]) -> float:
        """Seconds of a draw from the logits of these prompts, the median of a few."""
        logits = self.policy(torch.tensor(self.prompts), logits_to_keep=1).logits[:, 0]
        params, rows = SamplingParams(**rule), torch.arange(len(logits))
        return seconds(lambda: draw(logits, params, rows, rows, rows[:0]), "cpu")


def vocabulary_table(setting: Setting, new_tokens: int, rounds: int) -> Table:
    """Every kind of draw, all contenders in turns."""
    found = Rollouts.of(setting, new_tokens)
    own: dict[str, list[float]] = {name: [] for name in DRAWS}
    rival: dict[str, list[float]] = {name: [] for name in DRAWS}
    alone: dict[str, list[float]] = {name: [] for name in DRAWS}
    found.own({}), found.rival({})  # neither's first rollout counts
    for turn in range(rounds):
        for name, rule in DRAWS.items():
            own[name].append(found.own(rule) / new_tokens)
            rival[name].append(found.rival(rule) / new_tokens)
            alone[name].append(found.draw_alone(rule))
            say(f"vocabulary, round {turn + 1}: {name} {own[name][-1]:.3f} s, generate {rival[name][-1]:.3f} s")
    note = (
        f"Random Qwen2 ({setting.shape.name}), {setting.shape.vocab:,} tokens, {label(found.policy.dtype)}, "
        f"{setting.num_sequences} sequences, prompt {setting.prompt_length}, {new_tokens} new tokens; a step is the "
        "whole rollout over its new tokens."
    )
    table = Table("A vocabulary of real size", HEADER, note)
    for name in DRAWS:
        ratio = median_ratio(rival[name], own[name])
        share = median_ratio(alone[name], own[name])
        ms = [f"{1e3 * statistics.median(times[name]):.2f}" for times in (own, rival, alone)]
        judged = (f">= {RATIO_GOAL:g}", met(ratio, RATIO_GOAL)) if name == SAMPLED else ("", "")
        few = (f"{100 * share:.0f} %", f"<= {100 * SHARE_GOAL:.0f} %", met(SHARE_GOAL, share))
        table.add(name, ms[0], ms[1], f"{ratio:.2f}", *judged, ms[2], *few)
    return table
