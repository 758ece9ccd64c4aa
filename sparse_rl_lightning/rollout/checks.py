"""Checks before a rollout: prompts that fit, end tokens that exist, and a model in eval mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.geometry import check_window, context_length
from sparse_rl_lightning.policies.modes import eval_mode
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams


def check_prompts(
    prompts: Sequence[Sequence[int] | Tensor], params: SamplingParams, model: PreTrainedModel
) -> list[list[int]]:
    """Refuse prompts that cannot be completed.

    Args:
        prompts: Token ids of each prompt: lists, or one-dimensional tensors or arrays.
        params: Sampling parameters of the completions.
        model: Policy that completes the prompts.

    Returns:
        The prompts as lists of ``int``.

    Raises:
        ValueError: If there is no prompt, one is empty or no list of token ids, one leaves no room for the completion
            in the model's context or sliding window, or ``top_logprobs`` exceeds the vocabulary.
    """
    vocab_size, context = model.config.vocab_size, context_length(model.config)
    if params.top_logprobs > vocab_size:
        raise UserError(
            f"top_logprobs must be at most the vocabulary's {vocab_size} tokens, got "
            f"top_logprobs={params.top_logprobs}."
        )
    if len(prompts) == 0:
        raise UserError("prompts is empty: give at least one list of token ids.")
    shape = tuple(getattr(prompts, "shape", ()))
    if len(shape) > 1:
        raise UserError(
            f"prompts is one array of shape {shape}, whose rows may be padded: give a list with the token ids of each "
            "prompt without padding, e.g. [row[mask].tolist() for row, mask in zip(ids, attention_mask.bool())]."
        )
    found = [_token_ids(prompt, index, vocab_size) for index, prompt in enumerate(prompts)]
    longest = max(len(prompt) for prompt in found) + params.max_completion_length
    for index, prompt in enumerate(found):
        if context is not None and len(prompt) + params.max_completion_length > context:
            raise UserError(
                f"prompt {index} has {len(prompt)} tokens; with max_completion_length={params.max_completion_length} "
                f"that exceeds the model's context of {context} tokens. Drop long prompts or lower "
                "max_completion_length."
            )
    check_window(model, longest)
    return found


def _token_ids(prompt: Any, index: int, vocab_size: int) -> list[int]:
    """One prompt as a list of whole numbers in the vocabulary."""
    given = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(given, str) or not hasattr(given, "__len__"):
        raise UserError(
            f"prompt {index} is {given!r:.80}: prompts is a list with a list of token ids for each prompt. Text must "
            "be tokenized first, and a single prompt stands in a list of its own."
        )
    if len(given) == 0:
        raise UserError(f"prompt {index} is empty: every prompt needs at least one token.")
    wrong = [token for token in given if not _is_token(token, vocab_size)]
    if wrong:
        raise UserError(
            f"prompt {index} holds {wrong[0]!r}: prompts are lists of token ids, whole numbers from 0 to "
            f"{vocab_size - 1}."
        )
    return [int(token) for token in given]


def _is_token(token: object, vocab_size: int) -> bool:
    return isinstance(token, Integral) and 0 <= int(token) < vocab_size


def check_end_tokens(ids: Sequence[int] | Tensor, vocab_size: int) -> list[int]:
    """Refuse end tokens that can never be drawn.

    Raises:
        ValueError: If one is not in the vocabulary.
    """
    ids = ids.tolist() if isinstance(ids, Tensor) else ids
    wrong = [token for token in ids if not _is_token(token, vocab_size)]
    if wrong:
        raise UserError(
            f"end_token_ids holds {wrong[0]!r}, which the model can never draw: end tokens are whole numbers from 0 to "
            f"{vocab_size - 1}. Without end_token_ids they are those of the model's generation_config."
        )
    return [int(token) for token in ids]


def default_end_token_ids(model: PreTrainedModel) -> list[int]:
    """The end tokens of the model's generation config, or of its config."""
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = model.config.eos_token_id if ids is None else ids
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


@contextmanager
def drawing(model: PreTrainedModel) -> Iterator[None]:
    """Context for drawing sequences: no gradients, no dropout, float32 as the default type, and reusable memory.

    Tensors allocated under ``inference_mode`` could not be written by the next call, and half precision or float64 as
    torch's default type (Lightning's ``bf16-true``, ``64-true``) would become the type of sums and of quotients of
    integers.
    """
    default = torch.get_default_dtype()
    with torch.inference_mode(False), torch.no_grad(), eval_mode(model):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(default)
