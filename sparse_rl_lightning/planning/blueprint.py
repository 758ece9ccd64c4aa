"""The shapes of a policy without its weights: its configuration, the type it is loaded in, and its adapters."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from sparse_rl_lightning.calibration import SHAPES, ModelShape
from sparse_rl_lightning.calibration.shapes import TIED
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.lora import LoraPolicy, add_adapter
from sparse_rl_lightning.policies.source import PolicySource, PretrainedPolicy

FAMILIES = {"qwen2.5": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
"""Configurations of the models in ``calibration.SHAPES``, by the beginning of their names."""


@dataclass(frozen=True)
class Blueprint:
    """A policy that is to be loaded."""

    path: str
    dtype: str = "auto"
    adapters: tuple[tuple[str, Any], ...] | None = None  # arguments of add_adapter; None trains all weights

    @classmethod
    def of(cls, source: PolicySource) -> Blueprint:
        """Read a source of policies without loading it.

        Raises:
            ValueError: If the source is of a kind whose shapes are known only once it is loaded.
        """
        if type(source) is LoraPolicy:
            own = {"target_modules": source.target_modules, **source.options}
            if isinstance(source.target_modules, list):
                own["target_modules"] = tuple(source.target_modules)
            return replace(cls.of(source.base), adapters=tuple(own.items()))
        if type(source) is PretrainedPolicy:
            return cls(source.path, source.dtype)
        raise UserError(
            f"model.policy: {type(source).__name__} has no shapes before it is loaded. A plan is made for a folder or "
            "a hub name (PretrainedPolicy), and for LoraPolicy on one of these."
        )

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration of the model."""
        return read_config(self.path)

    @property
    def shape(self) -> ModelShape:
        """The sizes that the cost model and the cache depend on."""
        return ModelShape.of(self.config)

    @property
    def loaded_dtype(self) -> torch.dtype:
        """The type of the weights when they are loaded."""
        found = self.config.dtype if self.dtype == "auto" else getattr(torch, self.dtype, None)
        return found if isinstance(found, torch.dtype) else torch.float32

    def adapt(self, model: PreTrainedModel) -> None:
        """Freeze a model under its adapters, if there are any."""
        if self.adapters is not None:
            own = dict(self.adapters)
            if isinstance(own["target_modules"], tuple):
                own["target_modules"] = list(own["target_modules"])
            add_adapter(model, **own)


@lru_cache(maxsize=8)
def empty_model(blueprint: Blueprint, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its adapters on torch's meta device: shapes and types, but no memory."""
    with torch.device("meta"):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(blueprint.config, dtype=dtype)
        blueprint.adapt(made)
    return made


@lru_cache(maxsize=32)
def read_config(path: str) -> PreTrainedConfig:
    """The configuration in a folder, of a known model by its name, or from the hub.

    Raises:
        ValueError: If there is none.
    """
    folder = Path(os.path.expanduser(path))
    name = known_name(path)
    if name is not None and not folder.is_dir():
        return spelled_out(name)
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(
            str(folder) if folder.is_dir() else path, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"policy: the sizes of {path!r} are not known: it is no folder with a config.json, and the hub does not "
            f"answer. Give a folder, or one of {', '.join(SHAPES)} under its owner's name, such as Qwen/Qwen3-4B."
        ) from error
    return found


def known_name(path: str) -> str | None:
    """The name in SHAPES of a model or of a later training of it, None if there is none.

    >>> known_name("Qwen/Qwen3-4B"), known_name("Qwen/Qwen2.5-1.5B-Instruct"), known_name("Qwen/Qwen3-400B")
    ('qwen3-4b', 'qwen2.5-1.5b', None)
    """
    last = path.rstrip("/").rpartition("/")[2].lower()
    return next((name for name in SHAPES if last == name or last.startswith(f"{name}-")), None)


def spelled_out(name: str) -> PreTrainedConfig:
    """The configuration of a model of SHAPES: the sizes of its weights, none of its rotary frequencies."""
    s = ModelShape.of(name)
    kind: Any = next(kind for start, kind in FAMILIES.items() if name.startswith(start))
    found: PreTrainedConfig = kind(
        num_hidden_layers=s.num_layers, hidden_size=s.hidden_size, num_attention_heads=s.num_heads,
        num_key_value_heads=s.num_kv_heads, head_dim=s.head_dim, intermediate_size=s.intermediate_size,
        vocab_size=s.vocab_size, tie_word_embeddings=name in TIED, dtype=torch.bfloat16,
    )  # fmt: skip
    return found
