"""Transfers between host and device: integers in one piece and without a wait, and numbers waited for when read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Numbers: TypeAlias = Sequence[int] | Sequence[Sequence[int]]


def upload(numbers: Sequence[Numbers], device: torch.device) -> list[Tensor]:
    """Copy integers to a device, all in one copy that the host does not wait for.

    Args:
        numbers: Lists of integers, or lists of equally long lists.
        device: Device that they go to.

    Returns:
        A tensor for each, int64; on a GPU views of one piece of memory.
    """
    tensors = [torch.tensor(some, dtype=torch.int64) for some in numbers]
    if device.type == "cpu":
        return tensors
    # page-locked memory: from any other the copy would wait; torch keeps it until the copy is done
    table = torch.cat([tensor.flatten() for tensor in tensors]).pin_memory()
    parts = table.to(device, non_blocking=True).split_with_sizes([tensor.numel() for tensor in tensors])
    return [flat.view(tensor.shape) for flat, tensor in zip(parts, tensors, strict=True)]


class Download:
    """Copies of tensors for the host, queued after everything that was launched on the device so far.

    Args:
        *tensors: Tensors on one device; nothing may write to them afterwards, since CPU tensors are not copied.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # a GPU's into page-locked memory
        self._done: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._done.record(torch.cuda.current_stream(tensors[0].device))

    def read(self) -> list[Tensor]:
        """The numbers on the CPU; waits for the copies, but for nothing that was queued after them."""
        if self._done is not None:
            self._done.synchronize()
        return self._copies
