"""The files of a checkpoint: tensors as ``torch.save`` writes them, and weights as Hugging Face reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparse_rl_lightning.files import raising_disk_errors


def save_tensors(state: Mapping[str, Any], path: Path) -> None:
    """Write with ``torch.save``; a full disk is an OSError too."""
    with path.open("wb") as file, raising_disk_errors():
        torch.save(state, file)


def save_weights(weights: Mapping[str, Tensor], path: Path, step: int) -> None:
    """Write safetensors: tensors that share memory once, with the number of optimizer steps as metadata."""
    distinct: dict[str, Tensor] = {}
    seen: set[tuple[int, int]] = set()
    for name, value in weights.items():
        memory = (value.data_ptr(), value.numel())
        if value.numel() and memory in seen:
            continue  # a tied output head; transformers leaves it out as well
        seen.add(memory)
        distinct[name] = value.detach().cpu().contiguous()
    with raising_disk_errors():
        save_file(distinct, path, metadata={"format": "pt", "global_step": str(step)})
