"""Log-probabilities and entropies of sequences under a dense policy, without ever storing all logits.

The logits of a batch are (B, T, V): tens of gigabytes for a long rollout. Only completion tokens need them, and
never all at once: the head runs on ``chunk_size`` tokens at a time, in the forward and again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.output_head import (
    PLAIN,
    ChunkedLogprobs,
    LogitScaling,
    logprobs_of_logits,
    output_head,
    product_dtype,
)
from sparse_rl_lightning.policies.modes import PRODUCTS, ROUNDED, exact_angles, has_dropout
from sparse_rl_lightning.policies.patched import check_reachable, is_plain_linear
from sparse_rl_lightning.policies.routing import replayed_routing

_Output = TypeVar("_Output")


def sequence_logprobs(
    model: PreTrainedModel,
    sequences: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
    chunk_size: int = 512,
    head_in_float32: bool = False,
    routing: Tensor | None = None,
    hidden: Tensor | None = None,
    ids: Tensor | None = None,
    **attention_kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every token of ``mask``, given all tokens before it.

    Index t refers to token t, so it comes from the model's output at t - 1. Attention is causal over the whole
    row; with right padding no real token sees padding, and ``mask`` does not affect attention.

    Args:
        model: Causal language model of transformers whose logits are its output embedding applied to the last
            hidden state, scaled or capped by its configuration (Granite, Cohere, Gemma 2), or one wrapped by peft.
        sequences: Token ids (B, T), right-padded.
        mask: Tokens (B, T) to return, bool. The first column is False: nothing comes before it.
        temperature: Divisor of the logits; 1 for tokens that were drawn greedily.
        chunk_size: Number of tokens whose logits exist at the same time.
        head_in_float32: Compute the logits in float32 whatever type the hidden states and the head have.
        routing: Recorded choices of experts, as in :func:`hidden_states`.
        hidden: States (M, C) before each of the M tokens of ``mask``, if they are known; None runs the model.
        ids: Candidates (B, T, J) in the place of each token, whose log-probabilities are wanted; None for the token.
        **attention_kwargs: Arguments for the model's forward, e.g. ``attention_mask`` of a replayed eviction.

    Returns:
        Two (B, T) tensors, at least float32, 0 outside ``mask``: log-softmax(logits / temperature) at the token, or
        (B, T, J) at the candidates, and the entropy of that distribution in nats. Both carry gradient if the model
        does; the gradient of the entropy costs nothing unless it is needed.

    Raises:
        ValueError: If a token to return has nothing before it, shapes, temperature or chunk size are wrong, or the
            model's own forward does something that is bypassed here (soft prompts, a replaced ``forward``).
    """
    _check_mask(sequences, mask)
    scaling = LogitScaling.of(model.config)
    if hidden is None:
        hidden = hidden_states(model, sequences, routing, **attention_kwargs)[:, :-1][mask[:, 1:]]
    targets = sequences[mask] if ids is None else ids[mask.to(ids.device)].to(mask.device, torch.int64)
    logprobs, entropy = token_logprobs(
        output_head(model), hidden, targets, temperature, chunk_size, head_in_float32, scaling
    )
    places = mask if ids is None else mask[..., None]
    empty, empties = logprobs.new_zeros(mask.shape), logprobs.new_zeros((*mask.shape, *targets.shape[1:]))
    return empties.masked_scatter(places, logprobs), empty.masked_scatter(mask, entropy)


