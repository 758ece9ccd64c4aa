"""Changes to a model that its class does not show: a ``forward`` replaced on the object, and soft prompts.

Rollouts and log-probabilities call a model's parts themselves. A part is called as it is, even with a replaced
``forward``; a change above the parts that are called would be bypassed silently, so it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from sparse_rl_lightning.errors import UserError


class CacheAwareForward(partial[Any]):
    """A ``forward`` set on an object that answers some calls, and leaves all others to its first argument.

    It is a class, not an attribute: attributes are copied to what is wrapped around it.
    """


def is_patched(module: nn.Module) -> bool:
    """Whether ``forward`` was replaced on this object, as accelerate's hooks, Liger and others do.

    Compilation, by ``torch.compile(module)`` or ``module.forward = torch.compile(module.forward)``, changes no number
    and does not count; nor does :class:`CacheAwareForward`.
    """
    module = uncompiled(module)
    forward = vars(module).get("forward")
    forward = getattr(forward, "_torchdynamo_orig_callable", forward)
    forward = forward.args[0] if isinstance(forward, CacheAwareForward) else forward
    forward = getattr(forward, "__func__", forward)
    return forward is not None and forward is not type(module).forward


def is_changed(module: nn.Module) -> bool:
    """Whether calling the module may do more than its class shows: forward hooks, or a replaced forward."""
    both = (module, uncompiled(module))
    return any(candidate._forward_hooks or candidate._forward_pre_hooks for candidate in both) or is_patched(module)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calling the module is one product with its weight and nothing else; hooks of ZeRO-3 do not count."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    hooks = [hook for hooks in kinds for hook in hooks.values()]
    has_own = any(not getattr(hook, "__module__", "").startswith("deepspeed.") for hook in hooks)
    return type(module) is nn.Linear and not has_own and not is_patched(module)


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile(module)`` was made from, or the module itself if it is not compiled."""
    return module._modules.get("_orig_mod") or module


@contextmanager
def swapped_forwards(forwards: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Give modules other forwards inside the context; through their ``__dict__``, since ``setattr`` is slow."""
    before = [(vars(module), vars(module).get("forward")) for module, _ in forwards]
    for module, forward in forwards:
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for attributes, previous in before:
            if previous is None:
                del attributes["forward"]
            else:
                attributes["forward"] = previous


def check_reachable(model: Any) -> None:
    """Refuse a causal language model whose own forward does more than its decoder and its output head.

    It does with soft prompts (prefix, prompt and p-tuning), which peft adds there, and with a replaced ``forward``.
    """
    check_no_soft_prompt(model)
    wrapped = model.get_base_model() if hasattr(model, "get_base_model") else model
    for module in (model, wrapped):
        if isinstance(module, nn.Module) and is_patched(module):
            raise UserError(refusal(module))


def check_no_soft_prompt(model: Any) -> None:
    """Refuse a model of peft whose own forward prepares its adapters.

    Raises:
        ValueError: If it puts trained vectors before the prompt, or before a layer's keys and values, or looks for the
            tokens behind which an adapter is on (aLoRA).
    """
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise UserError(
                f"The adapter {name!r} of {type(model).__name__} is a soft prompt ({config.peft_type}), which rollouts "
                "and log-probabilities would pass over. Use LoRA, or another adapter that lives in the layers."
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise UserError(
                f"The adapter {name!r} of {type(model).__name__} is on behind its invocation tokens alone (aLoRA), "
                "which rollouts and log-probabilities would not look for, and no export can merge it. Use LoRA."
            )


def refusal(module: nn.Module) -> str:
    """The error message for a replaced forward that would be bypassed."""
    return (
        f"The forward of this {type(module).__name__} has been replaced (accelerate, Liger, a patch of your own), and "
        "rollouts or log-probabilities would pass over it. Take it off again, e.g. with `del model.forward`, "
        "accelerate's unwrap_model or SparseGRPOTrainer's own_forward(), or patch the linear layers, norms or "
        "feed-forward blocks, which are called as they are."
    )
