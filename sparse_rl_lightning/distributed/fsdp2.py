"""FSDP2 with this library's rules: all ranks share the weights, checkpoints complete or absent, and signed."""

from __future__ import annotations

from datetime import timedelta

from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch.distributed.constants import default_pg_timeout

from sparse_rl_lightning.checkpoints.fsdp_shards import FSDPShards
from sparse_rl_lightning.distributed.sharded import ShardedStrategy
from sparse_rl_lightning.errors import UserError

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-true")  # which Lightning checks only if it is given an object


class SparseRLFSDP2(ShardedStrategy, ModelParallelStrategy):
    """Shard weights, gradients and optimizer over all ranks (FSDP2); only rollouts have a whole copy of the weights.

    It is Lightning's ModelParallelStrategy with all ranks in one data-parallel group. The checkpoint is a folder that
    appears under its name once all of it has been written, and is read with the signature of the user who wrote it,
    see :mod:`sparse_rl_lightning.checkpoints`; any number of ranks resumes from it. By name on the command line:
    ``--trainer.strategy=sparse_rl_fsdp2``.

    Args:
        process_group_backend: Backend of torch.distributed, default NCCL on GPUs and gloo on CPUs.
        timeout: How long ranks wait for each other, default torch's half an hour, of which ``RankWatch`` makes
            four hours.
    """

    def __init__(
        self, process_group_backend: str | None = None, timeout: timedelta | None = default_pg_timeout
    ) -> None:
        super().__init__(tensor_parallel_size=1, process_group_backend=process_group_backend, timeout=timeout)
        self.shards = FSDPShards(self)

    def setup_environment(self) -> None:
        """Start the processes' group like Lightning, with all ranks in it; other precisions are refused."""
        precision = self.precision_plugin.precision
        if precision not in PRECISIONS:
            raise UserError(
                f"trainer.precision={precision} with trainer.strategy={type(self).__name__}: FSDP2 knows "
                f"{', '.join(PRECISIONS)}. Set one of these."
            )
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


def not_fsdp(setting: str, *, is_flat: bool) -> str:
    """The error message for a strategy that shards fully but is not this one: it is FSDP1 if weights become flat."""
    why = "its checkpoints are unpickled whoever wrote them, and broken by a run that is killed while saving"
    if is_flat:
        why = "FSDP1 flattens weights, so rollouts cannot read them"
    return f"{setting}: {why}. Use --trainer.strategy=sparse_rl_fsdp2, which is FSDP2 over all ranks."


StrategyRegistry.register("sparse_rl_fsdp2", SparseRLFSDP2, description="FSDP2 over all ranks, as sparse-rl drives it")
