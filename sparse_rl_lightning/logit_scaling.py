"""What a model does to the product of its output head before the softmax: a factor (Granite, Cohere), a cap (Gemma).

With y the product, f the factor and c the cap, the logits are z = c tanh(f y / c), or f y without a cap, and

    dz / dy = f (1 - (z / c)^2)            or f

so the gradient needs nothing but the logits themselves.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CAP = "final_logit_softcapping"
FACTORS = {"logits_scaling": -1, "logit_scale": 1, "lm_head_multiplier": 1}
"""By name in the configuration: the power of the number that logits are multiplied by."""
POWERS = {"hyperclovax": {"logits_scaling": 1}}
"""By ``model_type``: where a name means something else."""


@dataclass(frozen=True)
class LogitScaling:
    """From the product of the output head to logits, and back for gradients; the default changes nothing."""

    factor: float = 1.0
    cap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether logits are the product itself."""
        return self.factor == 1.0 and self.cap is None

    def __call__(self, product: Tensor) -> Tensor:
        """Logits, of any shape and at least float32; the product itself where nothing is to be done."""
        if self.is_plain:
            return product
        logits = product.to(torch.promote_types(product.dtype, torch.float32)) * self.factor
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative of the logits, from the logits."""
        return self.factor if self.cap is None else (1 - (logits / self.cap) ** 2) * self.factor

    @classmethod
    def of(cls, config: Any) -> LogitScaling:
        """Read off a configuration of transformers; only what its class declares counts, as only that is used.

        Raises:
            ValueError: If it declares something else that looks as if it changed logits.
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
                raise ValueError(
                    f"model_type {config.model_type!r} has {name}={value!r}, which may change logits in a way that "
                    f"this library does not know; it knows {', '.join([CAP, *powers])}. Log-probabilities would be "
                    "wrong: use another model."
                )
        return cls(factor, cap)


PLAIN = LogitScaling()


def _looks_like_scaling(name: str, value: object) -> bool:
    is_number = isinstance(value, (int, float)) and value not in (0, 1)
    elsewhere = any(part in name for part in ("attn", "router", "gate"))
    return is_number and not elsewhere and any(part in name for part in ("scal", "cap", "mult"))
