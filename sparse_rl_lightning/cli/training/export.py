"""``sparse-rl export``: a checkpoint as a plain Hugging Face folder."""

from __future__ import annotations

import pickle
from contextlib import suppress
from pathlib import Path
from typing import cast

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from safetensors.torch import load_file

from sparse_rl_lightning.callbacks.guards.preemption import last_path
from sparse_rl_lightning.callbacks.outputs.export import kept_folders, write_policy
from sparse_rl_lightning.checkpoints.durable import POLICY
from sparse_rl_lightning.checkpoints.exports import check_replaceable, export_place
from sparse_rl_lightning.checkpoints.folders import check_dtype
from sparse_rl_lightning.checkpoints.manifest import check_unchanged
from sparse_rl_lightning.checkpoints.reading import read_checkpoint
from sparse_rl_lightning.checkpoints.sharded import TRAINER, WEIGHTS
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import recover
from sparse_rl_lightning.modules.base import PolicyModule
from sparse_rl_lightning.modules.resume.optimizer import check_weights
from sparse_rl_lightning.text import shown


class ExportingTrainer(Trainer):
    """Lightning's trainer with one more command, ``export``."""

    def export(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str = "last",
        folder: str = "policy",
        weights_only: bool | None = None,
        dtype: str | None = None,
    ) -> None:
        """Write the policy of a checkpoint and its tokenizer as a folder that ``from_pretrained`` reads.

        Args:
            model: Module that was trained.
            datamodule: Not used.
            ckpt_path: A checkpoint, or ``last``.
            folder: Folder to write; an earlier export in it is replaced, and nothing else.
            weights_only: Not used: nothing else is ever read.
            dtype: Type of the weights in the folder, float32, bfloat16 or float16; null for the policy's own.

        Raises:
            ValueError: If the checkpoint is missing or of another policy, or the folder contains something else.
        """
        module, checkpoint = cast(PolicyModule, model), last_path(self) if ckpt_path == "last" else str(ckpt_path)
        if checkpoint is None:
            raise UserError(
                "ckpt_path=last needs a RolloutCheckpoint, or a ModelCheckpoint with save_last and a dirpath."
            )
        check_dtype(dtype, "dtype")
        path = Path(checkpoint).expanduser()
        recover(path)
        target, kept = export_place(folder), kept_folders(self, module)
        check_replaceable(target, "folder", kept)
        module.configure_model()
        load_policy(module, path)
        write_policy(module, target, dtype, kept)


def load_policy(module: PolicyModule, path: Path) -> None:
    """Load a module's policy from a checkpoint, without unpickling anything.

    Raises:
        ValueError: If names or shapes of the weights differ, or a folder lacks whole weights, as they were written.
    """
    assert module.policy is not None
    if not path.is_dir():
        checkpoint = read_checkpoint(path)
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"])
        return
    if not (path / WEIGHTS).is_file():
        raise UserError(
            f"ckpt_path={str(path)!r} has no {WEIGHTS}: it is not whole, or of Lightning's own ModelParallelStrategy. "
            "Give another checkpoint; for the latter resume with the version that wrote it, and ExportPolicy."
        )
    check_unchanged(path, (TRAINER, WEIGHTS))
    try:
        with suppress(pickle.UnpicklingError):  # of a version that saved objects, and no description
            module.run_state.check_policy(torch.load(path / TRAINER, map_location="cpu", weights_only=True))
        state = load_file(path / WEIGHTS)
    except UserError:
        raise
    except Exception as error:  # a manifest may be made up along with its files, and torch may raise anything on those
        raise UserError(f"ckpt_path={str(path)!r} cannot be read: {shown(error)}. Give another checkpoint.") from error
    check_weights(
        {f"{POLICY}{name}": value for name, value in state.items()},
        {f"{POLICY}{name}": weight for name, weight in module.policy.named_parameters()},
    )
    module.policy.load_state_dict(state, strict=False)  # a tied head is not in it
