"""CUDA graphs of the pretend GPU: ops are recorded, and replayed without Python.

Like real ones they read and write the tensors they were recorded with. What is recorded has not run when the capture
ends, memory of a graph that is not written from outside is anybody's after a replay (it is poisoned), and what makes
the host wait, or copies from its memory, spoils the capture. A capture is of one stream: what is done on another device
meanwhile runs, and is not recorded. Without a stream of its own a capture gets torch's, which is on the device that was
the current one when the first of all was made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sparse_rl_lightning.rollout.engine.engine import capture_stream

CUDA = torch.device("cuda", 0)
REFUSED, SPOILED = 900, 901  # cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureInvalidated


def poison(tensor: Tensor) -> Tensor:
    """Fill a tensor with what nobody may read: NaN, True or an absurd number."""
    if tensor.is_meta:
        return tensor
    if tensor.itemsize == 1 and tensor.is_floating_point():  # eight bits: NaN has all bits but the sign
        tensor.view(torch.uint8).fill_(0x7F)
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(0x5A if tensor.itemsize == 1 else -(2 ** (8 * tensor.itemsize - 3)) + 7)
    return tensor


def error(code: int, text: str) -> torch.AcceleratorError:
    """An error as torch raises it."""
    made = torch.AcceleratorError(f"CUDA error: {text}")
    made.error_code = code
    return made


@dataclass
class Node:
    """One recorded op."""

    func: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    outs: list[Tensor]  # what it returned, to be filled again by a replay


@dataclass
class PretendGraph:
    """What ``torch.cuda.CUDAGraph`` is on the pretend GPU."""

    nodes: list[Node] = field(default_factory=list)
    temporaries: list[Tensor] = field(default_factory=list)  # memory of the graph
    replays: int = 0

    def replay(self) -> None:
        """Run the recorded ops on the tensors they were recorded with."""
        self.replays += 1
        with torch._C.DisableTorchFunction():  # the values inside, without the pretend GPU: seconds less
            for node in self.nodes:
                out = node.func(*node.args, **node.kwargs)
                for own, new in zip(node.outs, [out] if isinstance(out, Tensor) else out or (), strict=False):
                    own.copy_(new)
            self.spoil()

    def spoil(self) -> None:
        """Poison the memory of the graph: others may use it between two replays."""
        for tensor in self.temporaries:
            poison(tensor)


@dataclass(eq=False)
class PretendStream:
    """What ``torch.cuda.Stream`` is on the pretend GPU: a name, since everything is done in order."""

    device: torch.device

    def wait_stream(self, other: PretendStream) -> None:
        """Nothing to do."""


class Captures:
    """The part of ``torch.cuda`` that graphs are made with; at most one capture at a time.

    Args:
        place: Names the file and line that runs now.
    """

    def __init__(self, place: Callable[[], str]) -> None:
        self.place = place
        self.current = CUDA  # the current device
        self.running_on = CUDA  # where what runs now does
        self._streams: dict[torch.device, PretendStream] = {}  # the current one of each device
        self._default: PretendStream | None = None  # of captures that are given none
        self.graphs: list[PretendGraph] = []
        self.refused: list[tuple[str, str]] = []  # file and line, and what happened there
        self._graph: PretendGraph | None = None
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # memory that the capture wrote to, and what it held
        self._is_spoiled = False

    def device(self, which: Any = None) -> torch.device:
        """The device of this number or name, by default the current one."""
        named = torch.device("cuda", which) if isinstance(which, int) else torch.device(which or "cuda")
        return named if named.index is not None else self.current

    @property
    def _captured(self) -> PretendGraph | None:
        """The graph that what runs now becomes a part of."""
        is_here = self._graph is not None and self._streams.get(self.running_on) is self._stream
        return self._graph if is_here else None

    def before_writing(self, tensors: list[Tensor]) -> None:
        """Remember what memory holds that is about to be written."""
        for tensor in tensors if self._captured is not None else ():
            memory = tensor.untyped_storage()
            if memory._cdata not in self._before and not tensor.is_meta:
                whole = torch.empty(0, dtype=torch.uint8).set_(memory)
                self._before[memory._cdata] = whole, whole.clone()

    def allocated(self, tensors: list[Tensor]) -> None:
        """Count tensors as memory of the graph, if there is a capture."""
        if self._captured is not None:
            self._captured.temporaries += tensors

    def record(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], outs: list[Tensor]) -> None:
        """Add an op that has run to the graph, if there is a capture."""
        self.allocated(outs)
        if self._captured is not None:
            self._captured.nodes.append(Node(func, args, kwargs, outs))

    def refuse(self, what: str) -> None:
        """Spoil the capture, if there is one."""
        if self._graph is not None:
            self.refused.append((self.place(), what))
            self._is_spoiled = True
            raise error(REFUSED, f"operation not permitted when stream is capturing ({what} at {self.place()})")

    @contextlib.contextmanager
    def capture(
        self, graph: PretendGraph, pool: Any = None, stream: PretendStream | None = None, capture_error_mode: str = ""
    ) -> Iterator[None]:
        """Like ``torch.cuda.graph``: what ran in it has not run afterwards, and an error in it comes first."""
        assert self._graph is None, "a capture in a capture"
        if stream is None:
            stream = self._default = self._default or PretendStream(self.current)
        self._graph, self._stream, self._before, self._is_spoiled = graph, stream, {}, False
        try:
            with self.on_stream(stream):
                yield
        finally:
            self._graph = None
            for memory, held in self._before.values():
                memory.copy_(held)
            graph.spoil()
            if self._is_spoiled:
                raise error(SPOILED, "operation failed due to a previous error during capture")
        self.graphs.append(graph)

    @contextlib.contextmanager
    def on_device(self, which: Any) -> Iterator[None]:
        """Like ``torch.cuda.device``."""
        before, self.current = self.current, self.device(which)
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def on_stream(self, stream: PretendStream) -> Iterator[None]:
        """Like ``torch.cuda.stream``: its device becomes the current one."""
        before = self.current_stream(stream.device)
        with self.on_device(stream.device):
            self._streams[stream.device] = stream
            try:
                yield
            finally:
                self._streams[stream.device] = before

    def current_stream(self, which: Any = None) -> PretendStream:
        """Like ``torch.cuda.current_stream``."""
        device = self.device(which)
        return self._streams.setdefault(device, PretendStream(device))

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """``torch.cuda`` as far as the package uses it, with two devices."""
        generator = SimpleNamespace(clone_state=lambda: None, graphsafe_set_state=lambda state: None)
        capture_stream.cache_clear()
        with (
            mock.patch.multiple(
                torch.cuda, create=True, CUDAGraph=PretendGraph, graph=self.capture, graph_pool_handle=lambda: (0, 1),
                Stream=lambda device=None: PretendStream(self.device(device)), current_stream=self.current_stream,
                stream=self.on_stream, device=self.on_device, current_device=lambda: self.current.index,
                synchronize=lambda device=None: self.refuse("synchronize"), default_generators=(generator, generator),
            ),
            mock.patch.multiple(
                torch._C, create=True, _cuda_endAllocateToPool=lambda index, pool: None,
                _cuda_releasePool=lambda index, pool: None,
            ),
        ):  # fmt: skip
            yield
        capture_stream.cache_clear()
