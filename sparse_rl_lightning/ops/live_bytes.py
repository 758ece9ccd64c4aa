"""LiveBytes: the memory that a piece of code has at a time, on tensors of any kind, even those that are only shapes."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of what operations allocate inside it, as long as it lives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.now = self.most = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            memory = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            # no view of what was there before
            if memory is not None and memory._cdata not in self._alive and memory._cdata not in inputs:
                self._alive.add(memory._cdata)
                self.now += memory.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(memory, self._freed, memory._cdata, memory.nbytes())
        return out

    def _freed(self, key: int, nbytes: int) -> None:
        self._alive.discard(key)
        self.now -= nbytes
