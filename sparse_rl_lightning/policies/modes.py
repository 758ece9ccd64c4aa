"""Modes of a policy: frozen, without dropout, temporary evaluation, drawing, and contexts of a learner's pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

ROUNDED = ("tf32", "bf16")
"""Precisions in which float32 products are not those of float32."""
PRODUCTS: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]  # torch types its backends as modules
"""Settings of float32 products, on a GPU and on a CPU, that ``torch.set_float32_matmul_precision`` writes."""


ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
MULTIPLIES = {
    ATTENTION, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
}  # fmt: skip
"""What multiplies matrices in a policy's passes, in torch's own operations."""


def rounds_products(device: torch.device) -> bool:
    """Whether float32 products on a device are rounded to less."""
    return PRODUCTS[device.type == "cpu"].fp32_precision in ROUNDED


class WideProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base
    """Mode in which a CPU multiplies bfloat16 as float32 and rounds the results; sums are float32 in either case.

    Without instructions for bfloat16 torch's own products take ten times as long in the learner's passes. Rollouts
    multiply with copies of weights (``rollout/engine/decoders/linear_products.py``), which are float32 then.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call one of torch's operations."""
        named = kwargs or {}
        if func not in MULTIPLIES or args[0].dtype != torch.bfloat16 or args[0].device.type != "cpu":
            return func(*args, **named)
        results = func(*map(_widened, args), **{name: _widened(value) for name, value in named.items()})
        if isinstance(results, Tensor):
            return results.to(torch.bfloat16)
        rounded = tuple(result.to(torch.bfloat16) for result in results)
        return (rounded[0], *results[1:]) if func is ATTENTION else rounded  # logarithms of sums stay


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def lacks_bfloat16() -> bool:
    """Whether this processor has no instructions for products of bfloat16."""
    has_instructions = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # builds without oneDNN have none
    return has_instructions is not None and not has_instructions()


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze the model: no gradients, evaluation mode."""
    model.requires_grad_(False)
    model.eval()
    return model


def narrow_weights(model: PreTrainedModel, like: PreTrainedModel) -> None:
    """Round weights that are wider than those of the same name; buffers, such as rotary frequencies, stay."""
    types = {name: parameter.dtype for name, parameter in like.named_parameters()}
    for name, parameter in model.named_parameters():
        if types.get(name, parameter.dtype).itemsize < parameter.dtype.itemsize:
            parameter.data = parameter.data.to(types[name])


NOISE = re.compile("dropout|pdrop|layerdrop|jitter")
"""Names of layers' numbers that are the size of noise in training mode: dropout, and noise of routers."""


def _noises(module: torch.nn.Module) -> list[str]:
    """Names of a layer's attributes by which it draws noise."""
    if isinstance(module, torch.nn.Dropout):
        return ["p"] if module.p else []
    if type(module).__module__.endswith(".modeling_phimoe"):  # whose routers compare with it, in evaluation too
        return []
    numbers = {name: value for name, value in vars(module).items() if isinstance(value, float) and value}
    return [name for name in numbers if NOISE.search(name)]


def disable_dropout(model: torch.nn.Module) -> None:
    """Set every dropout probability to zero, including plain numbers of layers and noise of routers."""
    for module in model.modules():
        for name in _noises(module):
            setattr(module, name, 0.0)


def has_dropout(model: torch.nn.Module) -> bool:
    """Whether a dropout probability is not zero: two passes in training mode then give different numbers."""
    return any(map(_noises, model.modules()))


@contextmanager
def eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Switch off dropout and gradient checkpointing while sampling; training flags are restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def sampling_mode(model: PreTrainedModel) -> Iterator[None]:
    """Context for drawing sequences: no gradients, no dropout, float32 as the default type, and reusable memory.

    Tensors allocated under ``inference_mode`` could not be written by the next call, and half precision or float64 as
    torch's default type (Lightning's ``bf16-true``, ``64-true``) would become the type of sums and of quotients of
    integers. The model's GPU is the current one: Triton's kernels run there, wherever their tensors are.
    """
    default = torch.get_default_dtype()
    on_device = torch.cuda.device(model.device) if model.device.type == "cuda" else nullcontext()
    with torch.inference_mode(False), torch.no_grad(), eval_mode(model), on_device:
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


@contextmanager
def exact_angles(model: PreTrainedModel) -> Iterator[None]:
    """Context in which rotary angles are exact whatever precision float32 products have; all others keep theirs.

    Older transformers multiply positions by frequencies as matrices, and TF32 has 11 bits: it rounds positions beyond
    2,048, which the sampler does not.
    """
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    rounding = [(backend, backend.fp32_precision) for backend in PRODUCTS if backend.fp32_precision in ROUNDED]
    if rotary is None or not rounding:
        yield
        return

    def full(*_: Any) -> None:
        for backend, _precision in rounding:
            backend.fp32_precision = "ieee"

    def own(*_: Any) -> None:
        for backend, precision in rounding:
            backend.fp32_precision = precision

    hooks = [rotary.register_forward_pre_hook(full), rotary.register_forward_hook(own, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def recomputed_within(model: torch.nn.Module, context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Run the model within a context, of which a new one is entered for whatever is recomputed in the backward pass.

    Gradient checkpointing computes layers again after this context has ended; anything else that runs meanwhile is not
    affected.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "_gradient_checkpointing_func")]
    functions: list[Any] = [layer._gradient_checkpointing_func for layer in layers]

    def again(function: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any) -> Any:
            with context():
                return function(*args)

        return forward

    def wrapped(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda function, *args: run(again(function), *args)

    for layer, run in zip(layers, functions, strict=True):
        layer._gradient_checkpointing_func = wrapped(run)
    try:
        with context():
            yield
    finally:
        for layer, run in zip(layers, functions, strict=True):
            layer._gradient_checkpointing_func = run
