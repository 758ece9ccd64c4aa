"""The attention functions registered with transformers, of learner and rollout; the only file that uses these hooks.

Model keyword arguments reach the attention function, so the deaths are passed as one. A name that transformers'
mask interface does not know gets no mask at all: each function here applies its mask itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.attention import torch_attention
from sparse_rl_lightning.policies.modes import recomputed_within
from sparse_rl_lightning.policies.support import WORKS, attention_modules, cache_layer
from sparse_rl_lightning.replay.death_attention import death_attention

REPLAY = "sparse_rl_replay"
CAUSAL = "sparse_rl_causal"
"""torch's causal attention, for tensors without values: transformers would look at them to choose a mask."""
Attend = Callable[[Any, int, Tensor, Tensor, Tensor, float, Tensor | None], Tensor]
"""Function of a model's keyword argument, the layer, queries, keys, values, scale and sinks: outputs (B, Hq, T, D)."""


def register(name: str, keyword: str, attend: Attend) -> None:
    """Register an attention function for models under a name, for :func:`attention_implementation`.

    ``keyword`` names the keyword argument of the model's call whose value is the first argument of ``attend``.
    """

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float,
        **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        layer, capped = cache_layer(module), options.get("softcap") is not None
        if capped or keyword not in options:
            reason = "has a cap on its logits" if capped else "does not receive the arguments of the model's call"
            raise UserError(
                f"{type(module).__name__} (layer {module.layer_idx}) {reason}, so rollouts and replay cannot reproduce "
                f"it. {WORKS}"
            )
        if options.get("dropout"):
            raise UserError(
                f"{type(module).__name__} has attention_dropout={options['dropout']}, and what the sampler attended to "
                "is computed again without. Set model.learner.disable_dropout to true."
            )
        sinks = options.get("s_aux")  # learned ones
        outputs = attend(options[keyword], layer, query, key, value, scaling, sinks)
        return outputs.transpose(1, 2).contiguous(), None  # as transformers' own return it: some models view it

    AttentionInterface.register(name, attention)


def attention_implementation(model: PreTrainedModel, name: str) -> AbstractContextManager[None]:
    """Run the model with another attention function, and restore its own whatever happens.

    What gradient checkpointing computes again in the backward pass uses the attention of this context too.
    """
    return recomputed_within(model, lambda: named_attention(model, name))


@contextmanager
def named_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let the model's forward pass without gradient use an attention function; what is recomputed later does not."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def attention_inputs(model: PreTrainedModel, catch: Callable[[Tensor], None]) -> Iterator[None]:
    """Hand on the input (B, T, E) of every attention with a cache before it runs."""

    def read(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        catch(args[0] if args else named["hidden_states"])

    hooks = [module.register_forward_pre_hook(read, with_kwargs=True) for module in attention_modules(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def plain_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """Torch's own causal attention (B, Hq, T, D)."""
    return torch_attention(query, key, value, None, scale, sinks, enable_gqa=True)


register(REPLAY, "death", lambda death, layer, q, k, v, *rest: death_attention(q, k, v, death[layer], *rest))
register(CAUSAL, "causal", lambda _, layer, *inputs: plain_attention(*inputs))
