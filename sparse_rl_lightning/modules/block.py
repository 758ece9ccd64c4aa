"""A rollout served as micro-batches, several times over, and the arithmetic that must work out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from sparse_rl_lightning.modules.objective import Items
from sparse_rl_lightning.ops.random import hash_bits
from sparse_rl_lightning.types import Rollout


@dataclass(frozen=True)
class BlockPlan:
    """How one rollout becomes optimiser steps: prompts x generations = steps_per_generation x micro-batch.

    Args:
        prompts: Prompts per rollout and rank that are trained on.
        num_generations: Samples per prompt.
        steps_per_generation: Micro-batches the rollout is cut into.
        num_iterations: Passes over the rollout.
        accumulate: Lightning's ``accumulate_grad_batches``.

    Raises:
        ValueError: If a division leaves a rest.
    """

    prompts: int
    num_generations: int
    steps_per_generation: int
    num_iterations: int
    accumulate: int

    def __post_init__(self) -> None:
        if self.sequences % self.steps_per_generation:
            raise ValueError(
                f"{self.prompts} prompts x num_generations={self.num_generations} = {self.sequences} sequences cannot "
                f"be cut into steps_per_generation={self.steps_per_generation} equal micro-batches. Change "
                "data.prompts_per_rollout, model.num_generations or model.steps_per_generation."
            )
        if self.micro_batches % self.accumulate:
            raise ValueError(
                f"steps_per_generation={self.steps_per_generation} x num_iterations={self.num_iterations} = "
                f"{self.micro_batches} micro-batches per rollout are not a multiple of "
                f"accumulate_grad_batches={self.accumulate}. Change trainer.accumulate_grad_batches, or "
                "model.steps_per_generation or model.num_iterations."
            )

    @property
    def sequences(self) -> int:
        """Sequences per rollout and rank."""
        return self.prompts * self.num_generations

    @property
    def micro_batch(self) -> int:
        """Sequences per micro-batch."""
        return self.sequences // self.steps_per_generation

    @property
    def micro_batches(self) -> int:
        """Micro-batches served per rollout, over all passes."""
        return self.steps_per_generation * self.num_iterations

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps per rollout."""
        return self.micro_batches // self.accumulate

    def __str__(self) -> str:
        return (
            f"{self.prompts} prompts x {self.num_generations} generations = {self.steps_per_generation} micro-batches "
            f"x {self.micro_batch} sequences; {self.num_iterations} pass(es), {self.accumulate} micro-batch(es) per "
            f"optimiser step: {self.optimizer_steps} optimiser step(s) per rollout"
        )


class RolloutBlock:
    """One rollout, cut into micro-batches in an order that depends on the seed and the rollout's number alone.

    Args:
        plan: The cuts.
        rollout: All its sequences.
        index: Number of the rollout.
        seed: Of the shuffling.
        count: Counts the items of an optimiser step, given all its sequences.
        cursor: Micro-batches already served.
    """

    def __init__(
        self,
        plan: BlockPlan,
        rollout: Rollout,
        index: int,
        seed: int,
        count: Callable[[Rollout], Items],
        cursor: int = 0,
    ) -> None:
        self.plan, self.rollout, self.index, self.seed, self.cursor = plan, rollout, index, seed, cursor
        self._count = count
        self._items: Items | None = None  # of the optimiser step in progress

    @property
    def is_spent(self) -> bool:
        """Whether every micro-batch has been served."""
        return self.cursor >= self.plan.micro_batches

    def next(self) -> tuple[Rollout, Items]:
        """The next micro-batch, and the items of the optimiser step it belongs to, counted once per step."""
        rows, size, accumulate = self._order(), self.plan.micro_batch, self.plan.accumulate
        if self._items is None or self.cursor % accumulate == 0:
            start = self.cursor - self.cursor % accumulate
            self._items = self._count(self.rollout[rows[start * size : (start + accumulate) * size]])
        own = rows[self.cursor * size : (self.cursor + 1) * size]
        self.cursor += 1
        return self.rollout[own], self._items

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"rollout": self.rollout.state(), "index": self.index, "cursor": self.cursor}

    @classmethod
    def from_state(cls, plan: BlockPlan, state: dict[str, Any], seed: int, count: Callable[[Rollout], Items]) -> Self:
        """The block whose :meth:`state` this is."""
        return cls(plan, Rollout.from_state(state["rollout"]), state["index"], seed, count, state["cursor"])

    def _order(self) -> Tensor:
        """Sequence numbers of all passes, one after the other, each pass shuffled anew."""
        device = self.rollout.sequences.device
        sequence = torch.arange(self.plan.sequences, device=device)
        passes = torch.arange(self.plan.num_iterations, device=device)[:, None]
        return hash_bits(self.seed, self.index, passes, sequence).argsort(dim=1, stable=True).flatten()
