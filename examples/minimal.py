"""Reinforcement learning under a compressed KV cache, in plain torch, on one screen.

A tiny Llama with random weights learns to count: 7 -> 8 9 0 1 ... The reward is the share of its digits that are one
more than the digit before, 0.1 by chance. Rollouts keep at most 12 tokens per KV head: R-KV evicts the others, so the
tokens come from a *sparse* policy. The learner is the *dense* policy, the same weights with a full cache. What
separates the two is corrected: each token counts by its ratio dense / sparse, and a sequence with a token that the
dense policy finds near-impossible is rejected (Sparse-RL, arXiv 2601.10079).

    python examples/minimal.py [SEED]

``SparseGRPO`` in sparse_rl_lightning/modules is this loop with all that a long run needs.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import RKV

NUM_DIGITS, NUM_STEPS, NUM_GENERATIONS, MAX_COMPLETION_LENGTH = 10, 50, 8, 24
seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0

# 1. A policy: any causal language model of docs/models.md. Here token n is the digit n, and nothing ends a completion.
torch.manual_seed(seed)
policy = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=NUM_DIGITS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )
)  # fmt: skip
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)

# 2. A sampler: it reads the policy's live weights, so nothing is copied after a step. A slot of the cache holds
#    budget + buffer tokens; when it is full it is cut to the budget, by the compressor's scores.
sampler = RolloutSampler(policy, RKV(budget=8, buffer=4, num_sinks=1, window=2))
prompts = [[first] for first in range(NUM_DIGITS)]


def rewards_of(sequences: Tensor, mask: Tensor) -> Tensor:
    """The share (B,) of a completion's digits that are one more than the digit before, and 0 after 9."""
    is_right = (sequences[:, 1:] == (sequences[:, :-1] + 1) % NUM_DIGITS) & mask
    return is_right.sum(dim=1) / mask.sum(dim=1)


for step in range(NUM_STEPS):
    # 3. Sample: B = prompts x num_generations sequences of T tokens, a prompt's samples adjacent.
    params = SamplingParams(NUM_GENERATIONS, MAX_COMPLETION_LENGTH, seed=seed * NUM_STEPS + step)
    rollout = sampler.generate(prompts, params)
    sequences = rollout.sequences  # (B, T) prompt and completion
    mask = rollout.completion_mask[:, 1:]  # (B, T - 1) no token is predicted before the first
    sparse = rollout.sampler_logprobs[:, 1:]  # (B, T - 1) of the policy that drew the tokens

    # 4. Score: rewards, and each sample's advantage over the other samples of its prompt (GRPO).
    rewards = rewards_of(sequences, mask)
    groups = rewards.view(-1, NUM_GENERATIONS)
    advantages = (groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + 1e-6)

    # 5. Loss: an ordinary forward pass gives the dense policy's log-probs, with gradient; the policy gradient of its
    #    tokens is corrected for who drew them. Or replay_logprobs(policy, rollout) in place of `dense` lets the
    #    learner forget what the sampler forgot: then the ratio is 1, and there is nothing to correct.
    logits = policy(sequences).logits[:, :-1]
    dense = logits.log_softmax(dim=-1).gather(-1, sequences[:, 1:, None]).squeeze(-1)  # (B, T - 1)
    ratio = (dense.detach() - sparse).exp().masked_fill(~mask, 1.0)
    keep = (ratio > 1e-4).all(dim=1, keepdim=True)  # (B, 1) rejection
    weights = ratio.clamp(max=1.5) * keep * mask  # reweighting
    loss = -(weights * advantages.view(-1, 1) * dense).sum() / mask.sum()

    # 6. Step.
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0 or step == NUM_STEPS - 1:
        apart = f"dense / sparse from {ratio.min():.2f} to {ratio.max():.2f}"
        print(f"step {step:2}: reward {rewards.mean():.2f}, {rollout.kv.saving_final:.0%} of the cache saved, {apart}")

print(f"{sequences[0, 0]} ->", *sequences[0, 1:].tolist())
