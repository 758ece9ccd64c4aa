r"""Prompt templates of the paper: for training its Qwen and Llama models, and for its evaluation.

The training suffix has doubled braces, ``\boxed{{}}``, a slip in the original data that models have been trained on;
it is kept so that results can be compared. Evaluation uses no chat template.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rollout.prompts import Prompt

PromptFormat: TypeAlias = Literal["plain", "qwen", "llama"]

SYSTEM = "You are a helpful assistant."
SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
PLAIN_SUFFIX = " Please reason step by step, and put your final answer within \\boxed{}.\n\n"


def render(question: str, prompt_format: PromptFormat) -> Prompt:
    """The prompt for a question.

    Args:
        question: Text of a problem as it is in its file.
        prompt_format: ``plain`` as in the paper's evaluation; ``qwen``, text in the ChatML format that the Qwen base
            models are trained with; ``llama``, the same as chat messages for the tokenizer's own template.

    Raises:
        ValueError: If there is no such format.
    """
    if prompt_format == "plain":
        return question + PLAIN_SUFFIX
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question + SUFFIX}]
    if prompt_format == "llama":
        return messages
    if prompt_format == "qwen":
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return f"{text}<|im_start|>assistant\n"
    raise UserError(f"prompt_format must be plain, qwen or llama, got prompt_format={prompt_format!r}.")
