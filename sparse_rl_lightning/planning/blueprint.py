"""The shapes of a policy without its weights: its configuration, the type it is loaded in, and its adapters."""

from __future__ import annotations

import copy
import os
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from sparse_rl_lightning.calibration import SHAPES, ModelShape
from sparse_rl_lightning.calibration.shapes import TIED
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.lora import LoraPolicy, adapters
from sparse_rl_lightning.policies.pretrained import check_files, check_plain, other_weights, reason
from sparse_rl_lightning.policies.source import PolicySource, PretrainedPolicy

FAMILIES = {"qwen2.5": "qwen2", "qwen3": "qwen3", "llama": "llama"}
"""Types of the models in ``calibration.SHAPES``, by the beginning of their names."""


@dataclass(frozen=True)
class Blueprint:
    """A policy that is to be loaded."""

    path: str
    dtype: str = "auto"
    adapters: tuple[tuple[str, Any], ...] | None = None  # arguments of LoraPolicy; None trains all weights
    eager: bool = False  # whether attention keeps all its weights, which takes memory with the square of the length

    @classmethod
    def of(cls, source: PolicySource) -> Blueprint:
        """Read a source of policies without loading it.

        Raises:
            ValueError: If the source is of a kind whose shapes are known only once it is loaded.
        """
        if type(source) is LoraPolicy:
            targets = source.target_modules if isinstance(source.target_modules, str) else (*source.target_modules,)
            arguments = {**source.options, "target_modules": targets, "quantization": source.quantization}
            return replace(cls.of(source.base), adapters=(*arguments.items(),))
        if type(source) is PretrainedPolicy:
            return cls(source.path, source.dtype, eager=source.attn_implementation == "eager")
        raise UserError(
            f"model.policy: {type(source).__name__} has no shapes before it is loaded. A plan is made for a folder or "
            "a hub name (PretrainedPolicy), and for LoraPolicy on one of these."
        )

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration of the model, a new copy: transformers writes the type of a model made from it into it."""
        config = copy.deepcopy(read_config(self.path))
        if self.eager:
            config._attn_implementation = "eager"
        return config

    @property
    def stored_dtype(self) -> torch.dtype:
        """The type of weights that are loaded to stay as they are."""
        dtype = self.config.dtype if self.dtype == "auto" else getattr(torch, self.dtype, None)
        return dtype if isinstance(dtype, torch.dtype) else torch.float32

    @property
    def loaded_dtype(self) -> torch.dtype:
        """The type of the policy's weights when they are loaded; adapters on them are float32."""
        return torch.float32 if self.dtype == "auto" and self.adapters is None else self.stored_dtype

    @property
    def quantization(self) -> str | None:
        """The form of frozen weights in 4 or 8 bits, None for whole ones."""
        return dict(self.adapters or ()).get("quantization")

    def adapt(self, model: PreTrainedModel, of_one_type: bool = False) -> None:
        """Freeze a model under its adapters, if there are any, in float32 or in the type of its weights."""
        if self.adapters is None:
            return
        LoraPolicy(self.path, **dict(self.adapters)).adapt(model)
        for parameter in adapters(model) if of_one_type else ():
            parameter.data = parameter.data.to(model.dtype)


@lru_cache(maxsize=8)
def empty_model(blueprint: Blueprint, dtype: torch.dtype, of_one_type: bool = False) -> PreTrainedModel:
    """The model with its adapters on torch's meta device: shapes and types, but no memory.

    Args:
        blueprint: Policy.
        dtype: Type of the weights.
        of_one_type: Whether adapters have that type too, instead of float32.
    """
    config, path = blueprint.config, blueprint.path
    with torch.device("meta"):
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except Exception as error:  # foreign data
            raise UserError(f"policy: no model is described by {path!r}. {reason(path, error)}") from error
        blueprint.adapt(model, of_one_type)
    return model


@lru_cache(maxsize=32)
def read_config(path: str) -> PreTrainedConfig:
    """The configuration in a folder, of a known model by its name, or from the hub.

    Raises:
        ValueError: If there is none, or its sizes are none that a model has.
    """
    folder, name = Path(os.path.expanduser(path)), known_name(path)
    if name is not None and not folder.is_dir():
        return spelled_out(name)
    source = str(folder) if folder.is_dir() else path
    try:
        check_files(source)
        check_plain(source)
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except UserError as error:
        raise UserError(f"policy: {path!r}: {error}") from error
    except OSError as error:
        remedy = other_weights(str(folder)) or (
            f"Give a folder, or one of {', '.join(SHAPES)} under its owner's name, such as Qwen/Qwen3-4B."
        )
        raise UserError(
            f"policy: the sizes of {path!r} are not known: it is no folder with a config.json, and the hub does not "
            f"answer. {remedy}"
        ) from error
    except Exception as error:  # foreign data
        raise UserError(f"policy: the config.json of {path!r} cannot be read. {reason(path, error)}") from error
    return config


def known_name(path: str) -> str | None:
    """The name in SHAPES of a model or of a later training of it, None if there is none, or its weights are packed.

    >>> known_name("Qwen/Qwen3-4B"), known_name("Qwen/Qwen2.5-1.5B-Instruct"), known_name("Qwen/Qwen3-4B-AWQ")
    ('qwen3-4b', 'qwen2.5-1.5b', None)
    """
    last = path.rstrip("/").rpartition("/")[2].lower()
    if re.search("awq|gptq|gguf|fp8|mlx|int[48]|[48]-?bit", last):
        return None
    return next((name for name in SHAPES if last == name or last.startswith(f"{name}-")), None)


def spelled_out(name: str) -> PreTrainedConfig:
    """The configuration of a model of SHAPES: the sizes of its weights, none of its rotary frequencies."""
    model_type = next(model_type for start, model_type in FAMILIES.items() if name.startswith(start))
    s = ModelShape.of(name)
    return AutoConfig.for_model(
        model_type, num_hidden_layers=s.num_layers, hidden_size=s.hidden_size, num_attention_heads=s.num_heads,
        num_key_value_heads=s.num_kv_heads, head_dim=s.head_dim, intermediate_size=s.intermediate_size,
        vocab_size=s.vocab_size, tie_word_embeddings=name in TIED, dtype=torch.bfloat16,
    )  # fmt: skip
