"""Checkpoint folders of DeepSpeed and FSDP2: of all ranks, complete or absent, read only if this user wrote them.

::

    last.ckpt/
      manifest.json          hashes of everything, signed
      trainer.pt             state of Lightning and the module, read with weights_only
      weights.safetensors    the policy's weights, whole
      checkpoint/            shards of weights and optimizer, written by every rank
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from safetensors import safe_open
from torch import Tensor, nn

from sparse_rl_lightning.checkpoints.durable import POLICY, DurableCheckpointIO
from sparse_rl_lightning.checkpoints.files import save_tensors, save_weights
from sparse_rl_lightning.checkpoints.manifest import (
    changed_files,
    digest,
    not_as_written,
    read_manifest,
    write_manifest,
)
from sparse_rl_lightning.checkpoints.plain import readable
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import incomplete, own_folder, recover, remove, swap, sync
from sparse_rl_lightning.policies.pretrained import check_finite
from sparse_rl_lightning.policies.sharding import of_all_ranks, part_of, whole_weights, write_whole

TAG = "checkpoint"
TRAINER, WEIGHTS = "trainer.pt", "weights.safetensors"
LEFT_OUT = ("state_dict", "optimizer_states")  # the shards have them
ANEW = "sparse_rl_optimizer_starts_anew"
"""Entry of a state that was read without its optimizer's."""


class Shards(ABC):
    """The parts of weights and optimizer that the ranks of one kind of sharding write and read, in ``folder/TAG``.

    All ranks call every method; a folder's files are unpickled by :meth:`read`, after their hashes were compared.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The kind of sharding, by which shards of another are recognized."""

    @abstractmethod
    def write(self, folder: Path, with_optimizer: bool, attempt: Attempt) -> None:
        """Write this rank's part durably, and list its files; what the disk refuses is the attempt's error."""

    def fits(self, manifest: dict[str, Any], with_optimizer: bool) -> bool:
        """Whether shards of this name, which the manifest lists, can be read by these ranks."""
        return True

    @abstractmethod
    def read(self, folder: Path, with_optimizer: bool) -> None:
        """Read this rank's part of the weights, and of the optimizer."""

    @abstractmethod
    def weights_were_set(self) -> None:
        """Let the optimizer know that the policy's weights have changed."""


