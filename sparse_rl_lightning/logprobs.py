"""Log-probabilities and entropies of sequences under a dense policy, without ever holding all logits.

The logits of a batch are (B, T, V): tens of gigabytes for a long rollout. Only completion tokens need them, and
never all at once: the head runs on ``chunk_size`` tokens at a time, in the forward and again in the backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def sequence_logprobs(
    model: PreTrainedModel,
    sequences: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
    chunk_size: int = 512,
    **attention_kwargs: object,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every token of ``mask``, given all tokens before it.

    Index t speaks of token t, so it comes from the model's output at t - 1. Attention is causal over the whole
    row; with right padding no real token sees padding, and ``mask`` does not change what is seen.

    Args:
        model: A causal language model of transformers whose logits are its output embedding applied to the last
            hidden state (Qwen2, Qwen3, Llama), or one wrapped by peft.
        sequences: (B, T) token ids, right-padded.
        mask: (B, T) bool, the tokens to return. The first column is False: nothing comes before it.
        temperature: Divides the logits; 1 for tokens that were drawn greedily.
        chunk_size: Tokens whose logits exist at the same time.
        **attention_kwargs: Passed to the model's forward, e.g. ``attention_mask`` of a replayed eviction.

    Returns:
        Two (B, T) tensors, at least float32, 0 outside ``mask``: log-softmax(logits / temperature) at the token,
        and the entropy of that distribution in nats. Both carry gradient if the model does.

    Raises:
        ValueError: If a token to return has nothing before it, or shapes, temperature or chunk size are wrong.
    """
    if mask.dtype != torch.bool or mask.shape != sequences.shape:
        raise ValueError(
            f"mask must be bool with the shape of sequences {tuple(sequences.shape)}, got {mask.dtype} "
            f"{tuple(mask.shape)}."
        )
    if bool(mask[:, 0].any()):
        raise ValueError("mask[:, 0] must be False: the first token of a sequence has no probability.")
    hidden = hidden_states(model, sequences, **attention_kwargs)[:, :-1][mask[:, 1:]]
    logprobs, entropy = token_logprobs(
        model.get_output_embeddings(), hidden, sequences[mask], temperature=temperature, chunk_size=chunk_size
    )
    empty = logprobs.new_zeros(mask.shape)
    return empty.masked_scatter(mask, logprobs), empty.masked_scatter(mask, entropy)


def hidden_states(model: PreTrainedModel, sequences: Tensor, **attention_kwargs: object) -> Tensor:
    """The decoder's last hidden state at every position, with positions 0, 1, 2, ... and no cache.

    Args:
        model: A causal language model of transformers.
        sequences: (B, T) token ids, right-padded.
        **attention_kwargs: Passed to the decoder's forward.

    Returns:
        (B, T, C), after the final norm.
    """
    positions = torch.arange(sequences.shape[1], device=sequences.device).unsqueeze(0)
    outputs = model.get_decoder()(
        input_ids=sequences, position_ids=positions, use_cache=False, return_dict=True, **attention_kwargs
    )
    states: Tensor = outputs.last_hidden_state
    return states


def token_logprobs(
    lm_head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float = 1.0, chunk_size: int = 512
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, ``chunk_size`` rows of logits at a time.

    Args:
        lm_head: Maps (n, C) to logits (n, V).
        hidden: (N, C) states that predict the targets.
        targets: (N,) token ids.
        temperature: Divides the logits.
        chunk_size: Rows per call of ``lm_head``. With gradient a chunk's logits are computed again in backward.

    Returns:
        Two (N,) tensors, at least float32.

    Raises:
        ValueError: If ``temperature`` or ``chunk_size`` is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive (use 1 for greedy), got temperature={temperature}.")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got chunk_size={chunk_size}.")
    chunks = [
        checkpoint(_chunk_logprobs, lm_head, rows, ids, temperature, use_reentrant=False, preserve_rng_state=False)
        for rows, ids in zip(torch.split(hidden, chunk_size), torch.split(targets, chunk_size), strict=True)
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk_logprobs(lm_head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = lm_head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logprobs = logits.log_softmax(dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy
