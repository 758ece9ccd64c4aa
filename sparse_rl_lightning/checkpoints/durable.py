"""DurableCheckpointIO: single-file checkpoints, for one device and DDP."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from sparse_rl_lightning.checkpoints.files import save_tensors, save_weights
from sparse_rl_lightning.checkpoints.plain import readable
from sparse_rl_lightning.checkpoints.reading import read_checkpoint
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import own_folder, remove, write_files
from sparse_rl_lightning.policies.pretrained import check_finite

POLICY = "policy."
"""Prefix of the policy's weights among the module's."""


class DurableCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints so that a crash, a full disk or NaN never costs the last good one; modules use it by default.

    Besides ``X.ckpt`` the policy's weights are written to ``weights/X.safetensors``, under the names that Hugging Face
    uses. When saving fails, the run continues, warns once, and keeps checkpoints due for removal until
    another is saved; ``last`` does not count, since it need not be as good.

    Args:
        weights: Write the safetensors file too.
    """

    def __init__(self, weights: bool = True) -> None:
        self.weights = weights
        self._failing = set[str]()  # folders
        self._waiting: dict[str, list[str | Path]] = {}  # old checkpoints to remove, by folder

    @property
    def is_failing(self) -> bool:
        """Whether some folder's newest checkpoint could not be saved."""
        return bool(self._failing)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write all of it or nothing, and only weights that are finite; on remote file systems as Lightning does.

        Raises:
            ValueError: If it could not be read again.
        """
        checkpoint = readable(checkpoint)
        try:
            check_finite(checkpoint.get("state_dict", {}).items(), f"step {checkpoint.get('global_step')}", "")
            if "://" in str(path):
                super().save_checkpoint(checkpoint, path, storage_options)
            else:
                self._write(checkpoint, Path(path))
        except (OSError, UserError) as error:
            self.failed(path, error)
        else:
            self.saved(path)

    def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
        writers: dict[Path, Callable[[Path], object]] = {path: lambda new: save_tensors(checkpoint, new)}
        state = checkpoint.get("state_dict", {}).items()
        if self.weights and (policy_weights := {n.removeprefix(POLICY): v for n, v in state if n.startswith(POLICY)}):
            beside = weights_beside(path)
            own_folder(beside.parent)
            writers[beside] = lambda new: save_weights(policy_weights, new, checkpoint.get("global_step", 0))
        write_files(writers, durable=True)

    def load_checkpoint(
        self, path: str | Path, map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Read tensors, numbers and texts, but pickled objects only with ``weights_only=False``."""
        weights_only = weights_only is not False
        if "://" in str(path):
            return super().load_checkpoint(path, map_location, weights_only)
        return read_checkpoint(Path(path), map_location, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint and its weights; one that nothing has replaced yet is kept for now."""
        if (folder := os.path.dirname(path)) in self._failing:
            self._waiting.setdefault(folder, []).append(path)
        elif "://" in str(path):
            super().remove_checkpoint(path)
        else:
            try:
                remove(Path(path))
                remove(weights_beside(Path(path)))
            except OSError as error:
                rank_zero_warn(f"The old checkpoint {path} could not be removed: {error}. The run goes on.")

    def failed(self, path: str | Path, error: BaseException) -> None:
        """Continue without this checkpoint, and warn on the first failure in a row."""
        folder = os.path.dirname(path)
        if folder not in self._failing:
            remedy = (
                "Make room on the disk, or correct dirpath of ModelCheckpoint."
                if isinstance(error, OSError)
                else "If that stays so, go back to one of them."
            )
            rank_zero_warn(
                f"The checkpoint {path} could not be saved: {str(error).rstrip('. ')}. The run goes on and tries again "
                f"at the next one; earlier checkpoints are kept. {remedy}"
            )
        self._failing.add(folder)

    def saved(self, path: str | Path) -> None:
        """Remove the checkpoints of the same folder that were kept until a save worked."""
        folder, name = os.path.split(path)
        if folder in self._failing:
            rank_zero_info(f"Checkpoints are saved again: {path}")
        self._failing.discard(folder)
        if name.startswith(ModelCheckpoint.CHECKPOINT_NAME_LAST):  # need not be as good as the best one that waits
            return
        for old in self._waiting.pop(folder, []):
            if str(old) != str(path):
                self.remove_checkpoint(old)


def weights_beside(path: Path) -> Path:
    """The path of the safetensors of a checkpoint file."""
    return path.parent / "weights" / f"{path.name.removesuffix('.ckpt')}.safetensors"
