"""The output head: a model's scaling of its logits, and log-probabilities from them for a few rows at a time.

Letters: N rows, C width, V vocabulary, n rows of a chunk; y = h W' + b one row of the head's product, z = s(y) /
temperature its logits with the model's own scaling s (a factor in Granite and Cohere, a cap in Gemma), p = softmax(z),
H its entropy, t a target, of which a row may have several. The gradients of a row's log p_t and H by z are

    d log p_t / dz = onehot(t) - p            dH / dz = -p (log p + H)

so backward needs nothing from forward but the two numbers per row that turn logits into log p. With the factor f and
the cap c, s(y) = c tanh(f y / c), or f y without a cap, and

    ds / dy = f (1 - (s / c)^2)            or f

so its gradient needs nothing but the logits themselves.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError

CAP = "final_logit_softcapping"
FACTORS = {"logits_scaling": -1, "logit_scale": 1, "lm_head_multiplier": 1}
"""The power of each configuration entry in the factor on the logits, by name."""
POWERS = {"hyperclovax": {"logits_scaling": 1}}
"""Exceptions to these powers, by ``model_type``."""


@dataclass(frozen=True)
class LogitScaling:
    """Function from the product of the output head to logits, and its derivative; the default changes nothing."""

    factor: float = 1.0
    cap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether logits are the product itself."""
        return self.factor == 1.0 and self.cap is None

    def __call__(self, product: Tensor) -> Tensor:
        """Logits of any shape, at least float32; the product itself if there is nothing to do."""
        if self.is_plain:
            return product
        logits = product.to(torch.promote_types(product.dtype, torch.float32)) * self.factor
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative of the logits, from the logits."""
        return self.factor if self.cap is None else (1 - (logits / self.cap) ** 2) * self.factor

    @classmethod
    def of(cls, config: Any) -> LogitScaling:
        """Read the scaling from a configuration of transformers, which uses only what its class declares.

        Raises:
            ValueError: If it declares something else that might change logits.
        """
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        powers = FACTORS | POWERS.get(getattr(config, "model_type", ""), {})
        factor, cap = 1.0, None
        for name in inspect.signature(type(config).__init__).parameters:
            if "logit" not in name and "lm_head" not in name:
                continue
            value = getattr(config, name, None)
            if name == CAP:
                cap = value
            elif name in powers:
                factor *= 1.0 if value is None else float(value) ** powers[name]
            elif _looks_like_scaling(name, value):
                raise UserError(
                    f"model_type {config.model_type!r} has {name}={value!r}, which may change logits in a way that "
                    f"this library does not know; it knows {', '.join([CAP, *powers])}. Log-probabilities would be "
                    "wrong: use another model."
                )
        return cls(factor, cap)


PLAIN = LogitScaling()


def _looks_like_scaling(name: str, value: object) -> bool:
    is_number = isinstance(value, (int, float)) and value not in (0, 1)
    elsewhere = any(word in name for word in ("attn", "router", "gate"))
    return is_number and not elsewhere and any(word in name for word in ("scal", "cap", "mult"))


def output_head(model: PreTrainedModel) -> nn.Module:
    """The module that turns hidden states into logits.

    Raises:
        ValueError: If the model has no such module.
    """
    head: nn.Module | None = model.get_output_embeddings()
    if head is None:
        raise UserError(
            f"{type(model).__name__} has no output head, so there are no probabilities of tokens. Load the model with "
            "AutoModelForCausalLM."
        )
    return head


def product_dtype(x: Tensor) -> torch.dtype:
    """The type that ``F.linear`` would multiply in: autocast's type inside its region, except for float64."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


