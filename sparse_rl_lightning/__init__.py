"""Sparse-RL Lightning: reinforcement learning of language models on rollouts with an evicted KV cache."""

__version__ = "0.1.0.dev0"
