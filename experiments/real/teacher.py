"""The network that ``LearnedScore`` begins with: it imitates the full cache's attention on the policy's own stories."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from experiments.real.task import Stories, story_reward
from sparse_rl_lightning.calibration import imitate_attention, imitation
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.compressors.learned_score import save_network
from sparse_rl_lightning.modules import SparseGRPO
from sparse_rl_lightning.rollout import SamplingParams

STORIES, SAMPLES, SEED = 64, 2, 1000  # prompts of no run
HORIZON = 8  # the buffer


def network_of(folder: Path, policy: Path) -> Path:
    """The network's file, named by what it depends on, so that runs with another are other runs."""
    sources = [Path(str(file)).read_bytes() for file in (__file__, imitation.__file__)]
    return folder / f"{policy.name}-{sha256(b''.join(sources)).hexdigest()[:8]}.safetensors"


def teach(policy: Path, folder: Path) -> None:
    """Write the network, unless it is there."""
    path = network_of(folder, policy)
    if path.is_file():
        return
    sampling = SamplingParams(num_generations=SAMPLES, max_completion_length=96, seed=SEED)
    module = SparseGRPO(str(policy), FullKV(), [story_reward], sampling=sampling)
    module.configure_model()
    stories = module.roll_out(Stories(num_train=STORIES, seed=SEED).train_rows()).rollout
    network, _ = imitate_attention(module.policy, stories.sequences, stories.lengths, horizon=HORIZON, seed=SEED)
    save_network(network, path)
