"""Sources of a policy and its tokenizer."""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.modes import freeze
from sparse_rl_lightning.policies.pretrained import check_finite, load_pretrained
from sparse_rl_lightning.policies.quantized import dequantize


class PolicySource(ABC):
    """The base of all sources of policies; every load gives the same weights."""

    attn_implementation: str | None = None
    """The learner's attention, if the source chooses it."""

    @abstractmethod
    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """A causal language model and its tokenizer."""

    def as_stored(self) -> PolicySource:
        """This source for weights that no step of an optimizer rounds: of the folder's type, unless one is given."""
        return self

    def load_reference(self) -> PreTrainedModel:
        """A second model with the initial weights, frozen. Called before training begins."""
        return freeze(self.as_stored().load()[0])

    def exported(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """The trained model as it is saved in a plain Hugging Face folder: adapters are merged, in a copy.

        A ``dtype`` is that of the folder, if it is not the model's: merged weights are rounded to it once.
        """
        wrapped: Any = model
        inner: PreTrainedModel = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else model
        return without_adapters(inner, merge=True, dtype=dtype) if has_adapters(inner) else inner


class PretrainedPolicy(PolicySource):
    """A model folder in Hugging Face's format, or a name on its hub.

    Args:
        path: Folder with ``config.json``, safetensors weights and a tokenizer, or a hub name.
        dtype: Type of the weights, such as ``float32`` or ``bfloat16``. ``auto`` is ``float32`` for weights that are
            trained, since 16 bits lose the small steps of an optimizer, and the folder's type for frozen ones: those
            below adapters, of a reference policy or in an evaluation, and under DeepSpeed's mixed precision, which
            keeps float32 weights itself.
        attn_implementation: The learner's attention, ``sdpa``, ``eager`` or, on a GPU with weights or autocast in a
            16-bit type, ``flash_attention_2`` (the extra ``flash-attn``). By default ``sdpa``, or ``eager`` for models
            of which transformers has no other (gpt-oss). The sampler always uses the library's own.
    """

    def __init__(self, path: str, dtype: str = "auto", attn_implementation: str | None = None) -> None:
        self.path = path
        self.dtype = dtype
        self.attn_implementation = attn_implementation
        self._widens = dtype == "auto"

    def as_stored(self) -> PolicySource:
        """The same folder, in its own type if none was chosen."""
        source = copy.copy(self)
        source._widens = False
        return source

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the model and its tokenizer, from safetensors only."""
        check_attention(self.attn_implementation)
        path = os.path.expanduser(self.path)
        if (Path(path) / "adapter_config.json").is_file() and not (Path(path) / "config.json").is_file():
            raise UserError(
                f"policy: {self.path!r} holds an adapter (adapter_config.json) and no model. Merge it into its base "
                "(peft: PeftModel.from_pretrained(model, folder).merge_and_unload().save_pretrained(...)), or train it "
                "on from Python: LoadedPolicy(PeftModel.from_pretrained(model, folder, is_trainable=True), tokenizer)."
            )
        return load_pretrained(path, "float32" if self._widens else self.dtype, self.attn_implementation)


class LoadedPolicy(PolicySource):
    """A model and tokenizer that are already in memory, for notebooks and scripts.

    Args:
        model: Policy, trained in place.
        tokenizer: Tokenizer of the policy.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model
        self.tokenizer = tokenizer

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The given objects, if all weights are finite."""
        check_finite(self.model.named_parameters(), "policy: the model given")
        return self.model, self.tokenizer

    def load_reference(self) -> PreTrainedModel:
        """A frozen copy of the model as it is now."""
        return freeze(copy.deepcopy(self.model))


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether peft has put adapters into a model, whether or not the model says so itself."""
    return "peft" in sys.modules and any(isinstance(module, _parts_of_peft()) for module in model.modules())


def check_trainable(model: torch.nn.Module) -> None:
    """Refuse a policy that training could not change, or whose adapters no export could add to its weights.

    Raises:
        ValueError: If all weights are frozen, or an adapter cannot be merged.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            "All weights of the policy are frozen, so there is nothing to train. A PeftModel is loaded for inference "
            "unless it is asked for: PeftModel.from_pretrained(model, folder, is_trainable=True)."
        )
    if not has_adapters(model):
        return
    check_heads(model)
    tuned = _parts_of_peft()[0]
    for name, layer in model.named_modules():
        if not isinstance(layer, tuned):
            continue
        has_bias = (
            any(getattr(layer, "lora_bias", {}).values()) and getattr(layer.get_base_layer(), "bias", None) is None
        )
        if has_bias or type(layer).merge is tuned.merge:
            why = "its bias (lora_bias) has none below it" if has_bias else f"peft merges no {type(layer).__name__}"
            raise UserError(
                f"The adapter of {name} cannot be merged into the weights for an export: {why}. Use LoRA, without "
                "lora_bias."
            )


def check_heads(model: Any) -> None:
    """Refuse adapters on one of an embedding and an output head that share their weight.

    Raises:
        ValueError: If there are such.
    """
    heads = (model.get_output_embeddings(), model.get_input_embeddings())
    if model.config.tie_word_embeddings and any(isinstance(head, _parts_of_peft()[0]) for head in heads):
        raise UserError(
            "target_modules: embedding and output head share one weight in this policy, so an adapter on one of them "
            "cannot be added to it. Leave them out."
        )


def without_adapters(model: PreTrainedModel, merge: bool, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A copy of the model without its adapters, which ``merge`` adds to the weights first.

    What was quantized is whole, on the host. The copy has the bits of both types before anything is added, if its own
    has too few.
    """
    tuned, kept = _parts_of_peft()
    plain = copy.deepcopy(model)
    both = torch.promote_types(plain.dtype, dtype or plain.dtype)
    if both != plain.dtype:  # else adapters, which may be float32, would be rounded before they are added
        plain.to(both)  # type: ignore[arg-type]  # transformers' wrapper hides the signature
    dequantize(plain)
    for layer in [module for module in plain.modules() if isinstance(module, tuned)] if merge else ():
        layer.merge()  # all of them: packed experts have one around another
    done: tuple[str, ...] = ()
    for name, module in list(plain.named_modules()):
        if not isinstance(module, (tuned, kept)) or name.startswith(done or "."):
            continue
        done = (*done, f"{name}.")
        if isinstance(module, kept):  # a whole copy that was trained (modules_to_save)
            plain.set_submodule(name, module.unload_and_optionally_merge_module(merge, False, None))
            continue
        plain.set_submodule(name, module.get_base_layer())
    plain._hf_peft_config_loaded = False  # transformers would save adapters only
    vars(plain).pop("peft_config", None)
    return plain


def _parts_of_peft() -> tuple[Any, Any]:
    """The bases of adapted layers, and of layers that are trained whole beside them."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return BaseTunerLayer, AuxiliaryTrainingWrapper


FLASH_PACKAGES = {
    "flash_attention_2": ("flash_attn", "pip install 'sparse-rl-lightning[flash-attn]'"),
    "flash_attention_3": ("flash_attn_interface", "build it from the folder hopper of the flash-attention sources"),
}
"""The module that each ``attn_implementation`` imports, and how to install it."""


def check_attention(name: str | None) -> None:
    """Refuse flash attention without its package; transformers would look for kernels on its hub instead."""
    module, remedy = FLASH_PACKAGES.get(name or "", ("", ""))
    if module and importlib.util.find_spec(module) is None:
        raise UserError(
            f"attn_implementation={name!r} needs the package {module}, which is not installed: {remedy} (with nvcc, on "
            "a machine with an NVIDIA GPU), or set the policy's attn_implementation to 'sdpa'."
        )


def resolve_policy(policy: str | PolicySource) -> PolicySource:
    """The policy itself, or a :class:`PretrainedPolicy` for a path."""
    return PretrainedPolicy(policy) if isinstance(policy, str) else policy
