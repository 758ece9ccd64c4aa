"""DeepSpeed's shards in a checkpoint folder: one set of files per rank, for as many ranks of the same stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy

from sparse_rl_lightning.checkpoints.files import save_tensors
from sparse_rl_lightning.checkpoints.sharded import TAG, Attempt, Shards
from sparse_rl_lightning.files import sync


class ZeroShards(Shards):
    """Shards that a DeepSpeed engine writes and reads itself.

    Args:
        strategy: Strategy with the engine.
    """

    def __init__(self, strategy: DeepSpeedStrategy) -> None:
        self.strategy = strategy

    @property
    def name(self) -> str:
        """ZeRO and its stage."""
        assert isinstance(self.strategy.config, dict)
        return f"ZeRO-{self.strategy.config.get('zero_optimization', {}).get('stage', 0)}"

    def write(self, folder: Path, with_optimizer: bool, attempt: Attempt) -> None:
        """Let the engine write all that it needs, which includes the optimizer."""
        engine = self.strategy.deepspeed_engine
        with _watched_engine(engine, folder, attempt):
            engine.save_checkpoint(str(folder), tag=TAG, client_state={}, save_latest=False)

    def fits(self, manifest: dict[str, Any], with_optimizer: bool) -> bool:
        """Whether the engine has an optimizer, of as many ranks."""
        return with_optimizer and manifest["world_size"] == self.strategy.world_size

    def read(self, folder: Path, with_optimizer: bool) -> None:
        """Let the engine read what it has written."""
        self.strategy.deepspeed_engine.load_checkpoint(str(folder), tag=TAG, load_lr_scheduler_states=False)

    def weights_were_set(self) -> None:
        """Fill the optimizer's copies of the weights from the policy."""
        optimizer: Any = getattr(self.strategy.deepspeed_engine, "optimizer", None)
        if hasattr(optimizer, "_restore_from_bit16_weights"):
            optimizer._restore_from_bit16_weights()


@contextmanager
def _watched_engine(engine: Any, folder: Path, attempt: Attempt) -> Iterator[None]:
    """Sync and list DeepSpeed's files; a rank that cannot write still reaches the others' barriers."""
    writer = engine.checkpoint_engine

    def save(state_dict: dict[str, Any], path: str) -> None:
        def work() -> None:
            save_tensors(state_dict, Path(path))
            sync(Path(path))
            attempt.written.append(str(Path(path).relative_to(folder)))

        attempt.here(work)

    writer.save, engine._copy_recovery_script = save, lambda _: None  # it would copy an executable script
    try:
        yield
    finally:
        del writer.save, engine._copy_recovery_script
