"""Exchanges between the ranks of a run besides gradients, and checks of what must be the same on all."""

from __future__ import annotations

import atexit
import itertools
import math
import os
import secrets
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.utils.data import DistributedSampler
from transformers import PreTrainedModel

from sparse_rl_lightning.distributed.deepspeed import SparseRLDeepSpeed, not_deepspeed
from sparse_rl_lightning.distributed.fsdp2 import SparseRLFSDP2, not_fsdp
from sparse_rl_lightning.distributed.sharded import ShardedStrategy
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import write_whole
from sparse_rl_lightning.fingerprints import fingerprint
from sparse_rl_lightning.policies.sharding import is_sharded, of_all_ranks


def gather_to_zero(value: Any, world_size: int) -> list[Any]:
    """Every rank's value on rank zero, an empty list on the others; a single rank gets its own back."""
    if world_size == 1:
        return [value]
    is_zero = torch.distributed.get_rank() == 0
    values: list[Any] | None = [None] * world_size if is_zero else None
    torch.distributed.gather_object(value, values)
    return values or []


def be_patient(strategy: Strategy) -> None:
    """Let ranks wait for each other for four hours, in all groups, unless the strategy was given a time of its own.

    Torch's half an hour, which counts as none given, and ten minutes in the groups that DeepSpeed makes, end runs in
    which one rank draws or rewards for longer than the others.
    """
    if getattr(strategy, "_timeout", None) == default_pg_timeout:
        for group in torch.distributed.distributed_c10d._world.pg_map:
            torch.distributed.distributed_c10d._set_pg_timeout(timedelta(hours=4), group)


def end_group_at_exit() -> None:
    """Have the process group destroyed when the process ends, before the interpreter takes its modules apart.

    Lightning does so for NCCL only. Threads of gloo that are still there then abort a process that has finished well.
    """
    atexit.register(_end_group)


def _end_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def mean_over_ranks(metrics: Mapping[str, Tensor | float], world_size: int) -> Mapping[str, Tensor | float]:
    """Mean of every metric over the ranks that have it, on all ranks, in one exchange. Collective.

    The names may depend on a rank's data, as counters of reward functions do.
    """
    if world_size == 1:
        return metrics
    local = {name: float(value) for name, value in metrics.items()}
    ranks = of_all_ranks(local)
    names = dict.fromkeys(name for metrics in ranks for name in metrics)
    values = {name: [metrics[name] for metrics in ranks if name in metrics] for name in names}
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def advantages_of_rank(
    rewards: Tensor, num_generations: int, estimate: Callable[[Tensor, int], Tensor], trainer: Trainer
) -> Tensor:
    """Advantages (B,) of this rank's rewards, B the same on every rank, by an estimate that covers all ranks."""
    everyone: Any = trainer.strategy.all_gather(rewards)  # (ranks, B)
    return estimate(everyone.flatten(), num_generations).view(everyone.shape)[trainer.global_rank]


def check_options(policy: PreTrainedModel, world_size: int, *, is_partial: bool, packs: bool) -> None:
    """Refuse, by name, options that several ranks do not support: partial rollouts, and packing by tokens."""
    if world_size > 1 and is_partial:
        raise UserError(
            "rollout.partial_rollout_steps works in one process so far: set model.rollout.partial_rollout_steps to "
            "null, or trainer.devices and trainer.num_nodes to 1."
        )
    if packs and is_sharded(policy):
        raise UserError(
            "learner.micro_batch_tokens splits micro-batches differently on every rank, but ranks that share "
            "weights (ZeRO-3, FSDP2) must pass through the model equally often. Set it to null, or use ZeRO-2."
        )


def check_strategy(strategy: Strategy) -> None:
    """Refuse Lightning's strategies that would train something else here, although they are named like ours."""
    if isinstance(strategy, DeepSpeedStrategy) and not isinstance(strategy, SparseRLDeepSpeed):
        raise UserError(not_deepspeed(f"trainer.strategy={type(strategy).__name__}"))
    if isinstance(strategy, (FSDPStrategy, ModelParallelStrategy)) and not isinstance(strategy, SparseRLFSDP2):
        is_flat = isinstance(strategy, FSDPStrategy)
        raise UserError(not_fsdp(f"trainer.strategy={type(strategy).__name__}", is_flat=is_flat))


