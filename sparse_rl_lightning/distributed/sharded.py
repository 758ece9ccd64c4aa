"""ShardedStrategy: checkpoint folders for strategies whose ranks have parts of weights and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from sparse_rl_lightning.checkpoints.sharded import Shards, load_sharded, save_sharded


class ShardedStrategy(ParallelStrategy):
    """The half of a strategy that saves and loads; the other half is Lightning's, behind this in the bases."""

    shards: Shards
    """What writes and reads a rank's parts."""

    _read_weights: Callable[[], None]

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a folder with every rank's shards, the trainer's state, whole weights and a signed manifest."""
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} has no storage_options.")
        save_sharded(self, self.shards, checkpoint, Path(self.broadcast(str(filepath))))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """The trainer's state of a folder that this user's account wrote, whole and unchanged, and of nothing else."""
        assert self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        state, self._read_weights = load_sharded(self, self.shards, Path(checkpoint_path), with_optimizer=fitting)
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read the shards of that folder, or its whole weights: the module has seen the state and not refused it."""
        self._read_weights()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """An empty dictionary: the shards have the state."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An empty dictionary: the shards have the state."""
        return {}
