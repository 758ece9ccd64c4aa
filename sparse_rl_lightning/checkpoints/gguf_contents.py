"""What a GGUF file holds that transformers' reader knows nothing of: scaled positions, a matrix twice, and the rest."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.windows import rotation_of

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

FACTORS = "rope_freqs.weight"
"""By these numbers llama.cpp divides the frequencies; its converter writes what Llama 3.1 has."""
SCALINGS = {
    "none": {"type": "rope_type"},
    "linear": {"type": "rope_type", "factor": "factor"},
    "yarn": {
        "type": "rope_type",
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    },
}
"""The entries of each kind of scaling, with transformers' names for them."""
FLOATS = {"F64": 53, "F32": 24, "F16": 11, "BF16": 8}
"""Bits of a mantissa, which rounds a number relative to itself; other formats round it relative to its block."""


def unpacked(tensor: ReaderTensor, rows: slice = slice(None)) -> np.ndarray:
    """The numbers of some rows of a tensor, in float32."""
    from gguf.quants import dequantize

    return np.asarray(dequantize(tensor.data[rows], tensor.tensor_type), dtype=np.float32)


# ---------------------------------------------------------------- positions


def rope_scaling(reader: GGUFReader, settings: dict[str, Any]) -> dict[str, Any]:
    """The scaling of a file's positions in transformers' words, empty if there is none.

    Args:
        reader: The file.
        settings: What transformers reads of it for the model's configuration.

    Raises:
        ValueError: If there are no words for it; the message names what the file says.
    """
    prefix = f"{reader.fields['general.architecture'].contents()}.rope.scaling."
    stated = {key.removeprefix(prefix): value.contents() for key, value in reader.fields.items() if prefix in key}
    words = SCALINGS.get(stated.get("type", "linear"), {})  # llama.cpp's default
    if unknown := sorted(stated.keys() - words.keys() - {"finetuned", "original_context_length"}):  # of no account
        names = ", ".join(f"{prefix}{name}={stated[name]}" for name in unknown)
        raise UserError(f"Its positions are scaled in a way that is not computed here: {names}.")
    trained = {"original_max_position_embeddings": settings.get("max_position_embeddings")} if len(words) > 2 else {}
    scaling = {"rope_type": "linear"} | trained | {words[name]: stated[name] for name in words if name in stated}
    scaling = scaling if scaling.get("factor", 0) not in (0, 1) else {}
    factors = [unpacked(tensor).ravel() for tensor in reader.tensors if tensor.name == FACTORS]
    if not factors or (factors[0] == 1).all():
        return scaling
    if scaling or not (scaling := _llama3(factors[0], settings)):
        raise UserError(f"Its positions are scaled by factors that are not computed here: {FACTORS}.")
    return scaling


def _llama3(factors: np.ndarray, settings: dict[str, Any]) -> dict[str, Any]:
    """The scaling of Llama 3.1 with these factors, one for each frequency; empty if no usual length has them."""
    dim = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    wavelengths = 2 * math.pi * settings["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high, most = 1.0, 4.0, float(factors.max())
    for length in (2**power for power in range(4, 24)):
        share = np.clip((length / wavelengths - low) / (high - low), 0, 1)
        if len(factors) == len(share) and np.allclose(1 / ((1 - share) / most + share), factors, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3", "factor": most, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }  # fmt: skip
    return {}


# ---------------------------------------------------------------- embedding and output head


def bits(tensor: ReaderTensor) -> tuple[int, int]:
    """The bits that a tensor's numbers are rounded to, and its bytes, which are more for better scales."""
    name = tensor.tensor_type.name
    return FLOATS.get(name) or int(re.sub(r"\D*(\d+).*", r"\1", name)), int(tensor.n_bytes)


def difference_of_roundings(first: ReaderTensor, second: ReaderTensor) -> float | None:
    """The mean difference as a share of the first's size; None if more than both formats' rounding in some row.

    Quantizers give the output head more bits, so a model that ties it to its embedding is two matrices in a file, of
    one shape.
    """
    total = size = 0.0
    for rows in (slice(start, start + 4096) for start in range(0, int(first.shape[-1]), 4096)):
        values, counterparts = unpacked(first, rows), unpacked(second, rows)
        apart, largest = np.abs(values - counterparts), np.maximum(np.abs(values), np.abs(counterparts))
        if (apart.mean(-1) > _rounding(largest, first) + _rounding(largest, second)).any():
            return None
        total, size = total + float(apart.sum(dtype=float)), size + float(np.abs(values).sum(dtype=float))
    return total / max(size, 1e-30)


def _rounding(values: np.ndarray, tensor: ReaderTensor) -> np.ndarray:
    """The mean over each row of the most by which a format rounds its numbers: half a step of their blocks.

    Scales are of float16, which has no small numbers, the less so where blocks have a scale within a scale.
    """
    from gguf import GGML_QUANT_SIZES

    block, number = GGML_QUANT_SIZES[tensor.tensor_type][0], bits(tensor)[0]
    least = 0 if block == 1 else 2.0 ** (number - (19 if block > 32 else 26))
    return np.asarray(values.reshape(len(values), -1, block).max(-1).mean(-1) * 2.0**-number + least)


# ---------------------------------------------------------------- all else


def check_read(reader: GGUFReader, model: Any, unexpected: Iterable[str], name: str) -> None:
    """Refuse tensors, and numbers about positions, that the model does not have; warn of its other numbers."""
    architecture, config = str(reader.fields["general.architecture"].contents()), model.config
    unread = {*unexpected}
    if not getattr(getattr(model, "hf_quantizer", None), "supported", False):  # the older of transformers' readers
        processor: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        unread |= {tensor.name for tensor in reader.tensors} - get_gguf_hf_weights_map(model, processor).keys()
    rotated = rotation_of(getattr(model.get_decoder(), "rotary_emb", None))[0]
    config_numbers = re.findall(r"(?<![\"\w.])-?\d[\d.e+-]*", config.to_json_string(use_diff=False))
    numbers = {*map(np.float32, [*config_numbers, 0 if rotated is None else 2 * len(rotated)])}  # as files have them
    ignored = {
        key: value
        for key, field in reader.fields.items()
        if key.startswith(f"{architecture}.")
        and type(value := field.contents()) in (int, float)
        and np.float32(value) not in numbers
    }
    of_positions = {key for key in ignored if ".rope." in key and ".rope.scaling." not in key}
    if refused := sorted((unread - {FACTORS}) | of_positions):
        raise UserError(
            f"{name} cannot be read. Of its tensors and positions, {len(refused)} have no place in a "
            f"{config.model_type!r} of {config.num_hidden_layers} layers, for example {refused[0]!r}."
        )
    if ignored := {key: value for key, value in ignored.items() if ".rope." not in key}:
        warnings.warn(f"{name} says what its model does not have: {ignored}.", stacklevel=4)