@torch.no_grad()
def logprobs_at(
    model: PreTrainedModel,
    sequences: Tensor,
    ids: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
    chunk_size: int = 512,
    head_in_float32: bool = False,
    routing: Tensor | None = None,
    **attention_kwargs: Any,
) -> Tensor:
    """Log-probabilities of any K candidates for every token of ``mask``, without gradient.

    Args:
        model: Policy, as in :func:`sequence_logprobs`.
        sequences: Token ids (B, T), right-padded.
        ids: Candidates (B, T, K); the ids at index t are candidates for token t.
        mask: Tokens (B, T) to return, bool, as in :func:`sequence_logprobs`.
        temperature: Divisor of the logits.
        chunk_size: Number of tokens whose logits exist at the same time.
        head_in_float32: Precision of the logits, as in :func:`sequence_logprobs`.
        routing: Recorded choices of experts, as in :func:`hidden_states`.
        **attention_kwargs: Arguments for the model's forward, as in :func:`sequence_logprobs`.

    Returns:
        The log-probabilities (B, T, K), at least float32, 0 outside ``mask``.

    Raises:
        ValueError: For the same reasons as :func:`sequence_logprobs`, or if ``ids`` does not fit the sequences.
    """
    _check_settings(temperature, chunk_size)
    if ids.ndim != 3 or ids.shape[:2] != sequences.shape:
        raise UserError(f"ids must be (B, T, K) with (B, T) = {tuple(sequences.shape)}, got {tuple(ids.shape)}.")
    head = (temperature, chunk_size, head_in_float32)
    return sequence_logprobs(model, sequences, mask, *head, routing, ids=ids, **attention_kwargs)[0]


def hidden_states(
    model: PreTrainedModel, sequences: Tensor, routing: Tensor | None = None, positions: Tensor | None = None,
    **attention_kwargs: Any,
) -> Tensor:  # fmt: skip
    """The decoder's last hidden state at every position, without a cache.

    Args:
        model: Causal language model of transformers.
        sequences: Token ids (B, T), right-padded.
        routing: Recorded choices of experts (B, T, L, K), which the routers then make; None lets them choose.
        positions: Positions (1, T), default 0, 1, 2, ...
        **attention_kwargs: Arguments for the decoder's forward.

    Returns:
        The hidden states (B, T, C), after the final norm.

    Raises:
        ValueError: If the model's own forward does something before or after its decoder, or the choices are of
            another model.
    """
    check_reachable(model)
    if positions is None:
        positions = torch.arange(sequences.shape[1], device=sequences.device).unsqueeze(0)
    experts = nullcontext() if routing is None else replayed_routing(model, routing)
    rounds = any(backend.fp32_precision in ROUNDED for backend in PRODUCTS)
    with experts, exact_angles(model) if rounds else nullcontext():
        outputs = model.get_decoder()(
            input_ids=sequences, position_ids=positions, use_cache=False, return_dict=True, **attention_kwargs
        )
    states: Tensor = outputs.last_hidden_state
    return states


