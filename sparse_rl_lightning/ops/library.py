"""Definition of the ops in torch, and the native library with their compiled kernels.

``sparse_rl::<op>`` runs the compiled kernel if there is one, otherwise the PyTorch reference. The reference may
allocate and may wait for the device; the kernels do neither. With ``SPARSE_RL_NATIVE=0`` in the environment the
library is not loaded.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sparse_rl_lightning.ops.architectures import built_architectures, code_for, has_code
from sparse_rl_lightning.ops.checks import check_arguments
from sparse_rl_lightning.ops.pools import FLOAT8
from sparse_rl_lightning.ops.schemas import SCHEMAS, schema_hash

NAMESPACE = "sparse_rl"
PACKAGE = Path(__file__).resolve().parents[1]
LIBRARIES = {"cpu": "_C", "cuda": "_cuda"}
NATIVE_DTYPES = {"cpu": {torch.float32, torch.bfloat16}, "cuda": {torch.float32, torch.bfloat16, torch.float16, FLOAT8}}
REFERENCES: dict[str, Callable[..., None]] = {}
"""The PyTorch reference of each op, with its arguments checked, without gradients and autocast."""
DIFFERENTIABLE: dict[str, Callable[..., None]] = {}
"""The same of the ops that scores are made of, with gradients."""


OPS: dict[str, Any] = {}
"""The ops, which are slow to look up."""


def register(name: str, reference: Callable[..., None], differentiable: bool = False) -> None:
    """Define one op of :data:`SCHEMAS` with its reference for all devices and its (empty) fake.

    A ``differentiable`` reference runs in place of any kernel where an argument requires gradient, which it then passes
    on from its result to its arguments.
    """

    def with_gradient(*args: Any) -> None:
        check_arguments(name, args)
        with torch.autocast(args[0].device.type, enabled=False):  # it would round sums to bf16
            reference(*args)

    run = torch.no_grad()(with_gradient)
    REFERENCES[name] = run
    if differentiable:
        DIFFERENTIABLE[name] = with_gradient
    qualified = f"{NAMESPACE}::{name}"
    torch.library.define(qualified, " ".join(SCHEMAS[name].split()))
    torch.library.impl(qualified, "default", func=run)
    torch.library.register_fake(qualified, _nothing)
    OPS[name] = getattr(torch.ops.sparse_rl, name).default


def call(name: str, like: torch.Tensor, *args: Any) -> None:
    """Run an op: its kernel if one supports the type, device and head size of the keys ``like``, else its reference.

    The kernels check their arguments themselves, and faster; Python checks again only after an error, for a clearer
    message.
    """
    if name in DIFFERENTIABLE and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        DIFFERENTIABLE[name](*args)
        return
    op = OPS[name]
    if torch.compiler.is_compiling() or like.is_meta:
        op(*args)
        return
    device, result = like.device.type, args[-1].dtype if name == "rms_norm" else like.dtype
    if not (has_kernel(name, device) and _serves(name, device, like.dtype, like.shape[-1], result)) or (
        like.dtype == FLOAT8 and any(isinstance(arg, torch.Tensor) and arg.dtype == torch.float64 for arg in args)
    ):  # float8 pools go with queries of any type; no kernel computes in float64
        REFERENCES[name](*args)
        return
    try:
        op(*args)
    except RuntimeError:
        check_arguments(name, args)
        raise


def load() -> dict[str, str]:
    """Load the compiled kernels that exist; for each library the reason why it is not loaded, "" if it is."""
    if os.environ.get("SPARSE_RL_NATIVE", "1") == "0":
        return dict.fromkeys(LIBRARIES, "switched off by SPARSE_RL_NATIVE=0")
    return {device: _load(name) for device, name in LIBRARIES.items()}


@cache
def _serves(name: str, device: str, dtype: torch.dtype, width: int, result: torch.dtype) -> bool:
    """Whether the op's kernel for the device supports the type and head size of the keys, and the result's type."""
    # CUDA kernels load heads 16 bytes at a time, and eight elements
    whole_words = device != "cuda" or name == "draw" or width % max(8, 16 // dtype.itemsize) == 0
    return {dtype, result} <= NATIVE_DTYPES.get(device, set()) and whole_words


@cache
def has_kernel(name: str, device: str) -> bool:
    """Whether a compiled kernel of the op is registered for "cpu" or "cuda", with code for the GPU if there is one."""
    is_registered = torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", device.upper())
    return bool(is_registered) and (device != "cuda" or _runs_on_gpu())


@cache
def _runs_on_gpu() -> bool:
    """Whether the CUDA library has code for the current GPU, if there is one, and a warning if not.

    Its first op would fail there with "no kernel image is available".
    """
    if not torch.cuda.is_available():
        return True
    built, capability = built_architectures(PACKAGE), torch.cuda.get_device_capability()
    fits = has_code(built, capability)
    if not fits:
        text = f"{torch.cuda.get_device_name()} {code_for(built, capability)}"
        warnings.warn(f"sparse_rl_lightning runs on its PyTorch reference. {text}.", stacklevel=2)
    return fits


def _load(name: str) -> str:
    files = sorted(PACKAGE.glob(f"{name}.*so"))
    if not files:
        return f"{name} is not built; from a source checkout: pip install --no-build-isolation -e ."
    path = files[0]
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


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The fake of an op without results: torch also calls it when only some of the tensors are without data."""
    devices = {str(arg.device) for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)}
    if len(devices) > 1:
        raise RuntimeError(f"the tensors are on different devices: {', '.join(sorted(devices))}.")
