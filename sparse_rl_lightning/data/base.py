"""The base of all data modules: rows in, blocks of rows out, resumable in the middle of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

import torch
from lightning import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from sparse_rl_lightning.data.sampler import RepeatedBlockSampler
from sparse_rl_lightning.errors import UserError, check_number, check_seed
from sparse_rl_lightning.ops.keyed_random import seed_of

Row: TypeAlias = dict[str, Any]
"""A prompt (text, or a list of chat messages), its bare answer, and whatever else a reward function reads."""


class PlacedRows(list[Row]):
    """Rows with their places in files, for messages."""

    def __init__(self, rows: Iterable[Row], places: Iterable[str]) -> None:
        super().__init__(rows)
        self.places = list(places)


class PromptDataModule(LightningDataModule):
    """Serves ``prompts_per_rollout`` rows at a time; subclasses only write :meth:`train_rows` and :meth:`val_rows`.

    A batch is a list of rows, plain dictionaries with at least ``prompt`` and ``answer``. In training every batch
    is served as often as the attached module trains on one rollout (its ``steps_per_rollout``, 1 if it has none).

    Args:
        prompts_per_rollout: Prompts per rollout and rank. With ``num_generations`` samples each, they are split
            over ``steps_per_generation`` micro-batches.
        val_batch_size: Prompts per validation batch.
        max_val_prompts: Number of rows to validate on, from the first. None takes all.
        seed: Seed of the order of the training prompts, null for that of ``seed_everything``.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        prompts_per_rollout: int = 16,
        val_batch_size: int = 64,
        max_val_prompts: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        check_number("prompts_per_rollout", prompts_per_rollout, least=1, owner=owner)
        check_number("val_batch_size", val_batch_size, least=1, owner=owner)
        check_number("max_val_prompts", max_val_prompts, least=1, owner=owner, or_none=True)
        check_seed(seed, "data.seed")
        self.prompts_per_rollout = prompts_per_rollout
        self.val_batch_size = val_batch_size
        self.max_val_prompts = max_val_prompts
        self._seed = seed
        self._resolved: int | None = None
        self._train: list[Row] | None = None
        self._val: list[Row] | None = None

    @property
    def seed(self) -> int:
        """The configured seed, or that of the process at the first use, or at the setup by a trainer."""
        if self._resolved is None:
            self._resolved = seed_of(self._seed)
        return self._resolved

    def setup(self, stage: str) -> None:
        """Take the seed of the process if none was given, and forget the rows of another."""
        if self.seed != seed_of(self._seed):
            self._resolved = self._train = self._val = None

    def train_rows(self) -> list[Row]:
        """The training prompts, the same on every rank and in every run."""
        raise NotImplementedError(f"{type(self).__name__} must define train_rows().")

    def val_rows(self) -> list[Row]:
        """The validation prompts; none by default."""
        return []

    def train_dataloader(self) -> StatefulDataLoader[list[Row]]:
        """Blocks of training rows, each repeated for one rollout; resuming its state continues with the next batch."""
        if self._train is None:
            self._train = self.train_rows()
        if not self._train:
            raise UserError(f"{type(self).__name__}: the training data has no rows.")
        rows = self._admitted(self._train, "training")
        sampler = RepeatedBlockSampler(
            rows,
            block_size=self.prompts_per_rollout,
            repeats=getattr(self.trainer and self.trainer.lightning_module, "steps_per_rollout", 1),
            num_replicas=self.trainer.world_size if self.trainer else 1,
            rank=self.trainer.global_rank if self.trainer else 0,
            seed=self.seed,
            lengths=[_length(row.get("prompt") or "") for row in rows],  # an environment may give it
        )
        return StatefulDataLoader(
            cast("Dataset[list[Row]]", rows),
            batch_size=self.prompts_per_rollout,
            sampler=sampler,
            num_workers=0,
            collate_fn=list,
            drop_last=True,
            generator=torch.Generator(),
        )

    def val_dataloader(self) -> DataLoader[list[Row]] | list[Any]:
        """The validation rows in their own order, or an empty list without any."""
        if self._val is None:
            self._val = self.val_rows()
        if not self._val:
            if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:  # silence looked like success
                raise UserError(
                    f"{type(self).__name__} has no validation rows, so there is nothing to evaluate on. Give it some: "
                    "data.val_path of JsonlPrompts, data.num_val of ArithmeticTasks, or data.val_benchmarks of "
                    "MathBenchmarks."
                )
            return []
        return in_order(self._admitted(self._val, "validation", self.max_val_prompts), self.val_batch_size)

    def _admitted(self, rows: list[Row], stage: str, most: int | None = None) -> list[Row]:
        """The first rows, as the attached module wants them: it checks all, before anything is drawn."""
        module = self.trainer.lightning_module if self.trainer else None
        admit = getattr(module, "admit", None)
        if admit is None:
            return rows[:most]
        places = getattr(rows, "places", None)
        named = places.__getitem__ if places else f"row {{}} of the {stage} data".format
        admitted: list[Row] = admit(rows[:most], named, stage == "training")
        return admitted

    def test_dataloader(self) -> DataLoader[list[Row]] | list[Any]:
        """The validation rows."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[list[Row]] | list[Any]:
        """The validation rows."""
        return self.val_dataloader()


def check_own_loader(
    trainer: Trainer, admit: Callable[[list[Row], Callable[[int], str], bool], list[Row]], repeats: int
) -> None:
    """Have the rows of a user's own training loader checked, if it shows them; a stream's are as they are read.

    Raises:
        ValueError: If a row is refused, or would be left out.
    """
    if isinstance(getattr(trainer, "datamodule", None), PromptDataModule):
        return
    if repeats > 1:
        rank_zero_warn(
            f"A rollout takes {repeats} batches of the training loader, and draws for the prompts of the first alone. "
            "Give every batch that often in a row, as PromptDataModule does, or the others are never seen."
        )
    rows: Any = getattr(trainer.train_dataloader, "dataset", None)
    if not isinstance(rows, list):
        return
    if len(admit(rows, "row {} of the training data".format, True)) < len(rows):
        raise UserError(
            "rollout.on_long_prompt='skip' needs a data module of prompts (PromptDataModule), because a loader's "
            "batches are fixed. Leave these rows out yourself, or use truncate."
        )


def _length(prompt: Any) -> int:
    """The number of characters of a prompt, text or chat, to compare prompts by."""
    return len(prompt) if isinstance(prompt, str) else sum(len(str(message)) for message in prompt)


def in_order(rows: Sequence[Row], batch_size: int) -> DataLoader[list[Row]]:
    """A loader of rows in the order given.

    It has a generator of its own, like the training loader. Every iterator draws a seed, and one drawn from torch's
    global generator at the end of an epoch would be missing in a run that resumes from a checkpoint there.
    """
    dataset = cast("Dataset[list[Row]]", rows)
    return DataLoader(dataset, batch_size=batch_size, num_workers=0, collate_fn=list, generator=torch.Generator())
