"""Rollouts between processes: as bytes that run nothing when they are read, and from rank to rank.

A rollout's record of evictions travels in its compact form, two bytes per dead token.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_rl_lightning.records import Rollout


def to_bytes(rollout: Rollout) -> bytes:
    """The rollout as bytes for :func:`from_bytes`, whatever device it is on."""
    buffer = io.BytesIO()
    torch.save(_owned(rollout.state()), buffer)
    return buffer.getvalue()


def from_bytes(data: bytes, device: torch.device | str = "cpu") -> Rollout:
    """The rollout that :func:`to_bytes` wrote.

    Reads tensors, numbers and texts only, so bytes of unknown origin can do no more than be refused.

    Args:
        data: From :func:`to_bytes`.
        device: Where its tensors go.

    Raises:
        ValueError: If the bytes hold anything else.
    """
    try:
        return Rollout.from_state(torch.load(io.BytesIO(data), map_location=device, weights_only=True))
    except (pickle.UnpicklingError, RuntimeError, EOFError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"These {len(data)} bytes are no rollout: {reason}") from error


def broadcast_rollout(
    rollout: Rollout | None, src: int = 0, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> Rollout:
    """The rollout of rank ``src`` on every rank; a collective call.

    Args:
        rollout: Looked at on rank ``src`` only.
        src: Global rank that has it.
        group: Processes that take part, default all.
        device: Where the result goes, and what the backend moves: ``cpu`` for gloo, the own GPU for nccl.

    Raises:
        ValueError: If rank ``src`` gives none.
    """
    own = dist.get_rank() == src
    if own and rollout is None:
        raise ValueError(f"broadcast_rollout: rank {src} is the source and gives no rollout.")
    data = _tensor(rollout, device) if own and rollout is not None else torch.empty(0, dtype=torch.uint8, device=device)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, src, group=group)
    data = data if own else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, src, group=group)
    return from_bytes(data.cpu().numpy().tobytes(), device)


def gather_rollouts(rollout: Rollout, group: dist.ProcessGroup | None = None) -> Rollout:
    """The sequences of all ranks, in the order of ranks, on every rank; a collective call.

    Args:
        rollout: This rank's, with the same fields as the others'; lengths may differ.
        group: Processes that take part, default all.

    Raises:
        ValueError: If the ranks' rollouts know different fields.
    """
    device = rollout.sequences.device
    data = _tensor(rollout, device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    pairs = zip(parts, sizes, strict=True)
    return Rollout.cat([from_bytes(part[: int(size)].cpu().numpy().tobytes(), device) for part, size in pairs])


def _tensor(rollout: Rollout, device: torch.device | str) -> Tensor:
    """The bytes as a tensor that a collective can move."""
    return torch.frombuffer(bytearray(to_bytes(rollout)), dtype=torch.uint8).to(device)


def _owned(value: Any) -> Any:
    """The same with tensors that share memory with nothing: a part of a rollout would be stored as the whole."""
    if isinstance(value, dict):
        return {name: _owned(item) for name, item in value.items()}
    return value.detach().clone() if isinstance(value, Tensor) else value
