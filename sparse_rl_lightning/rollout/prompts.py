"""Prompts, text or chat messages, to token ids: the only place that decides about special tokens."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from transformers import PreTrainedTokenizerBase

from sparse_rl_lightning.errors import UserError

Prompt: TypeAlias = str | list[dict[str, Any]]
"""Text that is already rendered, or chat messages with ``role`` and ``content``."""


OWN_ARGUMENTS = (
    "conversation", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip
"""Arguments of ``apply_chat_template`` that are fixed here."""


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Encode one prompt to token ids, ready for the assistant's first token.

    Messages go through the tokenizer's chat template. A string counts as already rendered: special tokens written
    out in it are recognized and none is added, except for the beginning-of-sequence token if the tokenizer
    normally adds one and the text does not start with it.

    Args:
        tokenizer: Tokenizer of the policy.
        prompt: String, or a non-empty list of messages.
        chat_template_kwargs: More arguments for the template, such as Qwen3's ``enable_thinking``. They do not affect a
            string.

    Returns:
        Token ids, at least one.

    Raises:
        ValueError: If the prompt is empty or malformed, or has messages but the tokenizer has no template, or
            the template does not use one of its arguments.
    """
    if isinstance(prompt, str):
        ids = _encode_text(tokenizer, valid_unicode(prompt))
    else:
        ids = _encode_messages(tokenizer, prompt, chat_template_kwargs or {})
    if not ids:
        raise UserError(f"empty prompt: {prompt!r} has no tokens. Drop the row or fill in its prompt.")
    return ids


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Encode several prompts to token ids; an error names the row.

    Raises:
        ValueError: See :func:`encode_prompt`.
    """
    if chat_template_kwargs and all(isinstance(prompt, str) for prompt in prompts):
        warnings.warn(
            "chat_template_kwargs have no effect on prompts that are text: only lists of chat messages go through the "
            "tokenizer's template.",
            stacklevel=2,
        )
    encoded = []
    for row, prompt in enumerate(prompts):
        try:
            encoded.append(encode_prompt(tokenizer, prompt, chat_template_kwargs))
        except ValueError as error:
            raise UserError(f"Prompt {row} of {len(prompts)}: {error}") from error
    return encoded


def valid_unicode(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates replaced by U+FFFD; tokenizers refuse them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    if not text:
        return []
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    bos = tokenizer.bos_token_id
    normally_set = bos is not None and tokenizer(text)["input_ids"][:1] == [bos]
    return [bos, *ids] if normally_set and ids[:1] != [bos] else ids


def _encode_messages(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], arguments: Mapping[str, Any]
) -> list[int]:
    if not messages:
        raise UserError("empty prompt: the list of chat messages is empty. Drop the row or fill in its prompt.")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
            raise UserError(f"a chat message must be a mapping with role and content (text), got {message!r}.")
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(
            f"the prompt is a list of chat messages, but the tokenizer {tokenizer.name_or_path!r} has no chat "
            "template. Use an instruct model's tokenizer, set tokenizer.chat_template, or give prompts as plain text."
        )
    _check_arguments(tokenizer, arguments)
    clean = [message | {"content": valid_unicode(message["content"])} for message in messages]
    try:
        ids = tokenizer.apply_chat_template(
            clean, add_generation_prompt=True, tokenize=True, return_dict=False, **arguments
        )
    except Exception as error:  # templates raise any exception, e.g. for roles that do not alternate
        raise UserError(f"the chat template refuses the messages {clean!r}: {error}") from error
    return cast("list[int]", ids)


def _check_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the template does not use: it would ignore a misspelled one silently."""
    own = [name for name in arguments if name in OWN_ARGUMENTS]
    if own:
        raise UserError(f"chat_template_kwargs: {', '.join(own)} cannot be set, prompts are encoded in one way only.")
    template = tokenizer.get_chat_template(arguments.get("chat_template"), arguments.get("tools"))
    named = ("chat_template", "tools", "documents")
    unread = [name for name in arguments if name not in named and not re.search(rf"\b{re.escape(name)}\b", template)]
    if unread:
        raise UserError(
            f"chat_template_kwargs: the chat template of {tokenizer.name_or_path!r} does not read {', '.join(unread)}. "
            "Correct or remove it."
        )
