"""FSDP2's shards in a checkpoint folder: a distributed checkpoint of torch, which any number of ranks reads again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from sparse_rl_lightning.checkpoints.files import told_by_the_disk
from sparse_rl_lightning.checkpoints.sharded import TAG, Attempt, Shards
from sparse_rl_lightning.errors import UserError

MODULE, OPTIMIZER = "module", "optimizer"


class FSDPShards(Shards):
    """The module's weights and buffers, and the optimizer's state, by name and place in the whole tensor.

    Args:
        strategy: Strategy of the sharded module.
    """

    name = "FSDP2"

    def __init__(self, strategy: ModelParallelStrategy) -> None:
        self.strategy = strategy

    def write(self, checkpoint: dict[str, Any], folder: Path, attempt: Attempt) -> None:
        """Write what Lightning has collected of this rank."""
        parts = {MODULE: checkpoint["state_dict"]}
        for state in checkpoint.get("optimizer_states", []):  # none in a checkpoint of weights alone
            parts[OPTIMIZER] = state
        try:
            save(parts, storage_writer=_Writer(folder / TAG))
        except CheckpointException as failed:  # on all ranks, whichever failed
            rank, (error, _) = next(iter(failed.failures.items()))
            if not isinstance(error, OSError):
                raise error from failed
            attempt.error = OSError(f"rank {rank}: {error}")
            return
        own = self.strategy.global_rank
        files = [*(folder / TAG).glob(f"__{own}_*"), *([folder / TAG / ".metadata"] if own == 0 else [])]
        attempt.written += [str(path.relative_to(folder)) for path in files]

    def fit(self, manifest: dict[str, Any], with_optimizer: bool) -> bool:
        """Always: every rank takes from all files what is its own now."""
        return True

    def read(self, folder: Path) -> None:
        """Read weights, and the optimizer's state where there is an optimizer.

        Raises:
            ValueError: If names or shapes differ.
        """
        reader = FileSystemReader(folder / TAG)
        stored = reader.read_metadata().state_dict_metadata
        optimizers = [own for own in self.strategy.optimizers if any(name.startswith(OPTIMIZER) for name in stored)]
        assert self.strategy.model is not None
        module, optimizer = get_state_dict(self.strategy.model, optimizers)
        parts = {MODULE: module} | ({OPTIMIZER: optimizer} if optimizers else {})
        try:
            load(parts, storage_reader=reader)
        except CheckpointException as failed:  # on all ranks
            error, _ = next(iter(failed.failures.values()))
            raise UserError(f"{folder / TAG} is of another policy: {error}") from failed
        set_state_dict(self.strategy.model, optimizers, model_state_dict=module, optim_state_dict=optimizer)

    def follow(self) -> None:
        """Do nothing: the optimizer updates the policy's own weights."""


class _Writer(FileSystemWriter):
    """Says what the disk has said, before the other ranks are told."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with told_by_the_disk():
            return super().write_data(plan, planner)
