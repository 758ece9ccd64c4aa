"""Which samples of a prompt are trained on, of the more that are drawn."""

from sparse_rl_lightning.downsampling.base import DownSampling, down_sample
from sparse_rl_lightning.downsampling.rules import MaxReward, MaxVariance, Shortest

__all__ = ["DownSampling", "MaxReward", "MaxVariance", "Shortest", "down_sample"]
