"""The public path of ``replay_logprobs``; the learner's attention under replay is :mod:`sparse_rl_lightning.replay`."""

from sparse_rl_lightning.replay.logprobs import replay_logprobs

__all__ = ["replay_logprobs"]
