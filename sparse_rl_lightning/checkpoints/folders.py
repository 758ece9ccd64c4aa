"""A policy as a folder of Hugging Face that transformers 4 and 5, and the servers built on either, read alike.

transformers 5 has other names for some settings, which transformers 4 ignores without a warning: it reads such
a folder with the rotary positions of its defaults. So both spellings are written.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import write_whole
from sparse_rl_lightning.policies.pretrained import check_finite, is_tied

SPOILED = "So nothing is written: export an earlier checkpoint, or in a wider dtype."
OF_BOTH = "PreTrainedTokenizerFast"
"""A tokenizer.json as it is, by the name that both know; transformers 5 writes another."""


def save_folder(
    folder: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    state: dict[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    ends: list[int] | None = None,
) -> None:
    """Write a model and its tokenizer.

    Args:
        folder: Folder to write into.
        model: Model without adapters.
        tokenizer: Tokenizer of the model.
        state: Whole weights by name, where the model has only parts of them.
        dtype: Type of the weights in the folder, None for the model's.
        ends: Tokens that end a completion, for the generation config; None leaves those of the model.
    """
    path = Path(folder)
    if dtype is not None:
        state = _cast(model.state_dict() if state is None else state, dtype, _kept_in_float32(model))
        check_finite(state.items(), f"export as {str(dtype).removeprefix('torch.')}", SPOILED)
    save_weights(path, model, state, ends)
    _edit(path / "config.json", lambda config: _config(config, model, dtype))
    tokenizer.save_pretrained(path)
    _edit(path / "tokenizer_config.json", _tokenizer_config)


def save_weights(
    path: Path, model: PreTrainedModel, state: dict[str, Tensor] | None = None, ends: list[int] | None = None
) -> None:
    """Write weights and configurations, or adapters alone if the model has some.

    transformers would refuse a generation config that was changed since it was loaded and is not consistent.
    """
    generation_config = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(path, state_dict=state)
    finally:
        model.generation_config = generation_config
    if generation_config is None:
        return
    generation_config = copy.deepcopy(generation_config)
    if ends is not None and set(ends) != {*_several(generation_config.eos_token_id)}:
        generation_config.eos_token_id = list(ends)
    generation_config.to_json_file(path / "generation_config.json", keys_to_pop=["compile_config"])


def check_dtype(name: str | None, where: str) -> torch.dtype | None:
    """The type of a name.

    Raises:
        ValueError: If it is none of the types that weights are exported in.
    """
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name is not None and name not in dtypes:
        setting = f"{where.rpartition(' ')[2]}={name!r}"
        raise UserError(f"{where} must be one of {', '.join(dtypes)} or null for the policy's own, got {setting}.")
    return None if name is None else dtypes[name]


def _several(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else ids


def _cast(state: Mapping[str, Tensor], dtype: torch.dtype, kept: tuple[str, ...]) -> dict[str, Tensor]:
    """The weights in another type; what is one tensor under two names stays one."""
    done: dict[tuple[int, torch.Size], Tensor] = {}
    converted = {}
    for name, value in state.items():
        if value.is_floating_point() and not any(fragment in name for fragment in kept):
            value = done.setdefault((value.data_ptr(), value.shape), value.to(dtype))
        converted[name] = value
    return converted


def _kept_in_float32(model: Any) -> tuple[str, ...]:
    """Parts of names of weights that transformers has in float32 whatever the type of the model."""
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return tuple(fragment for name in names for fragment in getattr(model, name, None) or ())


def _edit(file: Path, change: Any) -> None:
    settings = json.loads(file.read_text("utf-8"))
    write_whole(file, json.dumps(change(settings), indent=2, sort_keys=True) + "\n")


# ---------------------------------------------------------------- config.json


def _config(settings: dict[str, Any], model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, Any]:
    """The configuration of what the folder holds, with the names of transformers 4 beside those of 5."""
    config = model.config
    if (tied := is_tied(model)) is not None:  # transformers 4 obeys the flag, 5 the weights
        for section in filter(None, (settings, settings.get("text_config"))):
            section["tie_word_embeddings"] = tied
    if dtype is not None:
        settings["dtype"] = str(dtype).removeprefix("torch.")
    if "dtype" in settings:
        settings["torch_dtype"] = settings["dtype"]
    # such as num_experts
    settings = {old: settings[new] for old, new in config.attribute_map.items() if new in settings} | settings
    if not settings.get("rope_parameters"):
        return settings
    both = settings | _rope(settings)
    if _reads_alike(config, settings, both):
        return both
    warnings.warn(
        f"The exported folder of a {config.model_type!r} has rotary positions that transformers 4, and servers built "
        "on it, read otherwise: serve it with transformers 5.",
        stacklevel=5,
    )
    return settings


def _rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary positions as transformers 4 spells them; empty if it has no words for them."""
    rope = settings["rope_parameters"]
    nested = {name: layers for name, layers in rope.items() if isinstance(layers, dict)}
    whole, local = nested.get("full_attention", rope), nested.get("sliding_attention", {})
    scaling = {name: value for name, value in whole.items() if name not in ("rope_theta", "partial_rotary_factor")}
    rope_type = scaling.get("rope_type", "default")
    if rope_type == "longrope":  # Phi asks for these three and no other
        scaling = {"type": rope_type, "short_factor": scaling["short_factor"], "long_factor": scaling["long_factor"]}
    spelled = {"rope_theta": whole.get("rope_theta"), "rope_scaling": None if rope_type == "default" else scaling}
    for name in ("partial_rotary_factor", *(["original_max_position_embeddings"] if rope_type == "longrope" else [])):
        if name in whole and settings.get(name) is None:
            spelled[name] = whole[name]
    if nested and settings["model_type"] in ("gemma3", "gemma3_text"):
        return spelled | {"rope_local_base_freq": local.get("rope_theta")}
    of_one_base = (
        set(nested) <= {"full_attention", "sliding_attention"} and local.get("rope_theta") == whole["rope_theta"]
    )
    return spelled if not nested or of_one_base else {}


def _reads_alike(config: PreTrainedConfig, settings: dict[str, Any], both: dict[str, Any]) -> bool:
    """Whether there is something to add, and transformers 5 still reads the same."""
    again, before = (
        dict(type(config).from_dict(copy.deepcopy(variant)).rope_parameters or {}) for variant in (both, settings)
    )
    again.pop("type", None)  # beside rope_type
    return both != settings and again == before


# ---------------------------------------------------------------- tokenizer_config.json


def _tokenizer_config(settings: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer's settings with the names of transformers 4.

    No class of the source is named for a tokenizer.json as it is: transformers 5 might make another tokenizer of it.
    """
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = OF_BOTH
    if isinstance(settings.get("extra_special_tokens"), list):  # transformers 4 has a mapping of this name
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    return settings
