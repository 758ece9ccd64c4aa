"""FSDP2 with this library's rules: all ranks share the weights, checkpoints complete or absent, and signed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.constants import default_pg_timeout

from sparse_rl_lightning.checkpoints.fsdp_shards import FSDPShards
from sparse_rl_lightning.checkpoints.sharded import load_sharded, save_sharded


class SparseRLFSDP2(ModelParallelStrategy):
    """Shard weights, gradients and optimizer over all ranks (FSDP2), which keep nothing whole between two steps.

    It is Lightning's ModelParallelStrategy with all ranks in one data-parallel group. The checkpoint is a folder that
    appears under its name once all of it has been written, and is read with the signature of the user who wrote it,
    see :mod:`sparse_rl_lightning.checkpoints`; any number of ranks resumes from it. By name on the command line:
    ``--trainer.strategy=sparse_rl_fsdp2``.

    Args:
        process_group_backend: Backend of torch.distributed, default NCCL on GPUs and gloo on CPUs.
        timeout: How long ranks wait for each other, default torch's half an hour.
    """

    def __init__(
        self, process_group_backend: str | None = None, timeout: timedelta | None = default_pg_timeout
    ) -> None:
        super().__init__(tensor_parallel_size=1, process_group_backend=process_group_backend, timeout=timeout)
        self.shards = FSDPShards(self)

    def setup_environment(self) -> None:
        """Start the processes' group like Lightning, with all ranks in it."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a folder with every rank's shards, the trainer's state, whole weights and a signed manifest."""
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} has no storage_options.")
        save_sharded(self, self.shards, checkpoint, Path(self.broadcast(str(filepath))))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read what :meth:`save_checkpoint` wrote under this user's account, whole and unchanged, and nothing else."""
        assert self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        return load_sharded(self, self.shards, Path(checkpoint_path), with_optimizer=fitting)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name for ``--trainer.strategy``."""
        strategy_registry.register("sparse_rl_fsdp2", cls, description="FSDP2 over all ranks, as sparse-rl drives it")


def not_fsdp(given: str) -> str:
    """The error message for one of Lightning's own strategies that shard fully, with what to use instead."""
    why = "whose checkpoints are unpickled whoever wrote them, and broken by a run that is killed while saving"
    if given == "FSDPStrategy":
        why = "whose weights are flattened (FSDP1), where rollouts cannot read them"
    return (
        f"trainer.strategy={given} is Lightning's own, {why}. Use --trainer.strategy=sparse_rl_fsdp2, which is FSDP2 "
        "over all ranks."
    )


SparseRLFSDP2.register_strategies(StrategyRegistry)
