"""Definition of the ops with torch, and the native library that carries their compiled kernels.

Every op exists in two overloads with one signature: ``sparse_rl::<op>`` runs the compiled kernel where there is one and
the PyTorch reference elsewhere; ``sparse_rl::<op>.reference`` always runs the reference; ``decode_attention`` has a
third, ``flash``. The reference may allocate and may wait for the device; the kernels do neither.
``SPARSE_RL_NATIVE=0`` in the environment leaves the library out.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sparse_rl_lightning.ops.float8 import FLOAT8
from sparse_rl_lightning.ops.schemas import SCHEMAS

NAMESPACE = "sparse_rl"
PACKAGE = Path(__file__).resolve().parents[1]
LIBRARIES = {"cpu": "_C", "cuda": "_cuda"}
NATIVE_DTYPES = {
    "cpu": {torch.float32, torch.bfloat16},
    "cuda": {torch.float32, torch.bfloat16, torch.float16, FLOAT8},
}


def schema_hash() -> str:
    """Twelve characters that change with any signature: compiled into the library, checked before it is loaded."""
    return hashlib.sha256(repr(sorted(SCHEMAS.items())).encode()).hexdigest()[:12]


def register(name: str, reference: Callable[..., None], **others: Callable[..., None]) -> None:
    """Define one op of :data:`SCHEMAS` with its reference for all devices and its (empty) fake.

    Args:
        name: The op.
        reference: The PyTorch function with the op's signature.
        **others: More overloads of the op, by name.
    """
    overloads = {name: reference, f"{name}.reference": reference}
    overloads |= {f"{name}.{other}": function for other, function in others.items()}
    for overload, function in overloads.items():
        qualified = f"{NAMESPACE}::{overload}"
        torch.library.define(qualified, " ".join(SCHEMAS[name].split()))
        torch.library.impl(qualified, "default", func=_quiet(function))
        torch.library.register_fake(qualified, _nothing)


def call(
    name: str, like: torch.Tensor, check: Callable[[], None], *args: Any, overload: str = "default"
) -> None:  # fmt: skip
    """Run an op: its kernel if one serves the type and device of ``like``, else its reference.

    The kernels check their arguments themselves, and faster; ``check`` then only turns their complaint into Python's.

    Args:
        name: The op.
        like: The key pool, whose type, device and head size decide.
        check: Raises ValueError if the arguments do not fit.
        *args: The op's arguments.
        overload: Another overload to run instead.
    """
    packet = getattr(torch.ops.sparse_rl, name)
    if overload != "default":
        check()
        getattr(packet, overload)(*args)
        return
    native = has_type(like) and not _wide_beside_float8(like, args)
    if torch.compiler.is_compiling() or not (native and has_kernel(name, like.device.type)):
        check()
        (packet.default if native else packet.reference)(*args)
        return
    try:
        packet.default(*args)
    except RuntimeError:
        check()
        raise


def load() -> dict[str, str]:
    """Load the compiled kernels that are there.

    Returns:
        Per library ("cpu", "cuda") an empty text where it is loaded, else the reason why it is not.
    """
    if os.environ.get("SPARSE_RL_NATIVE", "1") == "0":
        return dict.fromkeys(LIBRARIES, "switched off by SPARSE_RL_NATIVE=0")
    return {device: _load(name) for device, name in LIBRARIES.items()}


def has_type(key_pool: torch.Tensor) -> bool:
    """Whether compiled kernels for the pool's device take its type and head size."""
    device = key_pool.device.type
    # CUDA kernels load 16 bytes at a time, and eight elements
    whole_words = device != "cuda" or key_pool.shape[-1] % max(8, 16 // key_pool.element_size()) == 0
    return key_pool.dtype in NATIVE_DTYPES.get(device, ()) and whole_words


def _wide_beside_float8(key_pool: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Whether float8 pools come with float64 queries, which no kernel takes."""
    if key_pool.dtype != FLOAT8:
        return False
    return any(isinstance(arg, torch.Tensor) and arg.dtype == torch.float64 for arg in args)


@cache
def has_kernel(name: str, device: str) -> bool:
    """Whether a compiled kernel of the op is registered for "cpu" or "cuda"."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", device.upper()))


def _load(name: str) -> str:
    found = sorted(PACKAGE.glob(f"{name}.*so"))
    if not found:
        return f"{name} is not built; from a source checkout: pip install --no-build-isolation -e ."
    path = found[0]
    if f"sparse_rl_schema={schema_hash()}".encode() not in path.read_bytes():
        reason = f"{path.name} was built for other signatures; build again: pip install --no-build-isolation -e ."
    else:
        try:
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]  # torch annotates no return
            return ""
        except OSError as error:
            reason = f"{path.name} cannot be loaded: {error}"
    warnings.warn(f"sparse_rl_lightning runs on its PyTorch reference. {reason}", stacklevel=2)
    return reason


def _quiet(function: Callable[..., None]) -> Callable[..., None]:
    """The function without gradients and autocast, which would round its sums to bf16."""

    def run(*args: Any) -> None:
        with torch.no_grad(), torch.autocast(args[0].device.type, enabled=False):
            function(*args)

    return run


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The fake of an op without results: torch also comes here when only some of the tensors are without data."""
    devices = {str(arg.device) for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)}
    if len(devices) > 1:
        raise RuntimeError(f"the tensors are on different devices: {', '.join(sorted(devices))}.")
