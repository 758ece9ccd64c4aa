"""Lightning data modules that serve prompts in blocks: offline arithmetic, and any JSONL, parquet or hub dataset."""

from sparse_rl_lightning.data.arithmetic import ArithmeticTasks
from sparse_rl_lightning.data.base import PromptDataModule, Row
from sparse_rl_lightning.data.benchmarks import MathBenchmarks
from sparse_rl_lightning.data.gym import ReasoningGym
from sparse_rl_lightning.data.jsonl import JsonlPrompts
from sparse_rl_lightning.data.sampler import RepeatedBlockSampler

__all__ = [
    "ArithmeticTasks",
    "JsonlPrompts",
    "MathBenchmarks",
    "PromptDataModule",
    "ReasoningGym",
    "RepeatedBlockSampler",
    "Row",
]
