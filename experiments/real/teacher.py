"""The network that ``LearnedScore`` begins with: it imitates the full cache's attention on the policy's own stories."""

from __future__ import annotations

from pathlib import Path

from experiments.real.studies import BUFFER
from experiments.real.task import Stories, story_reward
from sparse_rl_lightning.calibration import imitate_attention
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.compressors.learned_score import save_network
from sparse_rl_lightning.modules import SparseGRPO
from sparse_rl_lightning.rollout import SamplingParams

STORIES, SEED = 64, 1000  # prompts of no run


def teach(policy: Path, path: Path) -> None:
    """Write the network, unless it is there."""
    if path.is_file():
        return
    sampling = SamplingParams(num_generations=2, max_completion_length=96, seed=SEED)
    module = SparseGRPO(str(policy), FullKV(), [story_reward], sampling=sampling)
    module.configure_model()
    stories = module.roll_out(Stories(num_train=STORIES, seed=SEED).train_rows()).rollout
    network, _ = imitate_attention(module.policy, stories.sequences, stories.lengths, horizon=BUFFER, seed=SEED)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_network(network, path)
