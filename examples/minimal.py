"""Reinforcement learning under a compressed KV cache, in plain torch, on one screen.

A tiny Llama with random weights learns to count: the reward is the share of its tokens that are the successor of the
token before. Rollouts keep 12 entries per KV head (R-KV), the learner attends to everything. What separates the two is
corrected: each token is weighted by dense / sparse probability, clipped (Sparse-RL, arXiv 2601.10079).

    python examples/minimal.py
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparse_rl_lightning.advantages import group_advantages
from sparse_rl_lightning.compressors import RKV
from sparse_rl_lightning.corrections import consistency_log_ratio, importance_weights
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.losses import policy_loss
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams

DIGITS, STEPS, SAMPLES = 10, 40, 8
seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0

# 1. A policy: any causal language model of transformers with rotary positions.
torch.manual_seed(seed)
policy = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=DIGITS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )
)  # fmt: skip
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)

# 2. A sampler: it reads the policy's live weights, and evicts from the cache what the compressor scores low.
compressor = RKV(budget=12, buffer=4, num_sinks=1, window=4)
sampler = RolloutSampler(policy, compressor)
prompts = [[first] for first in range(DIGITS)]


def rewards_of(rollout: Rollout) -> torch.Tensor:
    """The share (B,) of the completion's tokens that are the successor of the token before."""
    before, after = rollout.sequences[:, :-1], rollout.sequences[:, 1:]
    is_right = (after == (before + 1) % DIGITS) & rollout.completion_mask[:, 1:]
    return is_right.sum(dim=1) / rollout.completion_mask.sum(dim=1)


for step in range(STEPS):
    # 3. Sample, under the compressed cache. Random numbers are keyed by seed and sequence.
    params = SamplingParams(num_generations=SAMPLES, max_completion_length=24, seed=seed * STEPS + step)
    rollout = sampler.generate(prompts, params)
    mask = rollout.completion_mask

    # 4. Score: rewards, and each sample's advantage over the other samples of its prompt.
    rewards = rewards_of(rollout)
    advantages = group_advantages(rewards, SAMPLES)

    # 5. Loss: log-probs of the dense policy, its ratio to the policy before the update (here 1), and to the sampler.
    logprobs, _ = sequence_logprobs(policy, rollout.sequences, mask)
    old = logprobs.detach()
    log_ratio = consistency_log_ratio(old, rollout.sampler_logprobs, mask)
    weights = importance_weights(log_ratio, mask, clip_max=1.5)
    loss = policy_loss(logprobs, old, advantages, mask, weights=weights).loss

    # 6. Step.
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0 or step == STEPS - 1:
        apart, kept = log_ratio[mask].abs().mean(), 1 - rollout.kv.saving_final
        print(f"step {step:2}: reward {rewards.mean():.2f}, {kept:.0%} of the cache kept, |log xi| {apart:.3f}")
