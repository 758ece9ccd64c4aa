"""RolloutBlock: a rollout served as micro-batches, several times over, and the plan of its sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Self

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.loss import Denominators
from sparse_rl_lightning.learner.packing import pack, pack_prompts, token_counts
from sparse_rl_lightning.ops.keyed_random import hash_bits
from sparse_rl_lightning.records import Rollout


@dataclass(frozen=True)
class BlockPlan:
    """The steps of one rollout: prompts x generations = steps_per_generation x micro-batch.

    Args:
        prompts: Prompts per rollout and rank to train on.
        num_generations: Samples per prompt.
        steps_per_generation: Number of micro-batches in the rollout.
        num_iterations: Number of passes over the rollout.
        accumulate: Lightning's ``accumulate_grad_batches``.
        packs: Distribute the sequences of an optimizer step over its micro-batches by tokens instead of by number. No
            micro-batch is empty, and the loss of the step is the same, unless it divides by sums of its own.
        shares: Bring samples of a prompt together in the micro-batches of an optimizer step.

    Raises:
        ValueError: If the numbers do not divide evenly.
    """

    prompts: int
    num_generations: int
    steps_per_generation: int
    num_iterations: int
    accumulate: int
    packs: bool = False
    shares: bool = False

    def __post_init__(self) -> None:
        if self.sequences % self.steps_per_generation:
            raise UserError(
                f"{self.prompts} prompts x num_generations={self.num_generations} = {self.sequences} sequences cannot "
                f"be cut into steps_per_generation={self.steps_per_generation} equal micro-batches. Change "
                "data.prompts_per_rollout, model.sampling.num_generations or model.steps_per_generation."
            )
        if self.micro_batches % self.accumulate:
            raise UserError(
                f"steps_per_generation={self.steps_per_generation} x num_iterations={self.num_iterations} = "
                f"{self.micro_batches} micro-batches per rollout are not a multiple of "
                f"accumulate_grad_batches={self.accumulate}. Change trainer.accumulate_grad_batches, or "
                "model.steps_per_generation or model.num_iterations."
            )

    @cached_property
    def sequences(self) -> int:
        """The number of sequences per rollout and rank."""
        return self.prompts * self.num_generations

    @cached_property
    def micro_batch(self) -> int:
        """The number of sequences per micro-batch."""
        return self.sequences // self.steps_per_generation

    @cached_property
    def micro_batches(self) -> int:
        """The number of micro-batches served per rollout, over all passes."""
        return self.steps_per_generation * self.num_iterations

    @cached_property
    def optimizer_steps(self) -> int:
        """The number of optimizer steps per rollout."""
        return self.micro_batches // self.accumulate

    def order(self, index: int, seed: int, device: torch.device) -> Tensor:
        """The sequence indices of all passes over rollout ``index``, one after the other, each pass shuffled anew."""
        sequence = torch.arange(self.sequences, device=device)
        passes = torch.arange(self.num_iterations, device=device)[:, None]
        return hash_bits(seed, index, passes, sequence).argsort(dim=1, stable=True).flatten()

    def later(self, index: int, seed: int, device: torch.device, step: int = 1) -> Sequence[Tensor]:
        """The sequences that the first ``step`` optimizer steps on a rollout do not train on, by micro-batches."""
        first_pass = self.order(index, seed, device)[: self.sequences]
        later = first_pass[step * self.accumulate * self.micro_batch :]
        return torch.split(later.sort().values if self.shares else later, self.micro_batch) if len(later) else ()

    def arranged(self, rows: Tensor, window: Rollout) -> list[Tensor]:
        """The sequences ``rows`` of an optimizer step, the ``window``, by micro-batches: packed, or by prompts."""
        if not self.packs:
            return list(torch.split(rows.sort().values, self.micro_batch))
        if self.shares:
            order = rows.argsort()
            rows, window = rows[order], window[order]
            prompts, prompt_lengths = (rows // self.num_generations).tolist(), window.prompt_lengths.tolist()
            bins = pack_prompts(prompts, token_counts(window), prompt_lengths, self.accumulate)
        else:
            bins = pack(token_counts(window), self.accumulate)
        return [rows[torch.tensor(members, device=rows.device)] for members in bins]

    def __str__(self) -> str:
        share = "on average" if self.packs else "each"
        return (
            f"{self.prompts} prompts x {self.num_generations} generations = {self.steps_per_generation} micro-batches "
            f"of {self.micro_batch} sequences {share}; {self.num_iterations} pass(es), {self.accumulate} "
            f"micro-batch(es) per optimizer step: {self.optimizer_steps} optimizer step(s) per rollout"
        )


plan_of = cache(BlockPlan)
"""The plan of these sizes: most rollouts of a run have the same."""


class RolloutBlock:
    """One rollout, cut into micro-batches in an order that depends only on the seed and the rollout's index.

    Args:
        plan: Sizes of the micro-batches.
        rollout: Rollout with all its sequences.
        index: Index of the rollout.
        seed: Seed of the order.
        count: Function from all sequences of an optimizer step to its denominators.
        cursor: Number of micro-batches already served.
    """

    def __init__(
        self,
        plan: BlockPlan,
        rollout: Rollout,
        index: int,
        seed: int,
        count: Callable[[Rollout], Denominators],
        cursor: int = 0,
    ) -> None:
        self.plan, self.rollout, self.index, self.seed, self.cursor = plan, rollout, index, seed, cursor
        self._count = count
        self._step: tuple[list[Tensor], Denominators] | None = None  # the optimizer step in progress
        self.served: Tensor  # indices of the sequences of the last micro-batch

    @property
    def is_spent(self) -> bool:
        """Whether every micro-batch has been served."""
        return self.cursor >= self.plan.micro_batches

    def next(self) -> tuple[Rollout, Denominators]:
        """The next micro-batch, no wider than its longest, and the denominators of its step, counted once per step."""
        turn = self.cursor % self.plan.accumulate
        if self._step is None or turn == 0:
            self._step = self._begin()
        shares, denominators = self._step
        self.cursor += 1
        self.served = shares[turn]
        return self.rollout[self.served].trimmed(), denominators

    def last_window(self) -> Rollout:
        """The sequences of the optimizer step that the last micro-batch served belongs to."""
        rows = self._rows(self.cursor - 1)
        return replace(self.rollout, topk_ids=None, topk_logprobs=None)[rows]

    def state(self) -> dict[str, Any]:
        """The block for a checkpoint."""
        return {"rollout": self.rollout.state(), "index": self.index, "cursor": self.cursor}

    @classmethod
    def from_state(
        cls, plan: BlockPlan, state: dict[str, Any], seed: int, count: Callable[[Rollout], Denominators]
    ) -> Self:
        """The block with this :meth:`state`."""
        return cls(plan, Rollout.from_state(state["rollout"]), state["index"], seed, count, state["cursor"])

    def _begin(self) -> tuple[list[Tensor], Denominators]:
        """The sequences of every micro-batch of the optimizer step that comes next, and its denominators."""
        rows = self._rows(self.cursor)
        # a step's numbers need nothing of what takes most memory
        window = replace(self.rollout, topk_ids=None, topk_logprobs=None)[rows]
        if self.plan.packs or self.plan.shares:
            return self.plan.arranged(rows, window), self._count(window)
        return list(torch.split(rows, self.plan.micro_batch)), self._count(window)

    def _rows(self, micro_batch: int) -> Tensor:
        """The sequence indices of the optimizer step that has this micro-batch."""
        order = self.plan.order(self.index, self.seed, self.rollout.sequences.device)
        steps = torch.split(order, self.plan.micro_batch * self.plan.accumulate)
        return steps[micro_batch // self.plan.accumulate]
