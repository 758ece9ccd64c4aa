"""The learner's attention under the evictions of the sampler."""

from sparse_rl_lightning.replay.logprobs import replay_logprobs, replay_statistics

__all__ = ["replay_logprobs", "replay_statistics"]
