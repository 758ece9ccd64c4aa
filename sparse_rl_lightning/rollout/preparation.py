"""What is settled before a rollout begins: prompts that fit, tokens that end, a model that is still."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from sparse_rl_lightning.rollout.sampling import SamplingParams


def check_prompts(
    prompts: Sequence[Sequence[int]], params: SamplingParams, context: int | None, vocab_size: int
) -> None:
    """Refuse prompts that cannot be completed.

    Raises:
        ValueError: If there is no prompt, one is empty, or one leaves no room for the completion in ``context``.
    """
    if not prompts:
        raise ValueError("prompts is empty: give at least one list of token ids.")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} is empty: every prompt needs at least one token.")
        wrong = [token for token in prompt if not (isinstance(token, int) and 0 <= token < vocab_size)]
        if wrong:
            raise ValueError(
                f"prompt {index} holds {wrong[0]!r}: prompts are lists of token ids, whole numbers from 0 to "
                f"{vocab_size - 1}."
            )
        if context is not None and len(prompt) + params.max_completion_length > context:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with max_completion_length={params.max_completion_length} "
                f"that exceeds the model's context of {context} tokens. Drop long prompts or lower "
                "max_completion_length."
            )


def default_end_token_ids(model: PreTrainedModel) -> list[int]:
    """The tokens that end a completion by the model's own generation config, or its config."""
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = model.config.eos_token_id if ids is None else ids
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


@contextmanager
def drawing(model: PreTrainedModel) -> Iterator[None]:
    """What holds while sequences are drawn: no gradients, no dropout, and memory that serves the next call too.

    Under ``inference_mode`` what is allocated could not be written later, and half precision or float64 as torch's
    default type (Lightning's ``bf16-true``, ``64-true``) would become the type of sums and of quotients of integers.
    """
    default = torch.get_default_dtype()
    with torch.inference_mode(False), torch.no_grad(), eval_mode(model):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


@contextmanager
def eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """No dropout and no gradient checkpointing while sampling; the training flag comes back afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
