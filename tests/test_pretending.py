"""The pretend GPU refuses, counts and poisons what a real one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.pretend_gpu import CUDA, IDLE, PretendGPU, host


@pytest.fixture
def gpu() -> Iterator[PretendGPU]:
    with PretendGPU() as device:
        yield device


def on_gpu(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cuda")


def waits(gpu: PretendGPU) -> list[str]:
    return sorted(what for (_, what), count in gpu.waits.items() for _ in range(count))


def test_two_devices_in_one_function_are_refused(gpu: PretendGPU) -> None:
    tensor, on_cpu = on_gpu(1, 2), torch.ones(2)
    for mixes in (lambda: tensor + on_cpu, lambda: torch.cat([tensor, on_cpu]), lambda: on_cpu[tensor.long()]):
        with pytest.raises(RuntimeError, match=r"on the CPU|cuda:0 and cpu: \w+ at tests/test_pretending.py"):
            mixes()
    assert (tensor + torch.tensor(1.0)).tolist() == [2, 3]  # a number is a number


NUMBER = "copy of a number from host memory"
WAITS: dict[str, tuple[Callable[[Tensor, Tensor], object], list[str]]] = {
    "t.item()": (lambda t, i: t[0].item(), ["a number"]),
    "bool(t)": (lambda t, i: bool(t.any()), ["a number"]),
    "int(t)": (lambda t, i: int(t.max()), ["a number"]),
    "t.tolist()": (lambda t, i: t.tolist(), ["copy to host memory"]),
    "t.cpu()": (lambda t, i: t.cpu(), ["copy to host memory"]),
    "t.to(cpu)": (lambda t, i: t.to("cpu"), ["copy to host memory"]),
    "t.to(cpu, later)": (lambda t, i: t.to("cpu", non_blocking=True), []),
    "t.nonzero()": (lambda t, i: t.nonzero(), ["nonzero"]),
    "t[mask]": (lambda t, i: t[t > 1], ["a mask as an index"]),
    "t[i] with a number on the device": (lambda t, i: t[i[0]], ["a number"]),
    "repeat_interleave": (lambda t, i: t.repeat_interleave(i), ["repeat_interleave"]),
    "t[list]": (lambda t, i: t[[0, 1]], ["copy of an index from host memory"]),
    "torch.tensor": (lambda t, i: torch.tensor([1], device=t.device), ["copy from host memory"]),
    "t.to(device)": (lambda t, i: torch.ones(2).to(t.device), ["copy from host memory"]),
    "t.copy_(on the CPU)": (lambda t, i: t.copy_(torch.ones(3)), ["copy from host memory"]),
    "t[int] = number": (lambda t, i: t.__setitem__(-1, 0), [NUMBER]),
    "t[index] = number": (lambda t, i: t.__setitem__(i, 0), [NUMBER]),
    "t[list] = number": (lambda t, i: t.__setitem__([0], 0), ["copy of an index from host memory"]),
    "t[slice] = number": (lambda t, i: t.__setitem__(slice(1), 0), []),
    "t[mask] = number": (lambda t, i: t.__setitem__(t > 1, 0), []),
    "t[index] = t": (lambda t, i: t.__setitem__(i, 2 * t[:2]), []),
    "t.fill_(number)": (lambda t, i: t[-1:].fill_(2), []),
    "repeat_interleave of a known size": (lambda t, i: t.repeat_interleave(i, output_size=3), []),
    "torch.full": (lambda t, i: torch.full((2,), 3.0, device=t.device), []),
    "torch.arange": (lambda t, i: torch.arange(len(t), device=t.device), []),
    "t.long()": (lambda t, i: t.long() + 1, []),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_are_counted_by_line_and_refused_in_a_capture(gpu: PretendGPU, name: str) -> None:
    use, expected = WAITS[name]
    tensor, index = on_gpu(1, 2, 3), torch.arange(1, 3, device="cuda")
    index = index if name != "repeat_interleave" and "known" not in name else torch.ones_like(tensor).long()
    gpu.reset()
    use(tensor, index)
    line = WAITS[name][0].__code__.co_firstlineno
    assert waits(gpu) == expected
    assert {at for at, _ in gpu.waits} <= {f"tests/test_pretending.py:{line}"}

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=None, capture_error_mode="thread_local"):
            use(tensor, index)

    if not expected:
        capture()
        return
    with pytest.raises(torch.AcceleratorError, match="previous error") as raised:
        capture()
    assert raised.value.error_code == 901  # type: ignore[attr-defined]
    assert "not permitted when stream is capturing" in str(raised.value.__context__)
    assert gpu.captures.refused == [(f"tests/test_pretending.py:{line}", expected[0])]


def test_a_copy_that_does_not_wait_has_its_numbers_behind_an_event(gpu: PretendGPU) -> None:
    tensor, event = on_gpu(1, 2), torch.cuda.Event()
    gpu.reset()
    copy = tensor.to("cpu", non_blocking=True)
    event.record()
    tensor.zero_()
    assert not waits(gpu)
    assert copy.isnan().all()
    event.synchronize()
    assert copy.tolist() == [1, 2]  # as they were when the copy was queued
    assert not waits(gpu)
    assert [count for (where, _), count in gpu.late.items() if where.startswith("tests/test_pretending.py")] == [1]
    later = tensor.to("cpu", non_blocking=True)
    event.synchronize()
    assert later.isnan().all()  # the event was before it
    event.record()
    event.synchronize()
    assert later.tolist() == [0, 0]
    assert waits(gpu) == [IDLE]


def test_launches_and_bytes_are_counted_and_views_are_free(gpu: PretendGPU) -> None:
    tensor = torch.zeros(4, 8, device="cuda")
    gpu.reset()
    view = tensor[1:].T.unsqueeze(0)
    assert gpu.launches.total() == 0
    assert view.shape == (1, 8, 3)
    (tensor + tensor[:1]).mul_(2)  # fmt: skip
    assert sorted(what for _, what in gpu.launches) == ["add", "mul_"]
    assert sorted(nbytes for _, nbytes in gpu.log) == [4 * (32 + 32), 4 * (32 + 8 + 32)]


def test_new_memory_and_that_of_a_graph_is_poisoned(gpu: PretendGPU) -> None:
    assert host(torch.empty(3, device="cuda")).isnan().all()
    assert host(torch.empty_like(on_gpu(1, 2))).isnan().all()
    assert host(torch.empty(3, dtype=torch.int64, device="cuda")).max() < -(2**60)
    assert host(torch.empty(3, dtype=torch.float8_e4m3fn, device="cuda")).float().isnan().all()
    assert not host(torch.zeros(3, device="cuda")).any()
    tensor, graph = on_gpu(1, 2), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=None, capture_error_mode="thread_local"):
        inside = tensor * 2
        tensor.add_(inside)
    assert host(tensor).tolist() == [1, 2]  # captured, not run
    graph.replay()
    assert host(tensor).tolist() == [3, 6]
    assert host(inside).isnan().all()  # the graph's own memory


def test_a_second_device_has_tensors_of_its_own(gpu: PretendGPU) -> None:
    here, there = on_gpu(1, 2), torch.ones(2, device="cuda:1")
    assert (here.device, there.device, (2 * there)[1:].device) == (CUDA, *[torch.device("cuda", 1)] * 2)
    with pytest.raises(RuntimeError, match=r"found cuda:0 and cuda:1: add at tests/test_pretending\.py"):
        here + there
    assert (here + there.to(here.device)).tolist() == [2, 3]
    assert here.copy_(there).device == CUDA
    gpu.reset()
    with torch.cuda.device(1):
        assert torch.zeros(1, device="cuda").device == there.device
        there.mul_(2)
        here.add_(1)
    assert [what for (_, what) in gpu.strays] == ["add_"]
    assert torch.cuda.current_device() == 0


def test_a_capture_is_of_one_stream(gpu: PretendGPU) -> None:
    """Torch's own is on the device that was current when it was made: on any other, nothing is captured."""
    here, there = on_gpu(1), torch.ones(1, device="cuda:1")

    def capture(tensor: Tensor, stream: torch.cuda.Stream | None = None) -> int:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=None, stream=stream, capture_error_mode="thread_local"):
            tensor.add_(1)
        return len(graph.nodes)  # type: ignore[attr-defined]

    assert (capture(here), host(here).item()) == (1, 1)
    with torch.cuda.device(1):
        assert (capture(there), host(there).item()) == (0, 2)
    assert (capture(there, torch.cuda.Stream(1)), host(there).item()) == (1, 2)


def test_without_values_reads_are_answered() -> None:
    with PretendGPU("meta", lambda name, tensor: 5) as gpu:
        tensor = torch.zeros(1000, 1000, device="cuda")
        assert tensor.device == CUDA
        assert int(tensor.sum()) == 5
        assert tensor.nonzero().shape == (5, 2)
        assert tensor[tensor > 1].shape == (5,)
        assert (tensor + 1).to("cpu").is_meta
    assert waits(gpu) == ["a mask as an index", "a number", "copy to host memory", "nonzero"]