def token_logprobs(
    lm_head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk_size: int = 512,
    head_in_float32: bool = False,
    scaling: LogitScaling = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of targets and entropy of their distribution, ``chunk_size`` rows of logits at a time.

    A plain ``nn.Linear`` is differentiated by hand (:class:`~sparse_rl_lightning.output_head.ChunkedLogprobs`).
    Any other head (LoRA, a quantized layer, one with hooks) is called as it is, and its chunks are checkpointed:
    the same numbers, a little more memory and time. Whatever the number of chunks, ZeRO-3 gathers the head once,
    since ranks have different numbers of them.

    Args:
        lm_head: Head that maps (n, C) to (n, V).
        hidden: States (N, C) that predict the targets.
        targets: Token ids (N,), or (N, J) for several of each row.
        temperature: Divisor of the logits.
        chunk_size: Number of rows whose logits exist at the same time; backward computes them again.
        head_in_float32: Multiply in float32, also under autocast. Weights of a narrower type are copied for it.
        scaling: Function from the head's output to logits.

    Returns:
        Log-probabilities, of the shape of ``targets``, and entropies (N,), at least float32.

    Raises:
        ValueError: If ``temperature`` or ``chunk_size`` is not positive, or ZeRO-3 shards a head that is not a plain
            ``nn.Linear``.
    """
    _check_settings(temperature, chunk_size)
    by_row = targets.unsqueeze(1) if targets.ndim == 1 else targets
    if not is_plain_linear(lm_head):
        logprobs, entropy = _checkpointed(lm_head, hidden, by_row, temperature, chunk_size, head_in_float32, scaling)
        return logprobs.view(targets.shape), entropy

    dtype = torch.promote_types(hidden.dtype, torch.float32) if head_in_float32 else product_dtype(hidden)
    logprobs, entropy = in_one_call(
        lm_head,
        lambda hidden, by_row: ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
            hidden, lm_head.weight, lm_head.bias, by_row, temperature, chunk_size, dtype, scaling
        ),
        hidden,
        by_row,
    )
    return logprobs.view(targets.shape), entropy


def _check_mask(sequences: Tensor, mask: Tensor) -> None:
    if mask.dtype != torch.bool or mask.shape != sequences.shape:
        raise UserError(
            f"mask must be bool with the shape of sequences {tuple(sequences.shape)}, got {mask.dtype} "
            f"{tuple(mask.shape)}."
        )
    if bool(mask[:, 0].any()):
        raise UserError("mask[:, 0] must be False: the first token of a sequence has no probability.")


def _check_settings(temperature: float, chunk_size: int) -> None:
    if temperature <= 0:
        raise UserError(f"temperature must be positive (use 1 for greedy), got temperature={temperature}.")
    if chunk_size < 1:
        raise UserError(f"chunk_size must be at least 1, got chunk_size={chunk_size}.")


def _checkpointed(
    lm_head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    head_in_float32: bool,
    scaling: LogitScaling,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, chunk by chunk, through a head of any kind."""

    def of_chunk(rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_of_logits(scaling(_product(lm_head, rows, head_in_float32)), ids, temperature)[:2]

    is_random = lm_head.training and has_dropout(lm_head)  # an adapter's: backward has to draw it again

    def of_all(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        pairs = zip(torch.split(hidden, chunk_size), torch.split(targets, chunk_size), strict=True)
        chunks = [checkpoint(of_chunk, *pair, use_reentrant=False, preserve_rng_state=is_random) for pair in pairs]
        logprobs, entropy = (torch.cat(column) for column in zip(*chunks, strict=True))
        return logprobs, entropy

    return in_one_call(lm_head, of_all, hidden, targets)


def _product(lm_head: nn.Module, hidden: Tensor, head_in_float32: bool) -> Tensor:
    """What the head makes of hidden states; in float32 with copies of weights that are narrower."""
    if not head_in_float32:
        product: Tensor = lm_head(hidden)
        return product
    wide = {
        name: value.to(torch.promote_types(value.dtype, torch.float32)) for name, value in lm_head.named_parameters()
    }
    with torch.autocast(hidden.device.type, enabled=False):
        in_float32: Tensor = functional_call(
            lm_head, wide, (hidden.to(torch.promote_types(hidden.dtype, torch.float32)),)
        )
        return in_float32


def in_one_call(module: nn.Module, function: Callable[..., _Output], *inputs: Tensor) -> _Output:
    """``function(*inputs)``, for which ZeRO-3 gathers the module's weights once in forward and once in backward.

    The function replaces the module's forward, and does not call the module: calling it would gather in every call, and
    ranks that call it a different number of times would wait for each other forever. In backward the weights are
    released at the first input that carries gradient. Under ZeRO-3 the module must be a plain ``nn.Linear``.
    """
    if not any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        return function(*inputs)
    if not is_plain_linear(module):
        raise UserError(
            f"The policy's output head is a {type(module).__name__} with hooks or a forward of its own: ZeRO-3 knows "
            "plain nn.Linear heads only. Use --trainer.strategy=sparse_rl_deepspeed_stage_2."
        )
    module.forward = function
    try:
        output: _Output = module(*inputs)
    finally:
        del module.forward
    return output
