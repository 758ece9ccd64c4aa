"""The LightningModules: every step of a batch of prompts between the loader and the loss."""

from sparse_rl_lightning.advantages import AdvantageEstimator
from sparse_rl_lightning.distributed import deepspeed as deepspeed  # its names are known to trainers from now on
from sparse_rl_lightning.learner.forward import LearnerOptions
from sparse_rl_lightning.learner.loss import GRPOLoss, Loss
from sparse_rl_lightning.modules.distill import DistillSparse, SparseAdapter
from sparse_rl_lightning.modules.evaluation import Evaluation
from sparse_rl_lightning.modules.replay_grpo import ReplayGRPO
from sparse_rl_lightning.modules.sparse_grpo import SparseGRPO
from sparse_rl_lightning.modules.warmup import SupervisedWarmup
from sparse_rl_lightning.rollout.options import RolloutOptions

__all__ = [
    "AdvantageEstimator",
    "DistillSparse",
    "Evaluation",
    "GRPOLoss",
    "LearnerOptions",
    "Loss",
    "ReplayGRPO",
    "RolloutOptions",
    "SparseAdapter",
    "SparseGRPO",
    "SupervisedWarmup",
]
