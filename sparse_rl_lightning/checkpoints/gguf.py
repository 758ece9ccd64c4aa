"""GGUF files, the format of llama.cpp: read by transformers, with every weight whole, for a folder that can be trained.

A GGUF holds quantized weights, settings, tokenizer and chat template in one file. What it rounded stays rounded.
"""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sparse_rl_lightning.checkpoints.gguf_contents import bits, check_read, difference_of_roundings, rope_scaling
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import check_regular
from sparse_rl_lightning.policies.pretrained import check_finite, check_numbers, check_whole, reason, without_reports

MAGIC = b"GGUF"


def load_gguf(file: str | Path, dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model and its tokenizer from a GGUF file of an architecture that transformers reads.

    Args:
        file: The file.
        dtype: Type of the weights; the packed ones are unpacked in float32, and rounded to it.

    Raises:
        ValueError: If it is not a GGUF file, the package gguf is missing, or transformers does not read it.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"there is no file {str(file)!r}. Give a GGUF file.")
    check_regular(path)
    if split := re.search(r"-\d{5}-of-(\d{5})\.gguf$", path.name):
        raise UserError(
            f"{str(file)!r} is one of {int(split[1])} parts, which are not read one by one. Join them first: "
            "llama-gguf-split --merge, of llama.cpp."
        )
    with path.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise UserError(f"{str(file)!r} is not a GGUF file: it does not begin with {MAGIC.decode()}.")
    if importlib.util.find_spec("gguf") is None:
        raise UserError("reading GGUF needs the package gguf: pip install 'sparse-rl-lightning[gguf]'.")
    return _loaded(path, repr(str(file)), dtype)


def _loaded(path: Path, name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read a file that is one; every error names it."""
    from gguf import GGUFReader

    packed: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # newer ones would leave the weights packed
        packed["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # alone in a folder: what else is beside the file, or in the working directory, is not of it
    with TemporaryDirectory() as alone, without_reports():
        link = Path(alone) / MAGIC.decode()
        os.symlink(path.resolve(), link)
        try:
            reader = GGUFReader(path)
            settings: dict[str, Any] = PreTrainedConfig.get_config_dict(alone, gguf_file=link.name)[0]
            check_numbers(settings, "metadata")
            if scaling := rope_scaling(reader, settings):
                settings["rope_scaling"] = scaling
            tensors = {tensor.name: tensor for tensor in reader.tensors}
            pair = [tensors[key] for key in ("token_embd.weight", "output.weight") if key in tensors]
            settings["tie_word_embeddings"] = len(pair) < 2
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                alone, config=AutoConfig.for_model(**settings), dtype=dtype, gguf_file=link.name,
                trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True, **packed,
            )  # fmt: skip
            tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=link.name, trust_remote_code=False)
        except Exception as error:  # foreign data: nearly every class of errors has been seen
            raise UserError(f"{name} cannot be read. {reason(alone, error).replace(str(link), name)}") from error
    model, report = loaded
    check_whole(report, name)
    check_finite(model.named_parameters(), name)
    model.config._name_or_path = tokenizer.name_or_path = ""
    check_read(reader, model, report["unexpected_keys"], name)
    if len(pair) == 2 and (difference := difference_of_roundings(*pair)) is not None:
        finer = max(pair, key=bits)
        kept = model.get_output_embeddings() if finer is pair[1] else model.get_input_embeddings()
        model.get_input_embeddings().weight = model.get_output_embeddings().weight = kept.weight
        model.config.tie_word_embeddings = True
        warnings.warn(
            f"{name}: {' and '.join(f'{tensor.name} ({tensor.tensor_type.name})' for tensor in pair)} are roundings of "
            f"one matrix (mean difference {difference:.1%} of its size). The policy has it once, from {finer.name}.",
            stacklevel=3,
        )
    _forget(model)
    return model, tokenizer


def _forget(model: PreTrainedModel) -> None:
    """Leave a plain model: its settings, float32 in the file, as they were written, and no word of the packing."""
    wrapped: Any = model
    for name in ("quantization_config", "_pre_quantization_dtype"):
        vars(wrapped.config).pop(name, None)
    wrapped.hf_quantizer, wrapped.is_quantized = None, False
    for name, value in vars(wrapped.config).items():
        if isinstance(value, dict):
            vars(wrapped.config)[name] = {key: _shortest(number) for key, number in value.items()}
        else:
            vars(wrapped.config)[name] = _shortest(value)


def _shortest(value: Any) -> Any:
    """A float that is one of float32, by the shortest decimal that means it: 9.99999974e-06 is 1e-05."""
    if not isinstance(value, float) or float(np.float32(value)) != value:
        return value
    return float(str(np.float32(value)))
