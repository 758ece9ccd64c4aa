"""Checkpoint folders of DeepSpeed: written by all ranks, complete or absent, read only if this user wrote them.

::

    last.ckpt/
      manifest.json          hashes of everything, signed
      trainer.pt             state of Lightning and the module, read with weights_only
      weights.safetensors    the policy's weights, whole
      checkpoint/            DeepSpeed's shards of weights and optimizer, one set per rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from safetensors import safe_open
from torch import Tensor, nn

from sparse_rl_lightning.checkpoints.durable import POLICY, DurableCheckpointIO
from sparse_rl_lightning.checkpoints.files import incomplete, recover, save_tensors, save_weights, swap_folder
from sparse_rl_lightning.checkpoints.manifest import changed_files, digest, read_manifest, write_manifest
from sparse_rl_lightning.checkpoints.plain import readable
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import own_folder, remove, sync
from sparse_rl_lightning.policies.sharding import gathered, of_all_ranks, whole_weights

TAG = "checkpoint"
TRAINER, WEIGHTS = "trainer.pt", "weights.safetensors"
LEFT_OUT = ("state_dict", "optimizer_states")  # DeepSpeed's shards have them


def save_sharded(strategy: DeepSpeedStrategy, checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint folder; if that fails on any rank the run continues with the old one.

    All ranks call this, with the same path; the strategy is attached to a module with a ``policy``.

    Raises:
        ValueError: If it could not be read again.
    """
    own = readable({key: value for key, value in checkpoint.items() if key not in LEFT_OUT})
    attempt = _Attempt(strategy)
    new = incomplete(path)
    attempt.on_zero(lambda: _make_empty(new))
    if attempt.is_alive:
        engine = strategy.deepspeed_engine
        with _watched_engine(engine, new, attempt):
            engine.save_checkpoint(str(new), tag=TAG, client_state={}, save_latest=False)
        weights = _whole_policy(strategy)
        attempt.on_zero(lambda: save_weights(weights, new / WEIGHTS, checkpoint["global_step"]))
        attempt.on_zero(lambda: save_tensors(own, new / TRAINER))
    if attempt.is_alive:
        digests = attempt.digests(new)
        attempt.on_zero(lambda: _check_shared(new, digests))
        if attempt.is_alive:
            attempt.on_zero(lambda: _finish(strategy, path, digests))
    io = strategy.checkpoint_io
    if attempt.error is not None:
        if strategy.is_global_zero:
            remove(new)
        if isinstance(io, DurableCheckpointIO):
            io.failed(path, attempt.error)
    elif isinstance(io, DurableCheckpointIO):
        io.saved(path)


def load_sharded(strategy: DeepSpeedStrategy, path: Path, with_optimizer: bool) -> dict[str, Any]:
    """Load weights into the engine, and the optimizer if training continues on as many ranks; return Lightning's state.

    All ranks call this. A folder that is incomplete, was changed, or was written by someone else is refused.
    """
    manifest = _checked_manifest(strategy, path)
    was, now = (manifest["world_size"], manifest["stage"]), (strategy.world_size, _stage(strategy))
    if with_optimizer and was == now:
        strategy.deepspeed_engine.load_checkpoint(str(path), tag=TAG, load_lr_scheduler_states=False)
    else:
        _load_weights(strategy, path / WEIGHTS)
    if with_optimizer and was != now:
        rank_zero_warn(
            f"The checkpoint is of {was[0]} rank(s) with ZeRO-{was[1]}, this run has {now[0]} with ZeRO-{now[1]}: the "
            "weights are taken, the optimizer starts anew."
        )
    state: dict[str, Any] = torch.load(path / TRAINER, map_location="cpu", weights_only=True)
    return state


