"""A vllm that can only be a trainer's end of its weight transfer, over gloo: what TRL imports of it, and no more.

TRL refuses to exist without vllm, whose transfer needs GPUs. What is sent is what vLLM sends: uint8 pieces, each closed
once it holds more than 1 GiB.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import BroadcastOptions, ProcessGroupGloo

PIECE_BYTES = 2**30


class Endpoint:
    """Rank 0 of a group."""

    def __init__(self, port: int, size: int) -> None:
        limit = timedelta(seconds=60)
        store = dist.TCPStore("127.0.0.1", port, size, is_master=True, timeout=limit)  # type: ignore[attr-defined]
        self._group: Any = ProcessGroupGloo(store, 0, size, limit)
        self.group = SimpleNamespace(store=store, socket=None)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        assert src == 0
        self._group.broadcast([tensor], BroadcastOptions()).wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def trainer_init(info: dict[str, Any]) -> Endpoint:
    """As in vllm.distributed.weight_transfer.nccl_common."""
    return Endpoint(info["master_port"], info["world_size"])


def packed_nccl_broadcast_producer(
    iterator: Iterator[Any], group: Endpoint, src: int, post_iter_func: Callable[[Any], Tensor]
) -> None:
    """As in vllm.distributed.weight_transfer.packed_tensor."""
    piece = list[Tensor]()
    for item in iterator:
        piece.append(post_iter_func(item).contiguous().view(torch.uint8).view(-1))
        if sum(map(len, piece)) > PIECE_BYTES:
            group.broadcast(torch.cat(piece), src)
            piece = []
    if piece:
        group.broadcast(torch.cat(piece), src)


def install() -> None:
    """Be what ``import vllm`` finds."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.31.0", "LLM": None, "RequestOutput": None, "SamplingParams": None},
        "vllm.sampling_params": {"StructuredOutputsParams": None},
        "vllm.utils": {},
        "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1", "get_open_port": free_port},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": trainer_init},
        "vllm.distributed.weight_transfer.packed_tensor": {
            "packed_nccl_broadcast_producer": packed_nccl_broadcast_producer
        },
    }
    for name, values in contents.items():
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        module.__dict__.update(values)
        sys.modules[name] = module
