"""Sparse rollout generator on torch and transformers, without Lightning."""

from sparse_rl_lightning.replay.logprobs import replay_logprobs
from sparse_rl_lightning.retrieval.logprobs import RetrievalLogprobs, retrieval_logprobs
from sparse_rl_lightning.rollout.engine.requests import Request
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams
from sparse_rl_lightning.rollout.engine.scheduler import Progress
from sparse_rl_lightning.rollout.generator import Generator
from sparse_rl_lightning.rollout.options import RolloutOptions
from sparse_rl_lightning.rollout.requests import CompletedRequest, RequestSession
from sparse_rl_lightning.rollout.sampler import RolloutSampler
from sparse_rl_lightning.rollout.session import RolloutSession
from sparse_rl_lightning.rollout.teacher_forcing import forced_rollout

__all__ = [
    "CompletedRequest",
    "Generator",
    "Progress",
    "Request",
    "RequestSession",
    "RetrievalLogprobs",
    "RolloutOptions",
    "RolloutSampler",
    "RolloutSession",
    "SamplingParams",
    "forced_rollout",
    "replay_logprobs",
    "retrieval_logprobs",
]
