"""LoRA adapters of the served model by name: all in the host's memory, and one at a time in the model.

They are not merged: 16 bits would lose what an adapter adds, and a trainer does not merge them either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import whole_file
from sparse_rl_lightning.policies.pretrained import check_finite

MOST_ADAPTERS = 16
USED = {
    "r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "rank_pattern", "alpha_pattern",
    "layers_to_transform", "layers_pattern",
}  # fmt: skip
"""Fields of an adapter that say what it is. Others must be as usual but for these, of training or checked apart."""
UNUSED = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_core", "peft_type", "init_lora_weights",
}  # fmt: skip
BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to begin that leave the layers as they are."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter; requests that wait for it keep it, whatever its name is given to."""

    config: Any  # peft's
    weights: dict[str, Tensor]


class Adapters:
    """The adapters that a trainer has loaded.

    Args:
        model: Served model, which :meth:`select` changes in place.
        max_rank: Largest rank of an adapter.

    Raises:
        ValueError: If peft is not installed.
    """

    def __init__(self, model: PreTrainedModel, max_rank: int) -> None:
        try:
            import peft
        except ImportError as error:
            raise UserError("--max_lora_rank needs peft: pip install 'sparse-rl-lightning[lora]'.") from error
        self.model, self.max_rank, self._peft = model, max_rank, peft
        self._loaded = dict[str, Adapter]()

    @property
    def names(self) -> list[str]:
        """Those that are loaded."""
        return list(self._loaded)

    def named(self, name: str) -> Adapter:
        """The adapter of this name.

        Raises:
            ValueError: If there is none.
        """
        if name not in self._loaded:
            raise UserError(f"There is no adapter {name!r:.80}.")
        return self._loaded[name]

    def load(self, name: str, folder: Path) -> None:
        """Read and check an adapter in peft's format, in place of one of the same name.

        Raises:
            ValueError: If it is none, or not one of this model, or there are too many.
        """
        if name not in self._loaded and len(self._loaded) >= MOST_ADAPTERS:
            raise UserError(f"There are {MOST_ADAPTERS} adapters already: unload one.")
        try:
            fields = json.loads(whole_file(folder / "adapter_config.json", 2**20))
            config = self._config(fields)
            with torch.device("meta"):
                shapes = type(self.model)(deepcopy(self.model.config))
            wanted: dict[str, Tensor] = self._peft.get_peft_model_state_dict(self._peft.PeftModel(shapes, config))
            weights = load(whole_file(folder / "adapter_model.safetensors"))
        except UserError:
            raise
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder.name!r} holds no adapter: {type(error).__name__}.") from error
        except Exception as error:  # peft has several for what it cannot adapt
            raise UserError(f"The adapter {folder.name!r} is not one of this model: {type(error).__name__}.") from error
        has_others = any(".lora_" not in key for key in wanted)  # embeddings, which would overwrite the model's
        has_types = {w.dtype for w in weights.values()} <= {torch.float32, torch.bfloat16, torch.float16}
        shapes_of = [{key: w.shape for key, w in each.items()} for each in (wanted, weights)]
        if has_others or not has_types or shapes_of[0] != shapes_of[1]:
            raise UserError(f"The adapter {folder.name!r} has other weights than its configuration says.")
        check_finite(weights.items(), f"The adapter {folder.name!r}")
        self._loaded[name] = Adapter(config, weights)

    def unload(self, name: str) -> None:
        """Forget an adapter; requests that have come for it are drawn with it.

        Raises:
            ValueError: If there is none of this name.
        """
        self.named(name)
        del self._loaded[name]

    def select(self, adapter: Adapter | None) -> None:
        """Put an adapter into the model, or none; nothing may be drawn meanwhile."""
        self._take_out()
        if adapter is None:
            return
        try:
            wrapped = self._peft.PeftModel(self.model, deepcopy(adapter.config)).eval()
            self._peft.set_peft_model_state_dict(wrapped, adapter.weights)
        except BaseException:  # no memory, for one
            self._take_out()
            raise

    def _take_out(self) -> None:
        """Put the model's own layers back, however many an adapter has taken the place of."""
        layers = [(name, module) for name, module in self.model.named_modules() if hasattr(module, "base_layer")]
        for name, module in layers:
            path, _, last = name.rpartition(".")
            setattr(self.model.get_submodule(path), last, module.get_base_layer())
        self.model.__dict__.pop("peft_config", None)

    def _config(self, fields: Mapping[str, Any]) -> Any:
        usual = self._peft.LoraConfig()
        if fields.get("peft_type") != "LORA":
            raise UserError("Adapters must be LoRA.")
        names = [fields.get(name) for name in ("target_modules", "exclude_modules")]
        if any(isinstance(text, str) and text != "all-linear" for text in names):  # patterns may take for ever
            raise UserError("target_modules and exclude_modules must be lists of names.")
        patterns = {**(fields.get("rank_pattern") or {}), **(fields.get("alpha_pattern") or {})}
        numbers = [fields.get("lora_alpha", 1), *patterns.values()]
        if not all(re.fullmatch(r"[\w.]+", name) for name in patterns) or not all(abs(n) < 1e6 for n in numbers):
            raise UserError("rank_pattern and alpha_pattern must have names, and all of their numbers below a million.")
        if fields.get("init_lora_weights") not in BEGINNINGS:
            raise UserError(f"init_lora_weights={fields['init_lora_weights']!r:.40} changes the layers, too.")
        if odd := [
            name for name, value in fields.items()
            if name not in USED | UNUSED and value and value != getattr(usual, name, None)
        ]:  # fmt: skip
            raise UserError(f"Adapters with {odd[0]:.80} are not served.")
        config = self._peft.LoraConfig(
            **{name: fields[name] for name in USED if name in fields}, init_lora_weights=False
        )
        if max([config.r, *(config.rank_pattern or {}).values()]) > self.max_rank:
            raise UserError(f"The adapter's rank is larger than --max_lora_rank={self.max_rank}.")
        return config