class ChunkedLogprobs(torch.autograd.Function):
    """Log-probabilities of targets and entropy of their distribution: exact gradients, at most n x V logits at a time.

    Besides the chunk, backward stores only the gradients. Gradients of weight and bias are summed over chunks in
    float32 at least. The entropy's gradient is computed only where it is needed: as a metric it costs nothing.

    Args of ``apply``:
        hidden: Hidden states (N, C).
        weight: Weight of the head (V, C).
        bias: Bias of the head (V,) or None.
        targets: Token ids (N, J), J of each row.
        temperature: Divisor of the logits.
        chunk_size: Number of rows per chunk, n.
        dtype: Type of the products; softmax and sums are in float32 at least.
        scaling: Function from the product to logits.

    Returns:
        Log-probabilities (N, J) and entropies (N,), at least float32.
    """

    @staticmethod
    def forward(
        ctx: Any,  # torch's own context object
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        dtype: torch.dtype,
        scaling: LogitScaling = PLAIN,
    ) -> tuple[Tensor, Tensor]:
        """Compute both, chunk by chunk."""
        wide = torch.promote_types(dtype, torch.float32)
        entropy, peaks, log_totals = torch.empty(3, len(hidden), dtype=wide, device=hidden.device).unbind()
        logprobs = torch.empty(targets.shape, dtype=wide, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            head = _cast(weight, bias, dtype)
            for rows in _chunks(len(hidden), chunk_size):
                logits = scaling(F.linear(hidden[rows].to(dtype), *head).to(wide))
                statistics = logprobs_of_logits(logits, targets[rows], temperature, overwrite=True)
                logprobs[rows], entropy[rows], peaks[rows], log_totals[rows] = statistics
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, peaks, log_totals)
        ctx.temperature, ctx.chunk_size, ctx.dtype, ctx.scaling = temperature, chunk_size, dtype, scaling
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of hidden, weight and bias, each only if needed."""
        hidden, weight, bias, targets, entropy, peaks, log_totals = ctx.saved_tensors
        wide, (for_hidden, for_weight, for_bias) = entropy.dtype, ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if for_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if for_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if for_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            head = _cast(weight, bias, ctx.dtype)
            for rows in _chunks(len(hidden), ctx.chunk_size):
                states = hidden[rows].to(ctx.dtype)
                logits = ctx.scaling(F.linear(states, *head).to(wide))
                slope = None if ctx.scaling.is_plain else ctx.scaling.slope(logits)
                logs = logits.sub_(peaks[rows, None]).div_(ctx.temperature).sub_(log_totals[rows, None])
                by_targets = None if grad_logprobs is None else grad_logprobs[rows]
                by_entropy = None if grad_entropy is None else grad_entropy[rows, None]
                gradient = _of_logits(logs, targets[rows], entropy[rows, None], by_targets, by_entropy)
                gradient = gradient.div_(ctx.temperature)
                if slope is not None:
                    gradient = gradient.mul_(slope)
                if grad_bias is not None:
                    grad_bias += gradient.sum(dim=0)
                gradient = gradient.to(ctx.dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = gradient @ head[0]
                if grad_weight is not None and grad_weight.dtype == gradient.dtype:
                    grad_weight.addmm_(gradient.T, states)  # without a copy
                elif grad_weight is not None:
                    grad_weight += gradient.T @ states
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def logprobs_of_logits(
    logits: Tensor, targets: Tensor, temperature: float, overwrite: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of targets and entropy for rows of logits, and the numbers that turn logits into log p.

    Args:
        logits: Logits (n, V).
        targets: Token ids (n, J).
        temperature: Divisor of the logits.
        overwrite: Reuse the memory of ``logits``, which then must carry no gradient.

    Returns:
        Log p of the targets (n, J) and three (n,) tensors, at least float32: -sum p log p; the largest logit; and the
        logarithm of sum exp((logits - largest) / temperature).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    peak = wide.detach().amax(dim=-1, keepdim=True)
    shifted = wide.sub_(peak).div_(temperature) if overwrite else (wide - peak) / temperature
    powers = shifted.exp()
    total = powers.sum(dim=-1)
    log_total = total.log()
    weighted = (powers.mul_(shifted) if overwrite else powers * shifted).sum(dim=-1)
    logprobs = shifted.gather(-1, targets) - log_total[:, None]
    return logprobs, log_total - weighted / total, peak.squeeze(-1), log_total


def _of_logits(
    logs: Tensor, targets: Tensor, entropy: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """The gradient (n, V) of the scaled logits, from log p (n, V), overwritten.

    Targets and their gradients are (n, J), entropies and theirs (n, 1).
    """
    total = 0.0 if grad_logprobs is None else grad_logprobs.sum(dim=-1, keepdim=True)
    if grad_entropy is None:
        gradient = logs.exp_().mul_(-total)
    else:
        gradient = torch.add(logs, entropy).mul_(grad_entropy).add_(total).mul_(logs.exp_()).neg_()
    return gradient if grad_logprobs is None else gradient.scatter_add_(1, targets, grad_logprobs)


def _cast(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _chunks(rows: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, rows, size)]
