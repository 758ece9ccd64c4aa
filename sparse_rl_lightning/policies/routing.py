"""Routing: which experts the routers of a model choose for each token, recorded and made again.

A router computes a score per expert, keeps the k largest and turns the scores of these into weights. Models differ in
scores, groups, biases and normalization, but all keep them by one call of ``topk``. So this call is where choices
are read, and where recorded choices take its place: scores and weights are then computed from the experts recorded, by
the router's own code and with gradient. Only the choice is fixed, as in rollout routing replay (R3, arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.modes import recomputed_within
from sparse_rl_lightning.policies.patched import swapped_forwards

TOPK = (torch.topk, torch.Tensor.topk)
KNOWN = "Choices can be recorded of routers with top_k, num_experts and weight that choose by one topk over all experts"

Choose = Callable[[int, Tensor], Tensor]
"""Function from the index of a routed layer and the router's own choice (R, K) to the one that is used."""


@dataclass(frozen=True)
class RoutingShape:
    """The sizes of a record of choices."""

    num_layers: int  # layers with experts
    top_k: int  # experts per token and layer
    num_experts: int

    @property
    def dtype(self) -> torch.dtype:
        """The smallest type that holds a choice, 1 + the expert, and 0 for none."""
        return torch.uint8 if self.num_experts < 2**8 else torch.int16

    def empty(self, *tokens: int, device: torch.device) -> Tensor:
        """A record (tokens, L, K) without any choice."""
        return torch.zeros(*tokens, self.num_layers, self.top_k, dtype=self.dtype, device=device)


class Routers:
    """The routers of a model in the order of their layers, known by what they have.

    Args:
        model: Mixture of experts.

    Raises:
        ValueError: If the model has no routed experts, routers that are not known, or layers that differ.
    """

    def __init__(self, model: nn.Module) -> None:
        for block in model.modules():
            if isinstance(getattr(block, "experts", None), nn.Module) and not any(map(_is_router, block.modules())):
                raise UserError(
                    f"record_routing does not know how {type(block).__name__} routes. {KNOWN}. Set it to false."
                )
        self.modules: list[Any] = [module for module in model.modules() if _is_router(module)]
        shapes = sorted({(router.top_k, router.num_experts) for router in self.modules})
        if len(shapes) != 1:
            description = f"routers with (top_k, num_experts) {shapes}" if shapes else "no router"
            raise UserError(
                f"record_routing is for mixtures of experts with as many experts in every routed layer, and "
                f"{type(model).__name__} has {description}. Set it to false."
            )
        self.shape = RoutingShape(len(self.modules), *shapes[0])

    def choosing(self, choose: Choose) -> AbstractContextManager[None]:
        """Let ``choose`` have the last word on every choice."""
        return swapped_forwards([(router, _Chosen(router, layer, choose)) for layer, router in enumerate(self.modules)])


def _is_router(module: nn.Module) -> bool:
    attributes: list[Any] = [getattr(module, name, None) for name in ("top_k", "num_experts", "weight")]
    return isinstance(attributes[0], int) and isinstance(attributes[1], int) and isinstance(attributes[2], Tensor)


@contextmanager
def recording(routers: Routers) -> Iterator[Callable[[], Tensor]]:
    """Record the choices of one forward pass.

    Yields:
        Function that returns 1 + the experts (R, L, K) of the pass's tokens after it.
    """
    recorded: dict[int, Tensor] = {}

    def note(layer: int, experts: Tensor) -> Tensor:
        recorded[layer] = (experts + 1).to(routers.shape.dtype)
        return experts

    with routers.choosing(note):
        yield lambda: torch.stack([recorded[layer] for layer in range(routers.shape.num_layers)], dim=1)


def replayed_routing(model: nn.Module, routing: Tensor) -> AbstractContextManager[None]:
    """Let the tokens (B, T) of a pass go to the experts of a record (B, T, L, K); where it has 0, routers choose.

    What gradient checkpointing computes again in the backward pass makes the same choices.

    Raises:
        ValueError: If the record is of another model.
    """
    routers = Routers(model)
    recorded_sizes, model_sizes = tuple(routing.shape[2:]), (routers.shape.num_layers, routers.shape.top_k)
    if recorded_sizes != model_sizes:
        raise UserError(
            f"The record of routing has (layers, experts per token) = {recorded_sizes}, the model's routers "
            f"{model_sizes}: replay it with the model that drew it."
        )
    rows = routing.flatten(0, 1)

    def replay(layer: int, experts: Tensor) -> Tensor:
        assert len(experts) == len(rows), f"the pass has {len(experts)} tokens, the record {len(rows)}"
        recorded = rows[:, layer].to(experts.dtype) - 1
        return torch.where(recorded < 0, experts, recorded)

    return recomputed_within(model, lambda: routers.choosing(replay))


class _Chosen:
    """A router's forward with another choice; within another of this kind it takes its place."""

    def __init__(self, router: nn.Module, layer: int, choose: Choose) -> None:
        before = router.forward
        self.forward: Callable[..., Any] = before.forward if isinstance(before, _Chosen) else before
        self.router, self.layer, self.choose = router, layer, choose

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Topk(self) as mode:
            out = self.forward(*args, **kwargs)
        if mode.calls != 1:
            raise UserError(
                f"record_routing saw {type(self.router).__name__} choose {mode.calls} times in a pass. {KNOWN}. Set it "
                "to false."
            )
        return out


class _Topk(TorchFunctionMode):
    """Catches the call of ``topk`` by which a router chooses: k of all its experts for each row."""

    def __init__(self, chosen: _Chosen) -> None:
        super().__init__()
        self.chosen, self.calls = chosen, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        router: Any = self.chosen.router
        if func not in TOPK or out.indices.ndim != 2:
            return out
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.shape[1] != router.num_experts or out.indices.shape[1] != router.top_k:
            return out  # of groups of experts
        self.calls += 1
        indices = self.chosen.choose(self.chosen.layer, out.indices)
        return torch.return_types.topk((scores.gather(1, indices), indices))
