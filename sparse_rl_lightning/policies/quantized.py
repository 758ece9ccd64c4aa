"""A frozen base in 4 or 8 bits: linear layers that hold quantized weights and multiply by what these stand for.

Sampler and learner call the same layer, which turns its weights into the type of the product, multiplies and forgets
them, forward and backward. So both compute with the same numbers to rounding, whatever the number of rows. Layers of
bitsandbytes would not: on CPUs theirs rewrite their scales in 16 bits in evaluation mode, and those of 8 bits round the
activations too. Of it only the kernels from weights to 4 bits and back are used.
"""

from __future__ import annotations

import logging
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.output_head import product_dtype
from sparse_rl_lightning.policies.patched import is_plain_linear

Quantization = Literal["nf4", "int8"]
BLOCK = 64
"""Number of 4-bit weights that share a scale."""
# bitsandbytes, which PEFT imports too, recommends another package, for products that are not used here
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


class QuantizedLinear(nn.Linear):
    """A linear layer of frozen weights in 4 bits (NF4, arXiv 2305.14314) or in 8 (integers, a scale for each row).

    It is made of a plain one by :meth:`of`. Scales are kept as bytes, since the likes of ``model.bfloat16()`` would
    round what is a float.
    """

    quantization: Quantization
    scale: nn.Parameter  # bytes of float32: one of each block (nf4) or row (int8)

    @classmethod
    def of(cls, linear: nn.Linear, quantization: Quantization) -> Self:
        """Quantize the weights of a layer, on its device.

        Raises:
            ValueError: If bitsandbytes is missing for ``nf4``.
        """
        quantized = cls.__new__(cls)
        nn.Module.__init__(quantized)
        quantized.in_features, quantized.out_features = linear.in_features, linear.out_features
        quantized.quantization = quantization
        weight, scale = _quantized(linear.weight.detach(), quantization)
        quantized.weight = nn.Parameter(weight, requires_grad=False)
        quantized.scale = nn.Parameter(scale.view(torch.uint8), requires_grad=False)
        quantized.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)
        return quantized

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """What the weights (out, in) stand for, rounded to a type."""
        shape, scale = (self.out_features, self.in_features), self.scale.view(torch.float32)
        if self.quantization == "int8":
            return torch.mul(self.weight, scale[:, None], out=self.weight.new_empty(shape, dtype=dtype))
        # the kernel for CPUs is silently wrong for rows that end inside of a block, and for float64
        wide, whole = dtype if dtype.itemsize <= 4 else torch.float32, (self.out_features * self.in_features,)
        values: Tensor = _kernels().dequantize_4bit(self.weight, scale, BLOCK, "nf4", whole, wide)
        return values.to(dtype).view(shape)

    def plain(self, dtype: torch.dtype) -> nn.Linear:
        """A plain layer with the same weights in a type, frozen."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        linear.weight = nn.Parameter(self.dequantized(dtype), requires_grad=False)
        linear.bias = self.bias
        return linear

    def forward(self, x: Tensor) -> Tensor:
        """Compute (..., out) from (..., in), in autocast's type inside its region."""
        product: Tensor = _Product.apply(x.to(product_dtype(x)), self)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return product


class _Product(torch.autograd.Function):
    """A product that keeps nothing for the backward pass: a graph would keep the weights as they are multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, layer.dequantized(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.autocast(grad.device.type, enabled=False):
            return grad @ ctx.layer.dequantized(grad.dtype), None


def quantize(model: PreTrainedModel, quantization: Quantization) -> None:
    """Quantize the linear layers of a model's decoder, one after the other, in place.

    Embedding, norms, output head and the experts of a mixture, which are no linear layers, stay as they are.

    Raises:
        ValueError: If there is no such layer, or bitsandbytes is missing for ``nf4``.
    """
    decoder = model.get_decoder()
    linear = [(name, module) for name, module in decoder.named_modules() if is_plain_linear(module)]
    if not linear:
        raise UserError(
            f"quantization={quantization!r}: {type(decoder).__name__} has no plain linear layers. Set it to null."
        )
    for name, module in linear:
        decoder.set_submodule(name, QuantizedLinear.of(module, quantization))


def dequantize(model: PreTrainedModel) -> None:
    """Put plain linear layers in the place of quantized ones, in the model's type and on the host."""
    quantized = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    if quantized:
        model.to("cpu")  # type: ignore[arg-type]  # a GPU may have no room for whole weights
    for name, module in quantized:
        model.set_submodule(name, module.plain(model.dtype))


def product_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """The bytes of the largest matrix that quantized layers make for a product; 0 if there are none."""
    layers = (module for module in model.modules() if isinstance(module, QuantizedLinear))
    return max((layer.in_features * layer.out_features * dtype.itemsize for layer in layers), default=0)


def count_weights(model: nn.Module) -> int:
    """The number of weights, however many are packed into a byte."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    packed = sum(
        layer.weight.numel() + layer.scale.numel() - layer.in_features * layer.out_features for layer in layers
    )
    return sum(parameter.numel() for parameter in model.parameters()) - packed


def _quantized(weight: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """Quantized weights, and the float32 scales of blocks or rows."""
    if quantization == "nf4":
        narrow = weight if weight.dtype.itemsize <= 4 else weight.float()
        packed, scale = _kernels().quantize_4bit(narrow.contiguous(), BLOCK, "nf4", torch.uint8)
        return packed, scale
    wide = weight.float()
    scale = wide.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (wide / scale[:, None]).round().to(torch.int8), scale


def _kernels() -> Any:
    """The operations of bitsandbytes."""
    if not hasattr(torch.ops.bitsandbytes, "dequantize_4bit"):
        try:
            import bitsandbytes  # noqa: F401  # registers them
        except ImportError as error:
            raise UserError(
                "quantization='nf4' needs bitsandbytes: pip install 'sparse-rl-lightning[quantization]'. 'int8' needs "
                "nothing."
            ) from error
    return torch.ops.bitsandbytes
