"""What a failed capture of a decode step does, played on the CPU: the calls of torch.cuda are written down."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rollout.engine.engine import (
    Step,
    StepGraphs,
    StepRows,
    bucket,
    buckets,
    capture_stream,
    first_error,
    is_of_capture,
)

WAITED, SPOILED, ILLEGAL = 900, 901, 700


def accelerator_error(code: int, text: str) -> torch.AcceleratorError:
    error = torch.AcceleratorError(f"CUDA error: {text}")
    error.error_code = code  # as torch sets it
    return error


def waited() -> RuntimeError:
    return accelerator_error(WAITED, "operation not permitted when stream is capturing")


class Cuda:
    """torch.cuda as far as a capture goes; like torch's, a spoiled capture raises at its end and leaves its stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.captured, self.log = "own", False, list[str]()
        self.generator = SimpleNamespace(
            clone_state=lambda: "before", graphsafe_set_state=lambda state: self.log.append(f"generator {state}")
        )
        for name, value in {
            "Stream": lambda device: SimpleNamespace(wait_stream=lambda other: None),
            "current_stream": lambda device: SimpleNamespace(wait_stream=lambda other: None),
            "stream": self.on_stream, "graph": self.graph, "graph_pool_handle": lambda: (0, 1),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.log.append("replay")),
            "default_generators": (self.generator,),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            call = lambda index, pool, name=name: self.log.append(f"{name} {index} {pool}")  # noqa: E731
            monkeypatch.setattr(torch._C, name, call, raising=False)

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        before = self.stream
        try:
            yield
        finally:
            self.stream = before

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert stream is capture_stream(torch.device("cuda", 0))
        self.captured, before = True, self.stream
        self.stream = "capture"
        try:
            yield
        except torch.AcceleratorError:
            self.captured = False
            raise accelerator_error(SPOILED, "operation failed due to a previous error during capture") from None
        self.captured, self.stream = False, before


def graphed(cuda: Cuda, step: Callable[[bool], None], required: bool = False) -> tuple[StepGraphs, Step]:
    """A step that is told whether it is being captured."""
    graphs = StepGraphs(8, torch.device("cuda", 0), required)
    return graphs, lambda rows: graphs.run(lambda rows: step(cuda.captured), rows)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    on_cpu = lambda slots, count, num_slots, device: StepRows(torch.zeros(count), torch.zeros(count), slots)  # noqa: E731
    monkeypatch.setattr(StepRows, "of", on_cpu)
    capture_stream.cache_clear()
    yield Cuda(monkeypatch)
    capture_stream.cache_clear()


ROWS = StepRows(torch.zeros(8), torch.zeros(8), [])


def test_a_captured_step_is_replayed(cuda: Cuda) -> None:
    calls: list[bool] = []
    graphs, step = graphed(cuda, calls.append)
    step(ROWS)
    step(ROWS)
    assert calls == [False, True]  # a step to warm up, one to capture
    assert cuda.log == ["replay", "replay"]
    assert graphs.enabled


def test_what_cannot_be_captured_runs_eagerly_and_says_why(cuda: Cuda) -> None:
    calls: list[bool] = []

    def run(captured: bool) -> None:
        calls.append(captured)
        if captured:
            raise waited()

    graphs, step = graphed(cuda, run)
    with pytest.warns(UserWarning, match="cannot be captured: CUDA error: operation not permitted when stream is cap"):
        step(ROWS)
    step(ROWS)
    assert calls == [False, True, False, False]
    assert not graphs.enabled
    assert cuda.stream == "own"
    assert cuda.log == ["generator before", "_cuda_endAllocateToPool 0 (0, 1)", "_cuda_releasePool 0 (0, 1)"]


def test_what_cannot_be_captured_is_an_error_if_graphs_are_required(cuda: Cuda) -> None:
    def run(captured: bool) -> None:
        if captured:
            raise waited()

    step = graphed(cuda, run, required=True)[1]
    for _ in range(2):  # nothing goes on eagerly
        with pytest.raises(UserError, match="cuda_graphs=require, but a decode step cannot be captured: CUDA err"):
            step(ROWS)
    assert cuda.stream == "own"


def test_graphs_are_few_and_captured_up_front_the_largest_first(cuda: Cuda) -> None:
    counts: list[int] = []
    graphs = StepGraphs(90, torch.device("cuda", 0))
    graphs.run(lambda rows: counts.append(len(rows.slots)), ROWS)
    assert counts[::2] == counts[1::2] == [96, 64, 48, 32, 24, 16, 8]  # each once to warm up, once to capture
    graphs.run(lambda rows: counts.append(0), ROWS)
    assert 0 not in counts
    assert cuda.log == ["replay", "replay"]
    assert len(buckets(512)) == 12
    assert buckets(1024)[:5] == [1024, 896, 768, 640, 512]
    for num_slots in (1, 7, 8, 9, 500, 513, 1000):
        assert {bucket(count, on_gpu=True) for count in range(1, num_slots + 1)} == set(buckets(num_slots))


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), accelerator_error(ILLEGAL, "an illegal memory access"),
     RuntimeError("a slot is full"), ValueError("a mistake")],
)  # fmt: skip
def test_other_errors_are_raised_as_what_they_are(cuda: Cuda, error: Exception, captured: bool) -> None:
    def run(now: bool) -> None:
        if now == captured:
            raise error

    graphs, step = graphed(cuda, run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Exception) as raised:  # noqa: PT011  # which one is what is tested
            step(ROWS)
    assert raised.value is error  # not what torch says at the end of the capture
    assert graphs.enabled  # a graph is tried again next time
    assert cuda.stream == "own"


def test_a_warm_up_that_waits_is_no_reason_against_graphs(cuda: Cuda) -> None:
    """Nothing is captured yet: an error there is the step's own, whatever its words."""

    def run(captured: bool) -> None:
        if not captured:
            raise RuntimeError("something about captured things")

    with pytest.raises(RuntimeError, match="captured things"):
        graphed(cuda, run)[1](ROWS)


def test_the_reason_is_the_first_error_and_nothing_before_the_capture() -> None:
    outside, first, last = ValueError("the caller's"), waited(), accelerator_error(SPOILED, "a previous error")
    first.__context__, last.__context__ = outside, first
    assert first_error(last, outside) is first
    assert first_error(last, None) is outside
    assert first_error(outside, None) is outside


def test_errors_of_a_capture_are_told_from_others() -> None:
    assert is_of_capture(RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture"))
    assert is_of_capture(waited())
    assert not is_of_capture(torch.OutOfMemoryError("out of memory while capturing"))
    assert not is_of_capture(accelerator_error(ILLEGAL, "an illegal memory access, noticed while capturing"))
    assert not is_of_capture(ValueError("captured"))
