"""A pretend GPU: tensors that claim a device cuda:0 and hold CPU values, to rehearse what the host does with a GPU.

Every torch function that meets such a tensor, or is asked for the device cuda, runs on the values inside. On the way

- tensors of two devices in one function are refused; there is a cuda:1, too, and what is launched on a device that is
  not the current one is counted by file and line (Triton's kernels would be launched on the wrong one),
- waits for the device (reads, and copies from host memory) are counted by file and line; a copy to the host that does
  not wait has its numbers once an event behind it is waited for, which counts as a wait if the device then idles,
- launches, and the bytes that torch's own ops move, are counted by file and line,
- memory that was not initialized is filled with NaN and absurd numbers,
- CUDA graphs record what runs and replay it without Python (``pretend_graph.py``).

Ops of this library run their CPU kernels, or the reference where there is none: the kernels themselves are not
rehearsed, unless the library for the CPU holds them, emulated. Which functions wait is a list made by reading torch; a
wait that is not in it is not found.

With ``backing="meta"`` tensors have shapes and no values, for counts at real sizes; what a read returns is then up to
the caller.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_rl_lightning.ops import library
from sparse_rl_lightning.ops.pools import FLOAT8
from tests.native_cases import EMULATED
from tests.pretend_graph import CUDA, Captures, poison

ROOT = str(Path(library.__file__).resolve().parents[2]) + "/"
PACKAGE = ROOT + "sparse_rl_lightning/"
OUTSIDE = ("/site-packages/", "/dist-packages/", "tests/pretend_g", "/contextlib.py", "<")
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "equal",
         "bincount"}  # fmt: skip
NO_INPUT = {"fill_", "zero_", "full", "zeros", "ones", "arange", "scalar_tensor", "zeros_like", "full_like",
            "ones_like", "new_zeros", "new_full"}  # fmt: skip
LOOKUPS = {"index", "embedding", "gather", "index_select"}  # read as much as they return, not all of the first argument
PARTIAL_WRITES = {"index_put_", "_index_put_impl_", "scatter_", "index_fill_", "index_copy_"}
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
NO_KERNEL = {FLOAT8, torch.float16}  # in a library for CPUs
ON_GPUS_ALONE = {torch.ops.aten.bmm.dtype: lambda left, right, dtype: left.to(dtype) @ right.to(dtype)}
"""Ops that the oldest torch has for no CPU."""
_ATTRIBUTES = {"is_cuda": True, "is_cpu": False, "is_meta": False}
MEMORY, CAPABILITY = 2**31, (9, 0)  # bytes, compute capability
IDLE = "an event with nothing queued behind it"
Place = tuple[str, str]  # file and line, and what happened there


class DeviceTensor(Tensor):
    """A tensor that claims to be on the pretend GPU; ``inner`` has its values, ``home`` is its device."""

    inner: Tensor
    home: torch.device

    @staticmethod
    def __new__(cls: type[Self], inner: Tensor, home: torch.device = CUDA) -> Self:
        made: Self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="meta",
        )  # fmt: skip
        made.inner, made.home = inner, home
        return made

    def __repr__(self, **kwargs: Any) -> str:
        return f"DeviceTensor({self.inner!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return attribute(func, args[0])
        raise AssertionError(f"{func} on a pretend GPU that is switched off: use host() to look at its tensors")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} went past the pretend GPU")


def attribute(func: Any, tensor: DeviceTensor) -> Any:
    """What ``tensor.shape``, ``tensor.device`` and the like return; the host knows it."""
    name = func.__self__.__name__
    if name == "device":
        return tensor.home
    value = _ATTRIBUTES[name] if name in _ATTRIBUTES else func(tensor.inner)
    return DeviceTensor(value, tensor.home) if isinstance(value, Tensor) else value


def host(value: Any) -> Any:
    """The values of a tensor, without asking the pretend device."""
    return value.inner if isinstance(value, DeviceTensor) else value


def leaves_of(value: Any) -> list[Any]:
    """What lists, tuples and dictionaries hold, at any depth."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return [value]
    return [leaf for part in value for leaf in (leaves_of(part) if isinstance(part, list | tuple | dict) else (part,))]


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """The same lists, tuples and dictionaries with every leaf changed."""
    if isinstance(value, dict):
        return {name: mapped(change, part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [mapped(change, part) for part in value]
        return parts if type(value) is list else type(value)(parts)
    return change(value)


def place() -> str:
    """File and line that runs now, torch's and other libraries' own left out."""
    frame = sys._getframe(1)
    while any(part in frame.f_code.co_filename for part in OUTSIDE) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename.removeprefix(PACKAGE).removeprefix(ROOT)}:{frame.f_lineno}"


class PretendGPU(TorchFunctionMode):
    """The device, while it is switched on (``with PretendGPU() as gpu``).

    Args:
        backing: Device of the values, "cpu", or "meta" for shapes alone.
        answer: Without values, the number or count that a read returns, from the op's name and its first tensor.
    """

    def __init__(self, backing: str = "cpu", answer: Callable[[str, Tensor], int] | None = None) -> None:
        super().__init__()
        self.backing, self.answer = backing, answer
        self.waits: Counter[Place] = Counter()
        self.late: Counter[Place] = Counter()  # waits for an event with work queued behind it: the device never idles
        self.log: list[tuple[Place, int]] = []  # every launch, and the bytes that it moves if it is one of torch's
        self.num_launched = 0  # in all, graphs left out
        self.strays: Counter[Place] = Counter()  # launches on a device that was not the current one
        self.in_flight: list[tuple[Tensor, Tensor]] = []  # host memory, and what a copy will have written there
        self.captures = Captures(place)
        self.reserved = 0  # the most bytes that were allocated when somebody asked
        self._ops, self._patches = _Ops(self), contextlib.ExitStack()

    def __enter__(self) -> PretendGPU:
        known = library.has_kernel
        replaced = mock.patch.object(library, "has_kernel", lambda name, on: on == "cuda" or known(name, on))
        self._patches.enter_context(replaced)
        self._patches.enter_context(mock.patch.object(torch.cuda, "Event", partial(PretendEvent, self)))
        self._patches.enter_context(self.captures.installed())
        # newer torch asks the driver whether cuDNN's attention can be used, if it may be, before it is refused
        self._patches.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._patches.enter_context(
            mock.patch.multiple(
                torch.cuda, memory_allocated=lambda device=None: self._allocated()[0],
                get_device_capability=lambda device=None: CAPABILITY,
                memory_reserved=lambda device=None: self._allocated()[1],
                mem_get_info=lambda device=None: (MEMORY - self._allocated()[1], MEMORY),
            )
        )  # fmt: skip
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _allocated(self) -> tuple[int, int]:
        """Bytes of all tensors that there are, and those that an allocator would keep in reserve."""
        gc.collect()
        inside = [t.inner.untyped_storage() for t in gc.get_objects() if type(t) is DeviceTensor]
        count = sum({memory._cdata: memory.nbytes() for memory in inside}.values())
        self.reserved = max(self.reserved, count)
        return count, self.reserved

    def reset(self) -> None:
        """Begin to count anew."""
        self.waits.clear()
        self.late.clear()
        self.strays.clear()
        self.log.clear()

    @property
    def launches(self) -> Counter[Place]:
        """How often what was launched where."""
        return Counter(key for key, _ in self.log)

    @property
    def num_queued(self) -> int:
        """Launches and replays of graphs so far."""
        return self.num_launched + sum(graph.replays for graph in self.captures.graphs)

    def copy_of(self, model: Any, home: torch.device = CUDA) -> Any:
        """A copy of a model on the pretend GPU; tied weights stay tied."""
        moved, done = copy.deepcopy(model), dict[int, Any]()
        for module in moved.modules():
            for own in (module._parameters, module._buffers):
                for name, tensor in own.items():
                    if tensor is not None:
                        inner = DeviceTensor(tensor.detach().clone(), home)
                        new = nn.Parameter(inner, requires_grad=False) if isinstance(tensor, nn.Parameter) else inner
                        own[name] = done.setdefault(id(tensor), new)
        return moved

    # ---------------------------------------------------------------- torch functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__" and isinstance(args[0], DeviceTensor):
            return attribute(func, args[0])
        if name == "pin_memory":
            return self._on_pin_memory(func, args, kwargs)
        leaves = leaves_of((args, kwargs))
        on_gpu = any(isinstance(leaf, DeviceTensor) for leaf in leaves)
        if func is torch.device or not (on_gpu or any(map(is_gpu, leaves))):
            return func(*args, **kwargs)
        self.captures.running_on = self._home(leaves, name)
        handler = getattr(self, f"_on_{name.strip('_')}", None)
        if handler is not None:
            return handler(func, args, kwargs)
        is_own = name.split(".")[0] in library.REFERENCES
        if on_gpu and any(_is_on_cpu(leaf) and (leaf.dim() > 0 or is_own) for leaf in leaves):
            raise RuntimeError(f"Expected all tensors on one device, found cuda:0 and cpu: {name} at {place()}")
        return self.run(func, args, kwargs)

    def _home(self, leaves: list[Any], name: str) -> torch.device:
        """The device that a function runs on: the one it is asked for, or that of its tensors."""
        asked = [self.captures.device(leaf) for leaf in leaves if is_gpu(leaf)]
        held = [leaf.home for leaf in leaves if isinstance(leaf, DeviceTensor)]
        if len(set(held)) > 1 and name not in ("copy_", "to"):
            found = " and ".join(sorted({str(one) for one in held}))
            raise RuntimeError(f"Expected all tensors on one device, found {found}: {name} at {place()}")
        return asked[0] if asked else held[-1 if name == "to" else 0]

    def there(self, inner: Tensor) -> DeviceTensor:
        """A tensor with these values where what runs now does."""
        return DeviceTensor(inner, self.captures.running_on)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function on the values inside, its ops counted and recorded."""
        wrappers = {id(t.inner): t for t in leaves_of((args, kwargs)) if isinstance(t, DeviceTensor)}

        def inside(leaf: Any) -> Any:
            return self.backing if is_gpu(leaf) else host(leaf)

        def outside(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return wrappers.get(id(leaf)) if id(leaf) in wrappers else self.there(leaf)

        with self._ops:
            out = func(*mapped(inside, args), **mapped(inside, kwargs))
        return mapped(outside, out)

    def wait(self, what: str) -> None:
        """Count a wait for the device; while capturing it is refused."""
        self.waits[place(), what] += 1
        self.captures.refuse(what)

    # what is not as on the CPU: copies between the devices, and indices that are uploaded

    def _upload(self, values: Tensor, kwargs: Any) -> DeviceTensor:
        self.wait("copy from host memory")
        self._count("copy_", [values], [values])
        return self.there(values.to(self.backing, **kwargs))

    def _on_tensor(self, func: Any, args: Any, kwargs: Any) -> Any:
        rest = {name: value for name, value in kwargs.items() if name != "device"}
        return self._upload(func(*args, **rest), {})

    def _on_as_tensor(self, func: Any, args: Any, kwargs: Any) -> Any:
        return args[0] if isinstance(args[0], DeviceTensor) else self._on_tensor(func, args, kwargs)

    def _on_to(self, func: Any, args: Any, kwargs: Any) -> Any:
        source, rest = args[0], [a for a in args[1:] if not isinstance(a, Tensor) and not _is_device(a)]
        named = [a for a in (*args[1:], kwargs.get("device")) if isinstance(a, Tensor) or _is_device(a)]
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        if isinstance(source, DeviceTensor):
            if not named or isinstance(named[0], DeviceTensor) or is_gpu(named[0]):
                moves = self.captures.running_on != source.home
                return self.run(func, (source, *rest), {**kwargs, "copy": True} if moves else kwargs)
            if kwargs.pop("non_blocking", False):
                return self._download(func(source.inner, *rest, **{**kwargs, "copy": True}))
            self.wait("copy to host memory")
            self._count("copy_", [source.inner], [source.inner])
            return source.inner if self.backing == "meta" else func(source.inner, *rest, **{**kwargs, "copy": True})
        if kwargs.pop("non_blocking", False) and hasattr(source, "is_page_locked"):
            values = func(source, *rest, **kwargs).to(self.backing, copy=True)
            self._count("copy_", [source], [values])
            self.captures.refuse("copy from host memory")
            return self.there(values)
        return self._upload(func(source, *rest, **kwargs).clone(), {})

    def _download(self, values: Tensor) -> Tensor:
        """Page-locked memory that has these values after the next event."""
        self._count("copy_", [values], [values])
        memory = poison(torch.empty_like(values))
        self.in_flight.append((memory, values))
        return memory

    def _on_pin_memory(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Page-locked memory, from which a copy need not wait; a build without CUDA has none."""
        args[0].is_page_locked = True
        return args[0]

    def _on_cpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._on_to(Tensor.to, (args[0], "cpu"), {})

    def _on_tolist(self, func: Any, args: Any, kwargs: Any) -> Any:
        values = self._on_cpu(func, args, {})
        return func(torch.zeros_like(values, device="cpu") if values.is_meta else values)

    _on_numpy = _on_tolist

    def _on_copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, source = args[:2]
        if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
            return self.run(func, args, kwargs)
        self.wait("copy from host memory" if isinstance(target, DeviceTensor) else "copy to host memory")
        func(host(target), host(source))
        return target

    def _on_getitem(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._check_index(args[0], args[1])
        return self.run(func, args, kwargs)

    def _on_setitem(self, func: Any, args: Any, kwargs: Any) -> Any:
        """As torch does: a number is a tensor on the CPU first, and goes to one element or to an index by a copy."""
        target, index, value = args
        self._check_index(target, index)
        on_cpu = not isinstance(value, DeviceTensor)
        if isinstance(index, DeviceTensor) and index.dtype == torch.bool and _is_number(value):
            self.run(Tensor.masked_fill_, (target, index, value), {})
            return None
        indices = [leaf for leaf in leaves_of(index) if isinstance(leaf, DeviceTensor)]
        if on_cpu and (not _is_number(value) or indices or host(target)[mapped(host, index)].dim() == 0):
            self.wait("copy of a number from host memory" if _is_number(value) else "copy from host memory")
        return self.run(func, args, kwargs)

    def _on_scaled_dot_product_attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One kernel on a GPU, whatever it is on the device of the values, where a causal bias has to be a mask."""
        bias = kwargs.get("attn_mask")
        if isinstance(bias, CausalBias):
            kwargs = kwargs | {"attn_mask": bias._materialize(torch.device(self.backing))}
        inside = mapped(host, args), mapped(host, kwargs)
        out = func(*inside[0], **inside[1])
        self._count(func.__name__, [leaf for leaf in leaves_of(inside) if isinstance(leaf, Tensor)], [out])
        self.captures.record(func, *inside, [out])
        return self.there(out)

    def _on_varlen_attn(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Torch's own kernel, which no CPU has: causal attention of packed sequences, one after the other."""
        query, key, value, borders, _, _, _, is_causal, scale, window, grouped = mapped(host, args)[:11]
        assert (is_causal, list(window), grouped, args[13]) == (True, [-1, 0], True, 1)
        assert borders.dtype == torch.int32
        out, group = torch.empty_like(query), query.shape[1] // key.shape[1]
        for start, stop in pairwise(borders.tolist() if self.backing == "cpu" else []):
            q, k, v = (t[start:stop].transpose(0, 1).double() for t in (query, key, value))
            k, v = (t.repeat_interleave(group, dim=0) for t in (k, v))
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            out[start:stop] = attended.transpose(0, 1)
        self._count("_varlen_attn", [query, key, value], [out])
        return self.there(out), None, None

    def _on_mm(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A product of 16 bits into float32 is CUDA's alone; float32 products of the same numbers are exact."""
        if "out_dtype" not in kwargs:
            return self.run(func, args, kwargs)
        assert kwargs == {"out_dtype": torch.float32}
        left, right = (host(arg) for arg in args)
        assert left.dtype == right.dtype
        assert left.dtype in (torch.float16, torch.bfloat16)

        def product(left: Tensor, right: Tensor) -> Tensor:
            return left.float() @ right.float()

        out = product(left, right)
        self._count("mm", [left, right], [out])
        self.captures.record(product, (left, right), {}, [out])
        return self.there(out)

    def _count(self, name: str, tensors: list[Tensor], outs: list[Tensor]) -> None:
        is_own = name.startswith(library.NAMESPACE)
        self.num_launched += 1
        if self.captures.running_on != self.captures.current:
            self.strays[place(), name] += 1
        self.log.append(((place(), name), 0 if is_own else moved(name, tensors, outs)))

    def _check_index(self, target: Any, index: Any) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        if not isinstance(target, DeviceTensor):
            raise RuntimeError(f"indices should be on the CPU like the tensor that is indexed, at {place()}")
        if any(isinstance(part, list) or _is_on_cpu(part) for part in parts):
            self.wait("copy of an index from host memory")

    # ---------------------------------------------------------------- ops

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one op of torch or of this library on values."""
        name, own = func._schema.name.split("::")[-1], func.namespace == library.NAMESPACE
        read = reads(name, args, kwargs)
        if read:
            self.wait(read)
            if self.backing == "meta":
                return self._answered(name, func, args, kwargs)
        written = written_arguments(func._schema, args, kwargs)
        self.captures.before_writing(written)
        if own and not EMULATED and any(isinstance(arg, Tensor) and arg.dtype in NO_KERNEL for arg in args):
            func = library.REFERENCES[name]
        out = ON_GPUS_ALONE.get(func, func)(*args, **kwargs)
        outs = [t for t in leaves_of(out) if isinstance(t, Tensor)]
        tensors = [t for t in leaves_of((args, kwargs)) if isinstance(t, Tensor)]
        memory = {t.untyped_storage()._cdata for t in tensors}
        if not written and all(t.untyped_storage()._cdata in memory for t in outs):
            return out  # a view, or a number
        if name in ALLOCATIONS:
            self.captures.allocated(outs)
            return poison(out)
        self._count(f"{library.NAMESPACE}::{name}" if own else name, tensors, outs)
        self.captures.record(func, args, kwargs, [] if written else outs)
        return out

    def _answered(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a read without values."""
        assert self.answer is not None, f"{name} at {place()} needs an answer"
        first = args[0]
        count = self.answer(name, first)
        self._count(name, [first], [])
        if name == "nonzero":
            return first.new_empty((count, first.dim()), dtype=torch.int64)
        if name == "repeat_interleave":
            return first.new_empty((count,), dtype=torch.int64)
        if name == "_local_scalar_dense":
            return bool(count) if first.dtype == torch.bool else count
        indices: list[Any] = []
        for index in args[1]:
            is_mask = index is not None and index.dtype == torch.bool
            found = first.new_empty((count,), dtype=torch.int64)
            indices += [found] * index.dim() if is_mask else [index]
        return func(first, indices, *args[2:], **kwargs)


class PretendEvent:
    """What ``torch.cuda.Event`` is on the pretend GPU: it delivers the copies to the host queued before it."""

    def __init__(self, gpu: PretendGPU) -> None:
        self._gpu = gpu

    def record(self, stream: Any = None) -> None:
        """Queue the event."""
        self._queued, self._before = self._gpu.num_queued, list(self._gpu.in_flight)

    def synchronize(self) -> None:
        """Wait for it."""
        if self._gpu.num_queued > self._queued:
            self._gpu.late[place(), "an event"] += 1
        else:
            self._gpu.wait(IDLE)
        for memory, values in self._before:
            memory.copy_(values)
        done = {id(memory) for memory, _ in self._before}
        self._gpu.in_flight = [copy for copy in self._gpu.in_flight if id(copy[0]) not in done]


class _Ops(TorchDispatchMode):
    """Hands every op that a function runs to the pretend GPU."""

    def __init__(self, gpu: PretendGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.gpu.op(func, args, kwargs or {})


def is_gpu(leaf: Any) -> bool:
    """Whether an argument asks for the pretend GPU."""
    return _is_device(leaf) and torch.device(leaf).type == "cuda"


def _is_device(leaf: Any) -> bool:
    return isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf.split(":")[0] in ("cuda", "cpu"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (_is_on_cpu(value) and value.dim() == 0)


def _is_on_cpu(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DeviceTensor)


def reads(name: str, args: Any, kwargs: Any) -> str:
    """What an op of torch reads from the device before it returns, empty if nothing."""
    if name == "_local_scalar_dense":
        return "a number"
    indices = args[1] if "index" in name and len(args) > 1 and isinstance(args[1], list | tuple) else ()
    if any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices):
        return "a mask as an index"
    counts = name == "repeat_interleave" and kwargs.get("output_size") is None
    return name if name in READS or counts else ""


def written_arguments(schema: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an op writes to."""
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [given[name] for name in names if isinstance(given.get(name), Tensor)]


def moved(name: str, tensors: list[Tensor], outs: list[Tensor]) -> int:
    """Bytes that an op of torch reads and writes."""
    sizes = [_nbytes(tensor) for tensor in tensors]
    out = sum(_nbytes(tensor) for tensor in outs)
    if name in NO_INPUT:
        return out
    if name in LOOKUPS:
        return 2 * out + sum(sizes[1:])
    if name in PARTIAL_WRITES:
        return sum(sizes[1:]) + max(sizes[1:], default=0)
    return sizes[0] + sizes[-1] if name == "copy_" else sum(sizes) + out


def _nbytes(tensor: Tensor) -> int:
    """Bytes of what a tensor holds; expanded dimensions count once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count