def save_sharded(strategy: ParallelStrategy, shards: Shards, checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint folder; if that fails on any rank the run continues with the old one.

    All ranks call this, with the same path; the strategy is attached to a module with a ``policy``.

    Raises:
        ValueError: If it could not be read again.
    """
    trainer_state = readable({key: value for key, value in checkpoint.items() if key not in LEFT_OUT})
    attempt, step = Attempt(strategy), checkpoint["global_step"]
    parts = ((name, part_of(weight)) for name, weight in _policy(strategy).named_parameters())
    attempt.here(lambda: check_finite(parts, f"step {step}", ""))
    new = incomplete(path)
    attempt.on_zero(lambda: _make_empty(new))
    if attempt.is_alive:
        shards.write(new, "optimizer_states" in checkpoint, attempt)  # weights alone may be saved
        weights = _whole_policy(strategy)
        attempt.on_zero(lambda: save_weights(weights, new / WEIGHTS, step))
        attempt.on_zero(lambda: save_tensors(trainer_state, new / TRAINER))
    if attempt.is_alive:
        digests = attempt.digests(new)
        attempt.on_zero(lambda: _check_shared(new, digests))
        if attempt.is_alive:
            attempt.on_zero(lambda: _finish(path, digests, world_size=strategy.world_size, sharding=shards.name))
    io = strategy.checkpoint_io
    if attempt.error is not None:
        if strategy.is_global_zero:
            remove(new)
        if isinstance(io, DurableCheckpointIO):
            io.failed(path, attempt.error)
    elif isinstance(io, DurableCheckpointIO):
        io.saved(path)


def load_sharded(
    strategy: ParallelStrategy, shards: Shards, path: Path, with_optimizer: bool
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Lightning's state, and what reads the weights: with the optimizer, if training continues with shards that fit.

    All ranks call both, the second after the module has seen that the state is of its run.

    Raises:
        ValueError: If the folder is incomplete, was changed, or was written by someone else.
    """
    path = Path(strategy.broadcast(str(path)))
    manifest = _checked_manifest(strategy, path)
    state: dict[str, Any] = torch.load(path / TRAINER, map_location="cpu", weights_only=True)
    was = manifest.get("sharding", "those of version 0.1")
    if was == shards.name and shards.fits(manifest, with_optimizer):
        return state, lambda: shards.read(path, with_optimizer)
    if with_optimizer:
        state[ANEW] = True
        rank_zero_warn(
            f"The checkpoint is of {manifest['world_size']} rank(s) with {was}, this run has "
            f"{strategy.world_size} with {shards.name}: the weights are taken, the optimizer starts anew."
            f"{_ROUNDED if was.startswith('ZeRO') and _in_16_bits(path / WEIGHTS) else ''}"
        )
    return state, lambda: _read_weights(strategy, shards, path / WEIGHTS)


_ROUNDED = " They were stored in 16 bits: what DeepSpeed's float32 copies had beyond these is lost."


def _in_16_bits(path: Path) -> bool:
    with safe_open(path, "pt") as file:
        return any(file.get_slice(name).get_dtype() in ("BF16", "F16") for name in file.keys())


class Attempt:
    """The first failure on any rank, known to all ranks so that none waits for another."""

    def __init__(self, strategy: ParallelStrategy) -> None:
        self.strategy = strategy
        self.error: BaseException | None = None
        self.written: list[str] = []  # files written by this rank

    @property
    def is_alive(self) -> bool:
        """Whether all ranks have succeeded so far. Collective."""
        error_type = UserError if isinstance(self.error, UserError) else OSError
        mine = self.error and error_type(f"rank {self.strategy.global_rank}: {self.error}")
        first = next((error for error in of_all_ranks(mine) if error is not None), None)
        self.error = self.error or first
        return first is None

    def on_zero(self, work: Callable[[], object]) -> None:
        """Run work that may fail on rank zero, unless it has failed already."""
        if self.strategy.is_global_zero:
            self.here(work)

    def here(self, work: Callable[[], object]) -> None:
        """Run work that may fail, unless something has failed already."""
        if self.error is not None:
            return
        try:
            work()
        except (OSError, UserError) as error:
            self.error = error

    def digests(self, folder: Path) -> dict[str, str]:
        """Hashes of all files, each computed by the rank that wrote it. Collective."""
        if self.strategy.is_global_zero:
            self.written += [TRAINER, WEIGHTS]
        local: dict[str, str] = {}
        self.here(lambda: local.update({name: digest(folder / name) for name in self.written}))
        return {name: value for of_rank in of_all_ranks(local) for name, value in of_rank.items()}


def _make_empty(folder: Path) -> None:
    own_folder(folder.parent)
    remove(folder)
    (folder / TAG).mkdir(parents=True)  # DeepSpeed would create it where errors go unnoticed


def _check_shared(folder: Path, digests: dict[str, str]) -> None:
    """Check that rank zero sees all files, before anything old is replaced."""
    if unseen := [name for name in digests if not (folder / name).is_file()]:
        raise OSError(
            f"rank 0 does not see {len(unseen)} of {len(digests)} files that others have written, such as {unseen[0]}: "
            "the folder must be one that all ranks share"
        )


def _finish(path: Path, digests: dict[str, str], **facts: Any) -> None:
    new = incomplete(path)
    for name in (TRAINER, WEIGHTS):
        sync(new / name)
    write_manifest(new, digests, **facts)
    sync(new / TAG)
    sync(new)
    swap(path)


def _checked_manifest(strategy: ParallelStrategy, path: Path) -> dict[str, Any]:
    """The manifest after every file was checked, on each machine by one of its ranks; all ranks raise if one must."""
    manifest: dict[str, Any] = {}
    problem: str | None = None
    if strategy.is_global_zero:
        try:
            recover(path)
            if not path.is_dir():
                raise UserError(
                    f"ckpt_path={str(path)!r} is not a checkpoint of {type(strategy).__name__}: a single file comes "
                    "from one device or DDP. Resume with that strategy, or export the weights and name them under "
                    "model.policy."
                )
            manifest = read_manifest(path)
            inside = {file.relative_to(path).as_posix() for file in (path / TAG).rglob("*") if not file.is_dir()}
            if strange := sorted(inside - set(manifest["files"])):  # DeepSpeed unpickles whatever has the right name
                raise UserError(
                    f"ckpt_path={str(path)!r} has files that were not written with it: {', '.join(strange)}. Take them "
                    "out, or resume from another checkpoint."
                )
        except (ValueError, OSError) as error:
            problem = str(error)
    manifest, problem = strategy.broadcast((manifest, problem))
    if problem is None:
        first, every, files = strategy.local_rank, len(strategy.parallel_devices or [0]), sorted(manifest["files"])
        changed = changed_files(path, {name: manifest["files"][name] for name in files[first::every]})
        everywhere = sorted({name for of_rank in of_all_ranks(changed) for name in of_rank})
        if everywhere:
            problem = not_as_written(path, everywhere)
    if problem is not None:
        raise UserError(problem)
    return manifest


def _whole_policy(strategy: ParallelStrategy) -> dict[str, Tensor]:
    """The policy's weights on rank zero, nothing elsewhere. Collective where weights are sharded."""
    wanted = strategy.is_global_zero
    return {n: v.detach().to("cpu", copy=True) for n, v in whole_weights(_policy(strategy)) if wanted}


def _read_weights(strategy: ParallelStrategy, shards: Shards, path: Path) -> None:
    """Fill the policy from safetensors."""
    module = _policy(strategy)
    with safe_open(path, "pt") as file, torch.no_grad():
        names = set(file.keys())
        for name, parameter in module.named_parameters():
            if name not in names:
                raise UserError(f"{path} lacks the weight {name!r}: it is of another policy.")
            write_whole(parameter, file.get_tensor(name))
    shards.weights_were_set()
    rank_zero_info(f"Weights read from {path}")
    assert strategy.lightning_module is not None
    if left := [n for n, _ in strategy.lightning_module.named_parameters() if not n.startswith(POLICY)]:
        rank_zero_warn(f"{path} has the policy alone: {len(left)} other weights stay as they are, such as {left[0]}.")


def _policy(strategy: ParallelStrategy) -> nn.Module:
    policy: nn.Module = getattr(strategy.lightning_module, POLICY.rstrip("."))
    return policy
