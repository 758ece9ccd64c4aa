"""The sparse rollout generator: knows torch and transformers, not Lightning."""

from sparse_rl_lightning.rollout.forced import forced_rollout
from sparse_rl_lightning.rollout.page_replay import RetrievalLogprobs, page_replay_logprobs, retrieval_logprobs
from sparse_rl_lightning.rollout.replay import replay_logprobs
from sparse_rl_lightning.rollout.run import Progress
from sparse_rl_lightning.rollout.sampler import Completion, RolloutSampler
from sparse_rl_lightning.rollout.sampling import SamplingParams
from sparse_rl_lightning.rollout.session import RolloutSession

__all__ = [
    "Completion",
    "Progress",
    "RetrievalLogprobs",
    "RolloutSampler",
    "RolloutSession",
    "SamplingParams",
    "forced_rollout",
    "page_replay_logprobs",
    "replay_logprobs",
    "retrieval_logprobs",
]
