"""DurableCheckpointIO: single-file checkpoints, for one device and DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from sparse_rl_lightning.checkpoints.files import incomplete, instead_of_folder, save_tensors, save_weights
from sparse_rl_lightning.checkpoints.plain import readable
from sparse_rl_lightning.checkpoints.reading import read_checkpoint
from sparse_rl_lightning.files import own_folder, remove, write_files

POLICY = "policy."
"""Prefix of the policy's weights among the module's."""


class DurableCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints so that a crash or a full disk never costs the last good one; modules use it by default.

    Besides ``X.ckpt`` the policy's weights are written to ``weights/X.safetensors``, under the names that Hugging Face
    uses. When saving fails, the run continues, warns once, and keeps checkpoints due for removal until a save works.

    Args:
        weights: Write the safetensors file too.
    """

    def __init__(self, weights: bool = True) -> None:
        self.weights = weights
        self._waiting: dict[Path, list[Path]] = {}  # old checkpoints to remove, by the folder where saving fails

    @property
    def is_failing(self) -> bool:
        """Whether some folder's newest checkpoint could not be saved."""
        return bool(self._waiting)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write all of it or nothing; on remote file systems as Lightning does.

        Raises:
            ValueError: If it could not be read again.
        """
        checkpoint = readable(checkpoint)
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        try:
            writers: dict[Path, Callable[[Path], object]] = {path: lambda new: save_tensors(checkpoint, new)}
            if self.weights and (own := policy_weights(checkpoint.get("state_dict", {}))):
                beside = weights_beside(path)
                own_folder(beside.parent)
                writers[beside] = lambda new: save_weights(own, new, checkpoint.get("global_step", 0))
            with instead_of_folder(path):
                write_files(writers, incomplete, durable=True)
        except OSError as error:
            self.failed(path, error)
        else:
            self.saved(path)

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
        if "://" in str(path):
            super().remove_checkpoint(path)
        elif Path(path).parent in self._waiting:
            self._waiting[Path(path).parent].append(Path(path))
        else:
            try:
                remove(Path(path))
                remove(weights_beside(Path(path)))
            except OSError as error:
                rank_zero_warn(f"The old checkpoint {path} could not be removed: {error}. The run goes on.")

    def failed(self, path: Path, error: BaseException) -> None:
        """Continue without this checkpoint, and warn on the first failure in a row."""
        if path.parent not in self._waiting:
            rank_zero_warn(
                f"The checkpoint {path} could not be saved: {error}. The run goes on and tries again at the next one; "
                "earlier checkpoints are kept. Make room on the disk, or correct dirpath of ModelCheckpoint."
            )
        self._waiting.setdefault(path.parent, [])

    def saved(self, path: Path) -> None:
        """Remove the checkpoints of the same folder that were kept until a save worked."""
        if path.parent in self._waiting:
            rank_zero_info(f"Checkpoints are saved again: {path}")
        for old in self._waiting.pop(path.parent, []):
            if old != path:
                self.remove_checkpoint(old)


def weights_beside(path: Path) -> Path:
    """The path of the safetensors of a checkpoint file."""
    return path.parent / "weights" / f"{path.stem}.safetensors"


def policy_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The policy's tensors in a module's state, under their own names."""
    return {name.removeprefix(POLICY): value for name, value in state.items() if name.startswith(POLICY)}
