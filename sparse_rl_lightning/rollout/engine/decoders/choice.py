"""Which decoder a model gets, and the check before the first rollout."""

from __future__ import annotations

from typing import Literal
from weakref import WeakSet

from torch import nn
from transformers import PreTrainedModel

from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.errors import UserError, check_choice
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.policies.quantized import product_bytes
from sparse_rl_lightning.rollout.engine.decoders.agreement import check_agreement, layers_turned_otherwise
from sparse_rl_lightning.rollout.engine.decoders.base import Decoder, DecoderKind
from sparse_rl_lightning.rollout.engine.decoders.hf_forward import TransformersDecoder, transformers_bytes
from sparse_rl_lightning.rollout.engine.decoders.linear_products import copied_bytes
from sparse_rl_lightning.rollout.engine.decoders.native import NativeDecoder, is_native, native_bytes

DecoderChoice = Literal["auto", "native", "transformers"]

_agreed: WeakSet[nn.Module] = WeakSet()  # models whose forward pass was compared


def choose_decoder(model: PreTrainedModel, choice: DecoderChoice = "auto") -> DecoderKind:
    """Choose the decoder of the model's layers: by default the native one where it supports them.

    Raises:
        ValueError: If the choice is ``native``, and it does not support the layers, or what runs them.
    """
    check_choice("decoder", choice, DecoderChoice, "RolloutSampler")
    if choice != "transformers" and is_native(model):
        return "native"
    if choice == "native":
        raise UserError(
            "decoder='native' knows the layers of Llama, Mistral, Qwen2 and Qwen3, not those of "
            f"{type(model).__name__}, nor a forward of a derived class. Use decoder='auto' or 'transformers'."
        )
    return "transformers"


def make_decoder(
    model: PreTrainedModel, geometry: CacheGeometry, decoder_kind: DecoderKind | None = None, in_float32: bool = False
) -> Decoder:
    """A decoder of the model's current weights; default is the one of :func:`choose_decoder`.

    Raises:
        ValueError: If a weight is NaN, logits cannot be float32, or the model's own forward pass gives other numbers.
    """
    if (decoder_kind or choose_decoder(model)) == "native":
        return NativeDecoder(model, geometry, in_float32)
    decoder = TransformersDecoder(model, geometry, in_float32)
    if model not in _agreed:
        check_agreement(model, decoder, geometry)
        _agreed.add(model)
    return decoder


def decoder_bytes(
    model: PreTrainedModel, geometry: CacheGeometry, length: int, decoder_kind: DecoderKind, in_float32: bool = False
) -> int:
    """The bytes that a decoder needs on a GPU for copies of weights, and for its angles of this many positions.

    A quantized layer makes its matrix for each product: the largest counts, in the CUDA graphs' memory and outside.
    """
    nbytes = 2 * product_bytes(model, geometry.dtype)
    if not in_float32:  # which reads the head's own weights
        nbytes += copied_bytes((model.get_output_embeddings(),), geometry.dtype)
    if decoder_kind == "native":
        return nbytes + native_bytes(model, geometry, length)
    return nbytes + transformers_bytes(model, geometry)


def check_rotation(compressor: Compressor, decoder: Decoder, geometry: CacheGeometry) -> None:
    """Refuse a compressor that reads rotary frequencies for a model whose keys do not follow them.

    Raises:
        ValueError: If it does.
    """
    if not compressor.needs_rotation or decoder.decoder_kind == "native":
        return
    wrong = layers_turned_otherwise(decoder, geometry)
    if compressor.needs_rotation == "whole" and 2 * len(geometry.inv_freq) < geometry.head_dim:
        reason = f"rotates {2 * len(geometry.inv_freq)} of {geometry.head_dim} channels"
    elif wrong:
        reason = f"rotates the keys of layers {wrong} not at all, or not by halves"
    else:
        return
    name = type(compressor).__name__
    raise UserError(
        f"{name} turns queries with the model's rotary frequencies, but {type(decoder.model).__name__} {reason}. Use "
        "another compressor, such as SnapKV or RKV."
    )
