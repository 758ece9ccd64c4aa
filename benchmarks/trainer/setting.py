"""What all trainers are given alike: policy, prompts, reward, optimizer, numbers of samples and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import ROOT
from benchmarks.rollout.policies import SHAPES, SMALL, random_policy
from sparse_rl_lightning.compressors import RKV
from sparse_rl_lightning.data import ArithmeticTasks
from sparse_rl_lightning.data.base import PromptDataModule, Row
from sparse_rl_lightning.policies import LoadedPolicy, PretrainedPolicy
from sparse_rl_lightning.policies.tiny import character_tokenizer
from sparse_rl_lightning.rewards import arithmetic_reward, worked_steps_reward

WARM_POLICY = ROOT / "runs/warmup/policy"
SHAPE_NAMES = SHAPES | {"8 x 512": SMALL}
FIRST_CHARACTER = 0x4E00  # of an alphabet as large as the vocabulary: one character, one token

Reward = Callable[..., list[float | None]]


@dataclass(frozen=True)
class Setting:
    """One training run; an optimizer step is ``accumulate`` micro-batches.

    ``policy`` names a shape of random weights, or ``quickstart`` for the quickstart's policy and task. Random weights
    never end a completion, so all have ``tokens``.
    """

    name: str
    policy: str
    tokens: int
    budget: int
    buffer: int
    prompts: int  # of a rollout
    generations: int
    micro_batches: int  # of a rollout
    accumulate: int
    warm_up: int  # rollouts before the clock runs
    rollouts: int  # that it counts
    prompt_length: int = 64
    shares: bool = False  # whether our learner reads a prompt once for its samples

    @property
    def sequences(self) -> int:
        """Number of sequences in a rollout."""
        return self.prompts * self.generations

    @property
    def steps_per_rollout(self) -> int:
        """Number of optimizer steps in a rollout."""
        return self.micro_batches // self.accumulate

    @property
    def steps(self) -> int:
        """Number of optimizer steps, warm-up included."""
        return (self.warm_up + self.rollouts) * self.steps_per_rollout

    @property
    def is_quickstart(self) -> bool:
        """Whether this is the quickstart's task."""
        return self.policy == "quickstart"

    def load(self) -> LoadedPolicy:
        """The policy, the same in every process, with its tokenizer."""
        if self.is_quickstart:
            return LoadedPolicy(*PretrainedPolicy(str(WARM_POLICY)).load())
        torch.manual_seed(0)
        shape = SHAPE_NAMES[self.policy]
        # one token more than the policy has: it is the end, which the policy therefore never draws
        tokenizer = character_tokenizer(chr(FIRST_CHARACTER + i) for i in range(shape.vocab - 3))
        tokenizer.add_special_tokens({"eos_token": "<end>"})
        return LoadedPolicy(random_policy(shape, torch.float32, "cpu"), tokenizer)

    def data(self) -> PromptDataModule:
        """The prompts of the run, each once."""
        count = self.prompts * (self.warm_up + self.rollouts)
        if self.is_quickstart:
            return ArithmeticTasks(num_train=count, num_val=0, prompts_per_rollout=self.prompts, seed=1)
        return RandomPrompts(count, self.prompt_length, SHAPE_NAMES[self.policy].vocab, self.prompts)

    def rewards(self) -> list[Reward]:
        """The reward functions."""
        return [arithmetic_reward, worked_steps_reward] if self.is_quickstart else [early_characters]

    def compressor(self) -> RKV:
        """The evicting one."""
        return RKV(budget=self.budget, buffer=self.buffer, num_sinks=0)


# as configs/quickstart.yaml
optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = partial(
    torch.optim.AdamW, lr=4.0e-4, betas=(0.9, 0.98), weight_decay=0.0
)
CLIP = 1.0  # of the gradient's norm


class RandomPrompts(PromptDataModule):
    """Prompts of random characters."""

    def __init__(self, count: int, length: int, vocab: int, prompts_per_rollout: int) -> None:
        super().__init__(prompts_per_rollout)
        self.ids = torch.randint(vocab - 3, (count, length), generator=torch.Generator().manual_seed(0)).tolist()

    def train_rows(self) -> list[Row]:
        """As text."""
        return [{"prompt": "".join(chr(FIRST_CHARACTER + i) for i in ids), "answer": ""} for ids in self.ids]


def early_characters(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    """Share of characters of even number: cheap, and different for every sample."""
    return [sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1) for text in completions]


def rows_in_order(data: PromptDataModule) -> list[Row]:
    """The prompts in the order in which the data module serves them."""
    return [row for block in data.train_dataloader() for row in block]
