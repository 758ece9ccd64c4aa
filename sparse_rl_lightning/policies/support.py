"""Which models can be rolled out: by what their layers are, not by their name.

A model needs attention, over everything or a window, with keys and values of heads in a cache per layer, rotary
positions (or none in some layers), and frequencies that stay as they are while a sequence grows. Layers of a hybrid
may instead be linear attention with a state of fixed size, which nothing is evicted from. What a configuration does not
show, :mod:`~sparse_rl_lightning.rollout.engine.decoders.agreement` finds before the first rollout.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.output_head import LogitScaling, output_head
from sparse_rl_lightning.policies.patched import check_reachable
from sparse_rl_lightning.policies.windows import GROWING, LINEAR, layer_windows, rope_of, rotation_of

TESTED = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "glm4", "glm4_moe", "gpt_oss", "granite",
    "ministral3", "mixtral", "olmo2", "olmo3", "olmoe", "phi3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
    "qwen3_next", "smollm3",
)  # fmt: skip
"""Model types that the tests of this library roll out, replay and train."""
WORKS = f"Tested are {', '.join(TESTED)}; others may work, see docs/models.md."
STATE = ("layer_idx", "conv_dim", "conv_kernel_size", "num_v_heads", "head_k_dim", "head_v_dim")
"""Attributes of transformers' gated delta networks that say how large their states are."""


def check_supported(model: PreTrainedModel, of_shapes: bool = False) -> None:
    """Refuse a model whose cache could not be evicted correctly, by name and with the reason.

    A model whose weights have shapes but no numbers is refused too, unless ``of_shapes`` allows it.
    """
    if not hasattr(model, "get_output_embeddings"):
        raise UserError(f"model must be a causal language model of transformers, got {type(model)}.")
    check_reachable(model)
    output_head(model)
    if model.device.type == "meta" and not of_shapes:
        raise UserError(
            f"The weights of this {type(model).__name__} are on the meta device: they hold no numbers. Load them first."
        )
    reason = _obstacle(model)
    if reason:
        raise UserError(refusal(model, reason))
    LogitScaling.of(model.config)  # refuses what it does not know


def refusal(model: PreTrainedModel, reason: str) -> str:
    """The error message for a model that cannot be rolled out, for a reason."""
    return f"{type(model).__name__} (model_type {model.config.model_type!r}) cannot be rolled out: {reason}. {WORKS}"


def attention_modules(model: PreTrainedModel) -> list[Any]:
    """The attention of each layer that has a cache of keys and values, in the order of the layers.

    Raises:
        ValueError: If a layer has none, or several.
    """
    modules = []
    for index, layer in enumerate(getattr(model.get_decoder(), "layers", ())):
        if _has_state(layer):
            continue
        attention = getattr(layer, "self_attn", None)
        candidates = (
            [attention] if _is_attention(attention) else [module for module in layer.modules() if _is_attention(module)]
        )
        if len(candidates) != 1:
            raise UserError(refusal(model, f"layer {index} has {len(candidates)} attention modules, not one"))
        modules += candidates
    if not modules:
        raise UserError(refusal(model, f"its {type(model.get_decoder()).__name__} has no list of layers"))
    return modules


def linear_modules(model: PreTrainedModel) -> list[Any]:
    """The linear attention of each layer that has a recurrent state in place of a cache, in the order of the layers."""
    return [layer.linear_attn for layer in getattr(model.get_decoder(), "layers", ()) if _has_state(layer)]


def cache_layer(module: Any) -> int:
    """The index of an attention module among the layers with a cache of keys and values."""
    index: int = module.layer_idx
    types = getattr(getattr(module, "config", None), "layer_types", None) or ()
    return index - types[:index].count(LINEAR)


def steady_length(config: Any) -> int | None:
    """The number of tokens beyond which rotary frequencies depend on the length, None if they never do."""
    rope = rope_of(config)
    context = getattr(config, "max_position_embeddings", None)
    original: int | None = rope.get("original_max_position_embeddings") or context
    return original if rope.get("rope_type") in GROWING else None


