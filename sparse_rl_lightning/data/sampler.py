"""Prompt blocks in a seeded order, each repeated for as many batches as its rollout is trained on."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence, Sized
from functools import cached_property
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.records import Rows

CONTENT = "content of the prompts"
"""Name of the hash of all rows in a sampler's state."""


class RepeatedBlockSampler(DistributedSampler[Any]):
    """Yields shuffled blocks of prompt indices, every block ``repeats`` times in succession.

    A loader with ``batch_size=block_size`` then sees the same prompts in ``repeats`` batches: the first is rolled
    out, all are trained on. A prompt belongs to one rank only, so its group of samples stays together. Prompts that
    do not fill a block on every rank are left out of that epoch.

    The sampler is one stream of epochs and remembers its place: a new iterator continues where the last one stopped,
    and after a finished epoch with the next one. So a block is never cut, whatever Lightning does at the end of an
    epoch or after a restart, when its own epoch count can run ahead of the data and its iterator can be made before
    the sampler learns the epoch. Lightning does not replace it because it is a ``DistributedSampler``.

    Args:
        dataset: The prompts; only their number is read, and all of them for a checkpoint.
        block_size: Prompts per rank and rollout.
        repeats: Batches per rollout: steps_per_generation x num_iterations.
        num_replicas: Number of ranks.
        rank: Rank of this process.
        seed: Seed that decides the order, together with the epoch.
        lengths: Length of every prompt; several ranks share a block's prompts so that each gets about the same total.

    Raises:
        ValueError: If a number is out of range or the prompts do not fill one block on every rank.
    """

    def __init__(
        self,
        dataset: Sized,
        block_size: int,
        repeats: int = 1,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        lengths: Sequence[int] | None = None,
    ) -> None:
        check_number("block_size", block_size, least=1)
        check_number("repeats", repeats, least=1)
        super().__init__(cast("Dataset[Any]", dataset), num_replicas, rank, shuffle=True, seed=seed, drop_last=True)
        self.num_rows = len(dataset)
        self.block_size = block_size
        self.repeats = repeats
        self.num_blocks = self.num_rows // (block_size * num_replicas)
        self.position = 0  # indices already yielded in this epoch
        self._lengths = torch.zeros(self.num_rows) if lengths is None else torch.tensor(list(lengths))
        if self.num_blocks == 0:
            raise UserError(
                f"{self.num_rows} prompts do not fill one block: {block_size} prompts per rollout on each of "
                f"{num_replicas} rank(s) are needed. Add prompts or lower prompts_per_rollout."
            )

    def __len__(self) -> int:
        """Indices per epoch on this rank, repetitions included."""
        return self.num_blocks * self.repeats * self.block_size

    def __iter__(self) -> Iterator[int]:
        if self.position >= len(self):
            self.epoch, self.position = self.epoch + 1, 0
        for index in self.epoch_indices(self.epoch)[self.position :]:
            self.position += 1
            yield index

    def epoch_indices(self, epoch: int) -> list[int]:
        """This rank's indices of one epoch, repetitions included."""
        order, places = self._blocks(epoch)
        mine = order.gather(1, places)
        indices: list[int] = mine.repeat_interleave(self.repeats, dim=0).flatten().tolist()
        return indices

    @property
    def places(self) -> list[int]:
        """Positions, within the block of all ranks in one rank's order, of the prompts last yielded on this rank."""
        block = max(0, self.position - 1) // (self.block_size * self.repeats)
        positions: list[int] = self._blocks(self.epoch)[1][block].tolist()
        return positions

    def _blocks(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Prompts (blocks, ranks x block_size) of all ranks, and the places (blocks, block_size) of this rank's."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(self.num_rows, generator=generator)
        order = order[: self.num_blocks * self.num_replicas * self.block_size].view(self.num_blocks, -1)
        if self.num_replicas == 1:
            return order, torch.arange(self.block_size).expand(self.num_blocks, -1)
        longest_first = self._lengths[order].argsort(dim=1, descending=True, stable=True)
        seats = (self.rank, self.num_replicas - 1 - self.rank)  # dealt out back and forth: 0, 1, 2, 2, 1, 0, ...
        return order, longest_first[:, [turn * self.num_replicas + seats[turn % 2] for turn in range(self.block_size)]]

    def set_epoch(self, epoch: int) -> None:
        """Start with this epoch; has no effect on a stream that has already begun."""
        if self.position == 0:
            self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream, the same on all ranks, and the numbers it depends on."""
        return {"epoch": self.epoch, "position": self.position, "layout": self._layout()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the place of :meth:`state_dict`; with other ranks or repetitions, at the next whole block.

        Raises:
            ValueError: If it was saved with other prompts or another seed, or on as many ranks with other blocks.
        """
        saved, mine = state["layout"], self._layout()
        changed = {name for name in mine if saved.get(name) != mine[name]}
        if changed and changed <= {
            "steps per rollout",
            *(("ranks", "prompts per rollout") if "ranks" in changed else ()),
        }:
            self.epoch, self.position = state["epoch"], self._position_after(state["position"], saved)
        elif changed:
            differences = ", ".join(
                f"{name} was {saved.get(name)} and is {mine[name]}" for name in mine if name in changed
            )
            raise UserError(
                f"The checkpoint's place in the data fits another run: {differences}. Resume with the same data and "
                "numbers, or start a new run from the checkpoint's weights."
            )
        else:
            self.epoch, self.position = state["epoch"], state["position"]

    @cached_property
    def _content(self) -> str:
        digest, rows = hashlib.sha256(), cast("Sequence[Any]", self.dataset)
        for index in range(self.num_rows):
            digest.update(json.dumps(rows[index], default=lambda unknown: type(unknown).__name__).encode())
        return digest.hexdigest()[:12]

    def _position_after(self, position: int, saved: dict[str, int]) -> int:
        """The start of the first block whose prompts are all new; a block that was begun counts as done."""
        size = saved["prompts per rollout"]
        prompts = math.ceil(position / (size * saved["steps per rollout"])) * size * saved["ranks"]
        return math.ceil(prompts / (self.block_size * self.num_replicas)) * self.block_size * self.repeats

    def _layout(self) -> dict[str, Any]:
        return {
            "number of prompts": self.num_rows,
            "prompts per rollout": self.block_size,
            "steps per rollout": self.repeats,
            "ranks": self.num_replicas,
            "seed": self.seed,
            CONTENT: self._content,
        }


def places_of_rank(trainer: Trainer, prompts: int) -> list[int] | None:
    """Where a rank's prompts of a training block stand among those of all ranks, None where the loader deals otherwise.

    A prompt is then drawn alike on any number of ranks.
    """
    sampler = getattr(trainer.train_dataloader, "sampler", None)
    return sampler.places if isinstance(sampler, RepeatedBlockSampler) and sampler.block_size == prompts else None


def rows_of(loader: Any) -> Rows:
    """All rows of a training loader.

    Raises:
        ValueError: If its data set cannot be looked at as a whole.
    """
    data: Any = getattr(loader, "dataset", None)
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UserError(
            "The longest training prompt must be known before the first rollout: fit with a data module of "
            f"prompts (PromptDataModule), or with a loader over a list of rows, not over {type(data).__name__}."
        )
    return [data[index] for index in range(len(data))]
