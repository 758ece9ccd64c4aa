"""Numbers that the host knows and the device needs, copied in one piece and without a wait."""

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
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
