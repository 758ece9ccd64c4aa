"""The sparse rollout generator: knows torch and transformers, not Lightning."""

from sparse_rl_lightning.rollout.replay import replay_logprobs
from sparse_rl_lightning.rollout.sampler import Progress, RolloutSampler
from sparse_rl_lightning.rollout.sampling import SamplingParams

__all__ = ["Progress", "RolloutSampler", "SamplingParams", "replay_logprobs"]