class _Attempt:
    """The first failure on any rank, known to all ranks so that none waits for another."""

    def __init__(self, strategy: DeepSpeedStrategy) -> None:
        self.strategy = strategy
        self.error: BaseException | None = None
        self.written: list[str] = []  # files written by this rank

    @property
    def is_alive(self) -> bool:
        """Whether all ranks have succeeded so far. Collective."""
        mine = None if self.error is None else f"rank {self.strategy.global_rank}: {self.error}"
        first = next((text for text in of_all_ranks(mine) if text is not None), None)
        if first is not None and self.error is None:
            self.error = OSError(first)
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
        except OSError as error:
            self.error = error

    def digests(self, folder: Path) -> dict[str, str]:
        """Hashes of all files, each computed by the rank that wrote it. Collective."""
        if self.strategy.is_global_zero:
            self.written += [TRAINER, WEIGHTS]
        own: dict[str, str] = {}
        self.here(lambda: own.update({name: digest(folder / name) for name in self.written}))
        return {name: value for part in of_all_ranks(own) for name, value in part.items()}


@contextmanager
def _watched_engine(engine: Any, folder: Path, attempt: _Attempt) -> Iterator[None]:
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


def _finish(strategy: DeepSpeedStrategy, path: Path, digests: dict[str, str]) -> None:
    new = incomplete(path)
    for name in (TRAINER, WEIGHTS):
        sync(new / name)
    write_manifest(new, digests, world_size=strategy.world_size, stage=_stage(strategy))
    remove(incomplete(new / "x").parent)
    sync(new)
    swap_folder(path)


def _checked_manifest(strategy: DeepSpeedStrategy, path: Path) -> dict[str, Any]:
    """The manifest after every file was checked by one of the ranks; all ranks raise if one must."""
    manifest: dict[str, Any] = {}
    problem: str | None = None
    if strategy.is_global_zero:
        try:
            recover(path)
            if not path.is_dir():
                raise UserError(
                    f"ckpt_path={str(path)!r} is no checkpoint of {type(strategy).__name__}: a single file comes from "
                    "one device or DDP. Resume with that strategy, or export the weights and name them under "
                    "model.policy."
                )
            manifest = read_manifest(path)
        except (ValueError, OSError) as error:
            problem = str(error)
    manifest, problem = strategy.broadcast((manifest, problem))
    if problem is None:
        rank, size, files = strategy.global_rank, strategy.world_size, sorted(manifest["files"])
        changed = changed_files(path, {name: manifest["files"][name] for name in files[rank::size]})
        everywhere = [name for part in of_all_ranks(changed) for name in part]
        if everywhere:
            problem = (
                f"ckpt_path={str(path)!r} is not as it was written: {', '.join(everywhere)}. Resume from another "
                "checkpoint."
            )
    if problem is not None:
        raise UserError(problem)
    return manifest


def _whole_policy(strategy: DeepSpeedStrategy) -> dict[str, Tensor]:
    """The policy's weights on rank zero, nothing elsewhere. Collective under ZeRO-3."""
    wanted = strategy.is_global_zero
    return {n: v.detach().to("cpu", copy=True) for n, v in whole_weights(_policy(strategy)) if wanted}


def _load_weights(strategy: DeepSpeedStrategy, path: Path) -> None:
    """Fill the policy from safetensors, and the optimizer's copies of the weights from the policy."""
    module = _policy(strategy)
    optimizer: Any = getattr(strategy.deepspeed_engine, "optimizer", None)
    with safe_open(path, "pt") as file, torch.no_grad():
        names = set(file.keys())
        for name, parameter in module.named_parameters():
            if name not in names:
                raise UserError(f"{path} lacks the weight {name!r}: it is of another policy.")
            with gathered([parameter], modifier=0):
                if parameter.numel():
                    parameter.copy_(file.get_tensor(name))
    if hasattr(optimizer, "_restore_from_bit16_weights"):
        optimizer._restore_from_bit16_weights()
    rank_zero_info(f"Weights read from {path}")


def _policy(strategy: DeepSpeedStrategy) -> nn.Module:
    policy: nn.Module = getattr(strategy.lightning_module, POLICY.rstrip("."))
    return policy


def _stage(strategy: DeepSpeedStrategy) -> int:
    assert isinstance(strategy.config, dict)
    return int(strategy.config.get("zero_optimization", {}).get("stage", 0))
