"""Weights that a trainer broadcasts, by the protocol of vLLM's transfer engine, as TRL speaks it.

The trainer listens with a store, which the server joins as rank 1 of 2. The names, types and shapes of an update come
in a request; the weights follow as bytes, one after the other, in pieces that end with the weight that makes them
larger than 1 GiB. Nothing that comes is unpickled.
"""

from __future__ import annotations

import math
import pickletools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl
from torch.distributed.distributed_c10d import BroadcastOptions, ProcessGroupGloo, Store

from sparse_rl_lightning.serve.bodies import BadRequest

PIECE_BYTES = 2**30
MOST_WEIGHTS = 100_000
JOIN_SECONDS = 20.0  # a trainer listens before it asks to be joined, or at the same time; torch tries a few times
ID_KEY, ID_BYTES = "broadcast_from/0/0", 128  # of NCCL's identity in the store
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}


class Group(Protocol):
    """A trainer and this server."""

    def receive(self, buffer: Tensor) -> None:
        """Fill a buffer with what the trainer broadcasts."""


class TrainerGoneError(BadRequest):
    """What is said of a trainer that does not send what it has announced."""


class GlooGroup:
    """A group of two CPUs."""

    def __init__(self, store: Store, timeout: timedelta) -> None:
        self._group: Any = ProcessGroupGloo(store, 1, 2, timeout)

    def receive(self, buffer: Tensor) -> None:
        """Fill a buffer with what the trainer broadcasts."""
        self._group.broadcast([buffer], BroadcastOptions()).wait()


class NcclGroup:
    """A group of two GPUs, written against what vLLM sends, and never run: NCCL needs two of them."""

    def __init__(self, store: Store, device: torch.device, timeout: timedelta) -> None:
        self._device, self._seconds = device, timeout.total_seconds()
        with torch.cuda.device(device):
            self._comms = [nccl.init_rank(2, nccl_id(store.get(ID_KEY)), 1)]  # type: ignore[no-untyped-call]  # nccl4py is untyped
            nccl.all_reduce([torch.zeros(1, device=device)], comms=self._comms)  # type: ignore[no-untyped-call]  # the trainer's first

    def receive(self, buffer: Tensor) -> None:
        """Fill a buffer with what the trainer broadcasts."""
        with torch.cuda.device(self._device):
            nccl.broadcast([buffer], comms=self._comms)
            done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            deadline = time.monotonic() + self._seconds
            done.record()
            while not done.query():  # NCCL itself would wait for good
                if time.monotonic() > deadline:
                    raise RuntimeError("The trainer sends nothing.")
                time.sleep(0.001)


def nccl_id(pickled: bytes) -> bytes:
    """The identity in a pickle of vLLM's, which is read and not executed.

    Raises:
        BadRequest: If there is none, or more than one.
    """
    try:
        ids = [
            value for _, value, _ in pickletools.genops(pickled) if isinstance(value, bytes) and len(value) == ID_BYTES
        ]
    except Exception as error:  # whatever bytes that are no pickle lead to
        raise BadRequest(f"The trainer's NCCL identity cannot be read: {type(error).__name__}.") from None
    if len(ids) != 1:
        raise BadRequest("The trainer's store holds no NCCL identity of vLLM's.")
    return ids[0]


def join(info: Mapping[str, Any], trainer: str, device: torch.device, timeout: float) -> Group:
    """Join the group of a trainer that listens, by its store on the one host that a request may name.

    Args:
        info: ``init_info`` of a request.
        trainer: The host.
        device: Device of the model.
        timeout: Seconds until a trainer that says nothing any more is given up.

    Raises:
        BadRequest: If the request names another host or a larger group, or nobody listens there.
    """
    if info.get("master_address") != trainer:
        raise BadRequest("master_address is not the host that the server was started with as --trainer.", "init_info")
    port, size = info.get("master_port"), (info.get("rank_offset"), info.get("world_size"))
    if type(port) is not int or not 0 < port < 2**16 or size != (1, 2) or info.get("packed", True) is not True:
        raise BadRequest("init_info must have a master_port, rank_offset 1, world_size 2, and packed.", "init_info")
    limit, at_once = timedelta(seconds=timeout), timedelta(seconds=JOIN_SECONDS)
    try:
        store = dist.TCPStore(trainer, port, 2, is_master=False, timeout=at_once)  # type: ignore[attr-defined]  # torch's stub lacks it
        return NcclGroup(store, device, limit) if device.type == "cuda" else GlooGroup(store, limit)
    except RuntimeError as error:  # torch's errors of stores and groups
        raise BadRequest(
            f"The trainer at port {port} cannot be joined: {type(error).__name__}.", "init_info"
        ) from error


@dataclass(frozen=True)
class Announced:
    """A weight that is about to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def announced(info: Mapping[str, Any], most_bytes: int) -> list[Announced]:
    """The weights that a request announces, at most ``most_bytes`` of them.

    Raises:
        BadRequest: If names, types and shapes are no lists of the same length, or anything in them is wrong.
    """
    names, dtypes, shapes = columns = [info.get(name) for name in ("names", "dtype_names", "shapes")]
    fine = (
        isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list)
        and 0 < len(names) == len(dtypes) == len(shapes) <= MOST_WEIGHTS
        and all(isinstance(name, str) for name in names) and all(name in DTYPES for name in map(str, dtypes))
        and all(isinstance(shape, list) and len(shape) <= 8 for shape in shapes)
        and all(type(size) is int and 0 <= size < 2**32 for shape in shapes for size in shape)
    )  # fmt: skip
    if not fine:
        types = ", ".join(DTYPES)
        raise BadRequest(f"update_info must have names, dtype_names ({types}) and shapes, one each.", "update_info")
    weights = [Announced(name, DTYPES[dtype], tuple(shape)) for name, dtype, shape in zip(*columns, strict=True)]
    if sum(weight.nbytes for weight in weights) > most_bytes:
        raise BadRequest("update_info announces more than the model's weights.", "update_info")
    return weights


def received(group: Group, weights: Sequence[Announced], device: torch.device) -> Iterator[list[tuple[str, Tensor]]]:
    """The weights of an update in the host's memory, piece by piece.

    Raises:
        TrainerGoneError: If they do not come.
    """
    piece, nbytes = list[Announced](), 0
    for number, weight in enumerate(weights, 1):
        piece.append(weight)
        nbytes += weight.nbytes
        if nbytes > PIECE_BYTES or number == len(weights):
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            try:
                group.receive(buffer)
            except RuntimeError as error:  # torch's
                raise TrainerGoneError("The trainer has gone, or takes too long: join it again.") from error
            parts = buffer.cpu().split([each.nbytes for each in piece])  # type: ignore[no-untyped-call]  # torch leaves it untyped
            # a copy each: views of other types must begin where such numbers may
            yield [(w.name, p.clone().view(w.dtype).view(w.shape)) for w, p in zip(piece, parts, strict=True)]
            piece, nbytes = [], 0
