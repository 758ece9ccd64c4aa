"""Download: numbers of the device on their way to the host, which waits for them alone, and only when it reads them."""

from __future__ import annotations

import torch
from torch import Tensor


class Download:
    """Copies of tensors for the host, queued behind everything that the device has been asked for so far.

    Args:
        *tensors: Tensors on one device; nothing may write to them afterwards, since CPU tensors are not copied.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # a GPU's into page-locked memory
        self._done: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(tensors[0].device))

    def read(self) -> list[Tensor]:
        """The numbers on the CPU; waits for the copies, but for nothing that was queued after them."""
        if self._done is not None:
            self._done.synchronize()
        return self._copies