def check_length(model: PreTrainedModel, longest: int) -> None:
    """Refuse sequences on whose length the rotary frequencies depend.

    ``longest`` is the number of tokens of the longest sequence, prompt and completion.
    """
    original = steady_length(model.config)
    if original is not None and longest > original:
        rope_type = rope_of(model.config).get("rope_type")
        raise UserError(
            f"{type(model).__name__} has rope_type={rope_type!r}, whose frequencies change beyond {original} tokens, "
            f"and sequences may have up to {longest}: cached keys would not fit. Keep prompt and completion within "
            f"{original} tokens, or use rope_type 'linear', 'llama3' or 'yarn'."
        )


def check_full_layers(model: PreTrainedModel, longest: int, method: str) -> None:
    """Refuse a method that chooses among the tokens of full attention for a model whose windows leave no such layer.

    ``longest`` is the number of tokens of the longest sequence, ``method`` the name of the method.
    """
    windows = layer_windows(model.config)
    if windows and all(windows) and longest > max(windows):
        raise UserError(
            f"{type(model).__name__} has a sliding window in every layer (sliding_window={max(windows)}), and "
            f"sequences of up to {longest} tokens exceed it: no layer is left for {method}, since windows are fixed. "
            "Use FullKV, which stores no more than the windows, or keep prompt and completion within the window."
        )


def _is_attention(module: Any) -> bool:
    return hasattr(module, "layer_idx") and hasattr(module, "scaling")


def _has_state(layer: Any) -> bool:
    linear = getattr(layer, "linear_attn", None)
    return linear is not None and all(hasattr(linear, name) for name in STATE)


def _foreign(module: Any, first: Any) -> str:
    """What an attention does that rollouts do not reproduce, in words; empty if nothing."""
    if hasattr(module, "kv_lora_rank"):
        return "its attention is latent (MLA), so there are no heads to evict from"
    if getattr(module, "attn_logit_softcapping", None) is not None:
        return f"its attention caps logits (attn_logit_softcapping={module.attn_logit_softcapping})"
    if module.scaling != first.scaling:
        return "its layers scale attention differently"
    return ""


def _hidden_windows(config: Any, attention: list[Any]) -> list[int]:
    windows = layer_windows(config) or (0,) * len(attention)
    return [i for i, module in enumerate(attention) if getattr(module, "sliding_window", None) and not windows[i]]


def _obstacle(model: PreTrainedModel) -> str:
    """What stands in the way of evicting from this model, in words; empty if nothing does."""
    config, decoder = model.config, model.get_decoder()
    if config.get_text_config() is not config:
        return "it reads more than text. Load its language model alone, such as Gemma3ForCausalLM for a Gemma3"
    if of_layers := getattr(config, "per_layer_attributes", None):  # to read one of them is an error
        return f"its layers differ in {', '.join(sorted(of_layers))} (per_layer_config)"
    types, linear = list(getattr(config, "layer_types", None) or ()), linear_modules(model)
    other_types = set(types) - {"full_attention", "sliding_attention"}
    if other_types and (other_types != {LINEAR} or types.count(LINEAR) != len(linear)):
        supported = "full attention, or linear attention as in Qwen3-Next and Qwen3.5"
        return f"it has layers of type {sorted(other_types)}, and rollouts know {supported}"
    if getattr(config, "num_kv_shared_layers", 0):
        return f"its last {config.num_kv_shared_layers} layers share the keys and values of others"
    attention = attention_modules(model)
    if sorted(module.layer_idx for module in attention + linear) != list(range(config.num_hidden_layers)):
        return f"its layers are not numbered from 0 to {config.num_hidden_layers - 1}"
    if reason := next(filter(None, (_foreign(module, attention[0]) for module in attention)), ""):
        return reason
    if hidden := _hidden_windows(config, attention):
        return f"its layers {hidden} have sliding windows of which layer_types of its configuration says nothing"
    frequencies = rotation_of(getattr(decoder, "rotary_emb", None))[0]
    if frequencies is None:
        return "its positions are not rotary ones with frequencies that all layers of full attention share"
    if frequencies.device.type == "cpu" and not frequencies.isfinite().all():
        return f"its rotary frequencies are not finite, look at config.json, rope_parameters: {rope_of(config)}"
    return ""
