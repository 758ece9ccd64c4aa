"""FSDP2's shards in a checkpoint folder: a distributed checkpoint of torch, which any number of ranks reads again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.nn import Module

from sparse_rl_lightning.checkpoints.sharded import TAG, Attempt, Shards
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import raising_disk_errors

MODULE, OPTIMIZER = "module", "optimizer"
ON_CPU = StateDictOptions(cpu_offload=True)


class FSDPShards(Shards):
    """The module's weights and buffers, and the optimizer's state, by name and place in the whole tensor.

    Args:
        strategy: Strategy of the sharded module.
    """

    name = "FSDP2"

    def __init__(self, strategy: ModelParallelStrategy) -> None:
        self.strategy = strategy

    @property
    def module(self) -> Module:
        """The sharded module."""
        assert self.strategy.model is not None
        return self.strategy.model

    def write(self, folder: Path, with_optimizer: bool, attempt: Attempt) -> None:
        """Write this rank's part into a file of its own; rank zero lists what is where."""
        parts: dict[str, Any] = {MODULE: get_model_state_dict(self.module, options=ON_CPU)}
        if with_optimizer:
            parts[OPTIMIZER] = get_optimizer_state_dict(self.module, self.strategy.optimizers, options=ON_CPU)
        attempt.here(lambda: save_parts(parts, folder / TAG))
        if attempt.error is None:
            rank = self.strategy.global_rank
            files = [*(folder / TAG).glob(f"__{rank}_*"), *([folder / TAG / ".metadata"] if rank == 0 else [])]
            attempt.written += [str(path.relative_to(folder)) for path in files]

    def read(self, folder: Path, with_optimizer: bool) -> None:
        """Read weights, and the optimizer's state; what an optimizer has now and had not then stays as it is.

        Raises:
            ValueError: If a weight is missing, or has another shape.
        """
        reader = FileSystemReader(folder / TAG)
        weights = {MODULE: get_model_state_dict(self.module)}
        try:
            with first_failure():
                load(weights, storage_reader=reader)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"{folder / TAG} is of another policy: {error}") from error
        set_model_state_dict(self.module, weights[MODULE])
        if with_optimizer:
            optimizers = self.strategy.optimizers
            state = {OPTIMIZER: get_optimizer_state_dict(self.module, optimizers)}
            with first_failure():
                load(state, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
            set_optimizer_state_dict(self.module, optimizers, state[OPTIMIZER])

    def weights_were_set(self) -> None:
        """Do nothing: the optimizer updates the policy's own weights."""


def save_parts(parts: dict[str, Any], folder: Path) -> None:
    """Write what all ranks have of nested states.

    Raises:
        OSError: On all ranks, if the disk refuses a file of one.
    """
    with first_failure():
        save(parts, storage_writer=_Writer(folder))


@contextmanager
def first_failure() -> Iterator[None]:
    """Raise the error of the rank that failed, which torch wraps, on all ranks, in an exception that nobody catches."""
    try:
        yield
    except CheckpointException as failed:
        rank, (error, _) = next(iter(failed.failures.items()))
        raise (OSError(f"rank {rank}: {error}") if isinstance(error, OSError) else error) from failed


class _Writer(FileSystemWriter):
    """Raises the disk's own errors before torch reports to the other ranks."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with raising_disk_errors():
            return super().write_data(plan, planner)
