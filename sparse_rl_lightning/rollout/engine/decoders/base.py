"""Decoder: a causal language model as a function of packed tokens, with the rollout's attention in its layers.

There are two, with the same numbers: ``native.NativeDecoder`` for Llama-like layers, and
``hf_forward.TransformersDecoder`` for all others. What they share is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparse_rl_lightning.cache.linear_states import Run
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.append import QKTransform
from sparse_rl_lightning.ops.pools import accumulation_dtype
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.policies.modes import PRODUCTS

ROW_MULTIPLE = 8  # float32 products give a row the same bits in any batch when the number of rows is a multiple of 8

FOLLOWED = "scaling", "_disable_adapters"  # attributes of peft's layers, where copies follow them

DecoderKind = Literal["native", "transformers"]  # how a model's layers are run


class Attend(Protocol):
    """The attention of one layer, which also writes keys and values into the cache."""

    def __call__(
        self, layer: int, projected: Tensor, transform: QKTransform, hidden: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute the attention of one layer.

        Args:
            layer: Index among the layers that have a cache.
            projected: Queries, keys and values (R, Hq + 2 H, D).
            transform: Norms and angles for queries and keys, if the model has not applied them itself.
            hidden: Hidden states (R, E) from which they were projected.
            sinks: Learned sinks (Hq), if the layer has some.

        Returns:
            The result (R, Hq, D).
        """
        ...


class AttendAndRecur(Attend, Protocol):
    """The attention of a pass through a model that has linear layers too."""

    def recur(self, layer: int, hidden: Tensor, run: Run) -> Tensor:
        """Run a linear layer as :data:`~sparse_rl_lightning.cache.linear_states.Recur` says."""
        ...


class Decoder(ABC):
    """A causal language model as a function of packed tokens, made of the model as it is now.

    Args:
        model: The model.
        geometry: Sizes and compute type of the model.
        in_float32: Whether logits are float32, not rounded to the compute type.

    Raises:
        ValueError: If a weight is NaN.
    """

    decoder_kind: DecoderKind

    def __init__(self, model: PreTrainedModel, geometry: CacheGeometry, in_float32: bool) -> None:
        check_weights(model)
        self.model, self.geometry, self.in_float32 = model, geometry, in_float32
        self.followed: list[nn.Module] = []  # whose adapters are copied: a refresh follows when they are switched
        self._signature = signature(model)

    @abstractmethod
    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Compute hidden states after the final norm.

        Args:
            ids: Tokens (R,), R a multiple of :data:`ROW_MULTIPLE`.
            positions: True positions (R,) of the tokens, below the length given to :meth:`reach`.
            attend: Attention, called once per layer that has a cache; of a model with linear layers it runs these too.

        Returns:
            The hidden states (R, E).
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (n, V); a row's bits do not depend on the number of rows."""

    @abstractmethod
    def refresh(self) -> None:
        """Update the copies of weights after an optimizer step.

        Raises:
            ValueError: If a weight is NaN.
        """
        check_weights(self.model)
        self.__dict__.pop("output_weights", None)

    @property
    @abstractmethod
    def output_weights(self) -> list[Tensor]:
        """The part of the output projection for each head, (L) of (Hq, D, E), at least float32, adapters included."""

    def reach(self, length: int) -> None:  # noqa: B027
        """Prepare for positions up to a length, which does not shrink; nothing where models compute angles."""

    def serves(self, model: PreTrainedModel, geometry: CacheGeometry, in_float32: bool) -> bool:
        """Whether the model is unchanged but for the content of its weights, as :func:`signature` says."""
        current = self.geometry
        same = (geometry.dtype, geometry.kv_dtype, in_float32) == (current.dtype, current.kv_dtype, self.in_float32)
        return model is self.model and same and self._signature == signature(model, self.followed)


def head_product(head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """The head's product (n, V); padded so that a row's bits do not depend on the number of rows."""
    n = hidden.shape[0]
    if n % ROW_MULTIPLE:
        hidden = torch.cat([hidden, hidden.new_zeros(-n % ROW_MULTIPLE, hidden.shape[1])])
    return head(hidden)[:n]


def per_head(projections: Sequence[Any], geometry: CacheGeometry) -> list[Tensor]:
    """The weights (L) of (Hq, D, E) of output projections, from what they make of unit vectors."""
    g = geometry
    unit = torch.eye(g.num_heads * g.head_dim, dtype=g.dtype, device=g.device)
    none, shape = torch.zeros_like(unit[:1]), (g.num_heads, g.head_dim, -1)
    products = [project(unit) - project(none) for project in projections]
    return [product.view(shape).to(accumulation_dtype(g.dtype)) for product in products]


def signature(model: PreTrainedModel, followed: Sequence[nn.Module] = ()) -> tuple[object, ...]:
    """Everything that a pass reads besides the content of tensors: what graphs and copies of weights cannot follow.

    These are the modules and all that Python knows of them (forwards, hooks, plain attributes such as an epsilon or an
    adapter's scaling and switch), the addresses of their tensors, the configuration, autocast, and what products round
    to: a graph has no Python, so it repeats what modules and hooks did when it was captured.

    Args:
        model: The model.
        followed: Layers of peft whose adapters may be switched and rescaled.
    """
    copied = {id(module) for module in followed}
    modules = [
        (id(m), *((name, _recorded(value)) for name, value in vars(m).items()
                  if name != "training" and not (id(m) in copied and name in FOLLOWED)))
        for m in model.modules()
    ]  # fmt: skip
    autocast = (torch.is_autocast_enabled(device_type) for device_type in ("cpu", "cuda"))
    return (*modules, _recorded(vars(model.config)), *autocast, *(backend.fp32_precision for backend in PRODUCTS))


def _recorded(value: Any) -> object:
    """Numbers and texts as they are, the address of a tensor, the identity of any other object."""
    if isinstance(value, dict | list | tuple | set):
        return tuple(map(_recorded, value.items() if isinstance(value, dict) else value))
    if isinstance(value, Tensor):
        return value.data_ptr()
    return value if isinstance(value, int | float | str) else id(value)


def check_weights(model: PreTrainedModel) -> None:
    """Refuse NaN by name: attention may turn NaN queries and keys into finite but meaningless numbers.

    Raises:
        ValueError: If a weight is NaN.
    """
    weights = {name: p.detach() for name, p in model.named_parameters() if p.is_floating_point() and p.itemsize > 1}
    sums = torch.stack([weight.sum().isnan() for weight in weights.values()])  # one wait for the device
    broken = [name for name, is_nan in zip(weights, sums.tolist(), strict=True) if is_nan]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise UserError(
            f"The model's weights hold NaN: {broken[0]}{more} of {len(weights)}. Training has diverged or a file is "
            "damaged: go back to an earlier checkpoint."
        )
