"""DurableCheckpointIO: single-file checkpoints, for one device and DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from sparse_rl_lightning.checkpoints.files import remove, save_tensors, save_weights, write_durably
from sparse_rl_lightning.checkpoints.manifest import NAME

POLICY = "policy."
"""Prefix of the policy's weights among the module's."""


class DurableCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints so that a crash or a full disk never costs the last good one; modules use it by default.

    Beside ``X.ckpt`` the policy's weights are written to ``weights/X.safetensors``, under the names that Hugging Face
    knows. When saving fails, the run goes on, says so once, and keeps checkpoints it was to remove until a save works.

    Args:
        weights: Write the safetensors file too.
    """

    def __init__(self, weights: bool = True) -> None:
        self.weights = weights
        self.is_failing = False
        self._to_remove: list[Path] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write all of it or nothing; on other file systems than the local one as Lightning does."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.weights and (own := policy_weights(checkpoint.get("state_dict", {}))):
                beside = weights_beside(path)
                beside.parent.mkdir(exist_ok=True)
                write_durably(beside, lambda new: save_weights(own, new, checkpoint.get("global_step", 0)))
            write_durably(path, lambda new: save_tensors(checkpoint, new))
        except OSError as error:
            self.failed(path, error)
        else:
            self.saved(path)

    def load_checkpoint(
        self, path: str | Path, map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Read tensors, numbers and texts, no pickled objects, unless ``weights_only=False`` says otherwise.

        Raises:
            ValueError: If it is the folder of a strategy that shards.
        """
        if "://" not in str(path) and Path(path).is_dir():
            raise ValueError(_why_no_file(Path(path)))
        return super().load_checkpoint(path, map_location, True if weights_only is None else weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint and its weights; one that nothing has replaced yet is kept for now."""
        if "://" in str(path):
            super().remove_checkpoint(path)
        elif self.is_failing:
            self._to_remove.append(Path(path))
        else:
            remove(Path(path))
            remove(weights_beside(Path(path)))

    def failed(self, path: Path, error: BaseException) -> None:
        """Go on without this checkpoint; the first of a series is told."""
        if not self.is_failing:
            rank_zero_warn(
                f"The checkpoint {path} could not be saved: {error}. The run goes on and tries again at the next one; "
                "earlier checkpoints are kept. Make room on the disk, or correct dirpath of ModelCheckpoint."
            )
        self.is_failing = True

    def saved(self, path: Path) -> None:
        """Remove what waited for this."""
        if self.is_failing:
            rank_zero_info(f"Checkpoints are saved again: {path}")
        self.is_failing = False
        waiting, self._to_remove = self._to_remove, []
        for old in waiting:
            if old != path:
                self.remove_checkpoint(old)


def _why_no_file(folder: Path) -> str:
    """What a folder in place of a checkpoint file is, and what can be done with it."""
    given = f"ckpt_path={str(folder)!r} is a"
    if (folder / NAME).is_file():
        return (
            f"{given} checkpoint folder of DeepSpeed, one device and DDP read a single file. Resume with "
            "--trainer.strategy=sparse_rl_deepspeed_stage_1, _2 or _3, or write its weights with sparse-rl export and "
            "name that folder under model.policy."
        )
    if (folder / ".metadata").is_file():
        return (
            f"{given} checkpoint folder of FSDP2, one device and DDP read a single file. Resume with "
            "ModelParallelStrategy, with ExportPolicy if you want its weights."
        )
    if (folder / "config.json").is_file():
        return f"{given} model folder and no checkpoint. Name it under model.policy."
    return f"{given} folder without a checkpoint of DeepSpeed or FSDP2. Name a file, or last."


def weights_beside(path: Path) -> Path:
    """Where the safetensors of a checkpoint file are."""
    return path.parent / "weights" / f"{path.stem}.safetensors"


def policy_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The policy's tensors of a module's state, under their own names."""
    return {name.removeprefix(POLICY): value for name, value in state.items() if name.startswith(POLICY)}