def check_processes(world_size: int) -> None:
    """Refuse a trainer unaware of the processes it was started in: each would train and save by itself.

    A launcher numbers its processes; if only WORLD_SIZE is set, it comes from a job's script or the machine.
    """
    is_one_of_them = "RANK" in os.environ or "LOCAL_RANK" in os.environ
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if is_one_of_them and started > 1 and started != world_size:
        raise UserError(
            f"{started} processes were started (WORLD_SIZE={started}), and the trainer is of {world_size}: each of "
            f"them would train by itself and overwrite the others' files. Let trainer.devices x trainer.num_nodes be "
            f"{started}, or start {world_size}."
        )


def check_agreement(facts: dict[str, str]) -> None:
    """Refuse facts, as text by their names, that differ between ranks. Collective; one rank always agrees."""
    ranks = of_all_ranks(facts)
    for name in dict.fromkeys(name for of_rank in ranks for name in of_rank):
        values = [of_rank.get(name, "none") for of_rank in ranks]
        differing = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if differing is not None:
            raise UserError(
                f"Ranks differ in their {name}: rank 0 has {values[0]}, rank {differing} has {values[differing]}. All "
                "must read the same files: name a folder that they share, or copy rank 0's to the others' machines."
            )


class DealtRows:
    """The places in the data of the rows that this rank evaluates, and which of the rows count.

    Torch's sampler deals rows out one by one. It repeats the first, so that every rank has as many and collectives
    match; a row that another rank has seen counts nowhere.
    """

    def __init__(self, trainer: Trainer | None = None, world_size: int = 1) -> None:
        self.world_size, self._num_rows = world_size, math.inf
        self._places = itertools.count(trainer.global_rank if trainer else 0, world_size)
        if trainer and world_size > 1 and not trainer.predicting:  # whose rows are not repeated
            loop: Any = trainer._evaluation_loop  # val_dataloaders may be those of an earlier fit
            sampler: Any = getattr(loop._combined_loader.iterables, "sampler", None)
            if isinstance(sampler, DistributedSampler):
                self._num_rows = len(cast(Any, sampler).dataset)

    def next(self, count: int) -> tuple[list[int], Tensor]:
        """The places of the next rows of this rank, and which of them (count,) are not repeats."""
        places = list(itertools.islice(self._places, count))
        return places, torch.tensor([index < self._num_rows for index in places])


def check_training(trainer: Trainer, facts: dict[str, str]) -> None:
    """Refuse ranks that have other data, weights or checkpoints than the others, or a folder of their own. Collective.

    The rows of data are added to ``facts``.
    """
    loaders: dict[str, Any] = {"training": trainer.train_dataloader, "validation": trainer.val_dataloaders}
    for name, loader in loaders.items():
        if isinstance(getattr(loader, "sampler", None), DistributedSampler):  # which deals the rows out
            rows = loader.dataset
            digest = fingerprint(rows=[rows[index] for index in range(len(rows))])
            facts[f"{name} rows"] = f"{len(rows)} of the hash {digest}"
    check_agreement(facts)
    if isinstance(trainer.strategy, ShardedStrategy):  # all ranks write
        dirpaths = (getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks)
        folders = [str(folder) for folder in dirpaths if folder]
        if remote := [folder for folder in folders if "://" in folder]:
            raise UserError(
                f"dirpath={remote[0]!r} of ModelCheckpoint: under {type(trainer.strategy).__name__} every rank writes "
                "files, which remote folders do not take. Name a folder that all machines share."
            )
        check_shared([Path(folder) for folder in folders])


def check_shared(folders: list[Path]) -> None:
    """Refuse folders that all ranks write into but that are not one and the same. Collective."""
    rank = torch.distributed.get_rank()
    for folder in folders:
        name = [f".shared-{secrets.token_hex(8)}"]
        torch.distributed.broadcast_object_list(name, src=0)
        probe = folder / name[0]
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(probe, "")
        torch.distributed.barrier()
        seen = of_all_ranks(_sees(probe))
        if rank == 0:
            probe.unlink()
        if not all(seen):
            raise UserError(
                f"dirpath={str(folder)!r} of ModelCheckpoint is another folder on rank {seen.index(False)} than on "
                "rank 0, and every rank writes its part of a checkpoint there: none would be whole. Name a folder that "
                "all machines share."
            )


def _sees(file: Path) -> bool:
    """Whether a file that another rank has just written is there."""
    try:  # an NFS client caches a missing folder for up to a minute; creating it asks the server
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        pass
    return file.exists()
