"""Prompts, text or chat messages, to token ids; which of them can be completed; and the tokens that end a completion.

No other place decides about special tokens.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias, cast

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops import library
from sparse_rl_lightning.policies.geometry import context_length
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams

Prompt: TypeAlias = str | list[dict[str, Any]]
"""Text that is already rendered, or chat messages with ``role`` and ``content``."""


MOST_TOP = 256
"""The largest ``top_logprobs`` of the kernel for GPUs (cuda_ext/cuda/draw.cu)."""
FIXED_ARGUMENTS = (
    "conversation", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip
"""Arguments of ``apply_chat_template`` that are fixed here."""


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Encode one prompt to token ids, ready for the next token of the assistant.

    Messages go through the tokenizer's chat template. If the last one is the assistant's, it is the beginning of the
    answer (a prefill) and is continued, with TRL's token ids; otherwise a new answer begins. A string counts as already
    rendered: special tokens written out in it are recognized and none is added, except for the beginning-of-sequence
    token if the tokenizer normally adds one and the text does not start with it.

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
        text = _rendered(tokenizer, prompt, chat_template_kwargs or {})
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
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


def with_tools(arguments: Mapping[str, Any] | None, tools: Sequence[Any]) -> dict[str, Any]:
    """The chat template's arguments, and the tools that it is to describe to the policy."""
    return dict(arguments or {}) | ({"tools": list(tools)} if tools else {})


def valid_unicode(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates replaced by U+FFFD; tokenizers refuse them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def valid_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat messages with valid Unicode, and with contents that are lists of text parts joined.

    Raises:
        ValueError: If one has no role, or no content that is text.
    """
    valid = []
    for message in messages:
        text = content_text(message)
        if text is None:
            raise UserError(
                f"a chat message must be a mapping with role and content (text, or a list of text parts), got "
                f"{message!r}."
            )
        valid.append(message | {"content": valid_unicode(text)})
    return valid


def content_text(message: Any) -> str | None:
    """The text of a chat message, its parts joined; None if it is none, or a part is an image or anything else."""
    if not isinstance(message, dict) or "role" not in message:
        return None
    content = message.get("content")
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    parts = [
        piece.get("text") if isinstance(piece, dict) and piece.get("type") == "text" else None for piece in content
    ]
    texts = [piece for piece in parts if isinstance(piece, str)]
    return "".join(texts) if len(texts) == len(content) else None


def _encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    if not text:
        return []
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    bos = tokenizer.bos_token_id
    normally_set = bos is not None and tokenizer(text)["input_ids"][:1] == [bos]
    return [bos, *ids] if normally_set and ids[:1] != [bos] else ids


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
    """The text of chat messages as the template writes it."""
    if not messages:
        raise UserError("empty prompt: the list of chat messages is empty. Drop the row or fill in its prompt.")
    clean = valid_messages(messages)
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(
            f"the prompt is a list of chat messages, but the tokenizer {tokenizer.name_or_path!r} has no chat "
            "template. Use an instruct model's tokenizer, set tokenizer.chat_template, or give prompts as plain text."
        )
    _check_arguments(tokenizer, arguments)
    goes_on = clean[-1]["role"] == "assistant"
    if goes_on and not clean[-1]["content"].strip():
        raise UserError("the last message is the assistant's, to be continued, and it is empty: leave it out.")
    try:
        return str(
            tokenizer.apply_chat_template(
                clean, add_generation_prompt=not goes_on, continue_final_message=goes_on, tokenize=False, **arguments
            )
        )
    except Exception as error:  # templates raise any exception, e.g. for roles that do not alternate
        raise UserError(f"the chat template refuses the messages: {error} (they are {clean!r})") from error


def _check_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the template does not use: it would ignore a misspelled one silently."""
    reserved = [name for name in arguments if name in FIXED_ARGUMENTS]
    if reserved:
        raise UserError(
            f"chat_template_kwargs: {', '.join(reserved)} cannot be set: a last message of the assistant is continued, "
            "and behind any other an answer begins."
        )
    template = tokenizer.get_chat_template(arguments.get("chat_template"), arguments.get("tools"))
    named = ("chat_template", "tools", "documents")
    read = {name for name in arguments if re.search(rf"\b{re.escape(name)}\b", template)}
    if arguments.get("tools") and "tools" not in read:
        raise UserError(
            f"the chat template of {tokenizer.name_or_path!r} does not describe tools to the policy. Use one that "
            "does, or describe them in the prompt and let the environment have tools = ()."
        )
    unread = [name for name in arguments if name not in read and name not in named]
    if unread:
        raise UserError(
            f"chat_template_kwargs: the chat template of {tokenizer.name_or_path!r} does not read {', '.join(unread)}. "
            "Correct or remove it."
        )


def long_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    most: int | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    where: Callable[[int], str],
) -> dict[int, int]:
    """Prompts with more than ``most`` tokens (None: no limit), by index, with their number of tokens.

    All are rendered, and those encoded whose text could have more tokens than that.

    Args:
        tokenizer: Tokenizer of the policy.
        prompts: Prompts.
        most: Largest number of tokens.
        chat_template_kwargs: More arguments for the template.
        where: Where a prompt comes from, by its index, for errors.

    Raises:
        ValueError: If a prompt cannot be encoded.
    """
    too_long = {}
    for index, prompt in enumerate(prompts):
        try:
            text = prompt if isinstance(prompt, str) else _rendered(tokenizer, prompt, chat_template_kwargs or {})
            if not text or (most is not None and most_tokens(tokenizer, text) > most):
                length = len(encode_prompt(tokenizer, prompt, chat_template_kwargs))
                if most is not None and length > most:
                    too_long[index] = length
        except ValueError as error:
            raise UserError(f"{where(index)}: {error}") from error
    return too_long


def most_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> float:
    """A number of tokens that a rendered prompt cannot exceed, found without the tokenizer's search for tokens.

    After the tokenizer's normalizer every token stands for at least one byte, but for a space that is put in front, and
    the beginning-of-sequence token. Infinite for tokenizers that do not show their normalizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return math.inf
    text = valid_unicode(text)
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    return len(text.encode()) + 2


def decode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: list[list[int]], end_token_ids: Sequence[int], skip: bool
) -> list[str]:
    """What was drawn as text, without special tokens, or with all but the one that ended it."""
    if not skip:
        texts = [ids[:-1] if ids and ids[-1] in end_token_ids else ids for ids in texts]
    return tokenizer.batch_decode(texts, skip_special_tokens=skip)


# -------------------------------------------------------------------- token ids


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
            in the model's context or sliding window, or ``top_logprobs`` exceeds the vocabulary or a GPU's kernel.
    """
    vocab_size = model.config.vocab_size
    if params.top_logprobs > vocab_size:
        raise UserError(
            f"top_logprobs must be at most the vocabulary's {vocab_size} tokens, got "
            f"top_logprobs={params.top_logprobs}."
        )
    if params.top_logprobs > MOST_TOP and model.device.type == "cuda" and library.has_kernel("draw", "cuda"):
        raise UserError(
            f"top_logprobs, or what a callback wants of most likely tokens, must be at most {MOST_TOP} on a GPU, whose "
            f"kernel reports no more, got {params.top_logprobs}."
        )
    if len(prompts) == 0:
        raise UserError("prompts is empty: give at least one list of token ids.")
    shape = tuple(getattr(prompts, "shape", ()))
    if len(shape) > 1:
        raise UserError(
            f"prompts is one array of shape {shape}, whose rows may be padded: give a list with the token ids of each "
            "prompt without padding, e.g. [row[mask].tolist() for row, mask in zip(ids, attention_mask.bool())]."
        )
    token_ids = [_token_ids(prompt, index, vocab_size) for index, prompt in enumerate(prompts)]
    lengths = [len(prompt) for prompt in token_ids]
    # scaled positions reach further than this number of a configuration
    if max(lengths) + params.max_completion_length > (getattr(model.config, "max_position_embeddings", None) or 0):
        context = context_length(model.config)
        over = next(
            (i for i, n in enumerate(lengths) if n + params.max_completion_length > (context or math.inf)), None
        )
        if over is not None:
            raise UserError(
                f"prompt {over} has {lengths[over]} tokens; with max_completion_length={params.max_completion_length} "
                f"that exceeds the model's context of {context} tokens. Drop long prompts or lower "
                "max_completion_length."
            )
    return token_ids


def _token_ids(prompt: Any, index: int, vocab_size: int) -> list[int]:
    """One prompt as a list of whole numbers in the vocabulary."""
    tokens = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(tokens, str) or not hasattr(tokens, "__len__"):
        raise UserError(
            f"prompt {index} is {tokens!r:.80}: prompts is a list with a list of token ids for each prompt. Text must "
            "be tokenized first, and a single prompt stands in a list of its own."
        )
    if len(tokens) == 0:
        raise UserError(f"prompt {index} is empty: every prompt needs at least one token.")
    check_tokens(tokens, vocab_size, f"prompt {index}")
    return [int(token) for token in tokens]


def check_tokens(tokens: Iterable[object], vocab_size: int, where: str) -> None:
    """Refuse ids that the model has no embedding of.

    Raises:
        ValueError: If there is one.
    """
    wrong = [token for token in tokens if not _is_token(token, vocab_size)]
    if wrong and isinstance(wrong[0], Integral) and int(wrong[0]) >= vocab_size:
        raise UserError(
            f"{where} holds token id {int(wrong[0])}, but the model has embeddings of 0 to {vocab_size - 1}. If tokens "
            "were added to the tokenizer, model.resize_token_embeddings(len(tokenizer)) adds theirs."
        )
    if wrong:
        raise UserError(
            f"{where} holds {wrong[0]!r}: prompts are lists of token ids, whole numbers from 0 to {vocab_size - 1}."
        )


def _is_token(token: object, vocab_size: int) -> bool:
    return isinstance(token, Integral) and 0 <= int(token) < vocab_size


def check_end_tokens(ids: Sequence[int] | Tensor, vocab_size: int, where: str = "end_token_ids") -> list[int]:
    """Refuse end tokens that can never be drawn.

    Raises:
        ValueError: If one is not in the vocabulary.
    """
    ids = ids.tolist() if isinstance(ids, Tensor) else ids
    wrong = [token for token in ids if not _is_token(token, vocab_size)]
    if wrong:
        hint = " Without end_token_ids they are those of the model's generation_config."
        raise UserError(
            f"{where} holds {wrong[0]!r}, which the model can never draw: end tokens are whole numbers from 0 to "
            f"{vocab_size - 1}.{hint if where == 'end_token_ids' else ''}"
        )
    return [int(token) for token in ids]


def default_end_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, tell: bool = True
) -> list[int]:
    """The end tokens of the model's generation config (or of its config), and the tokenizer's: both end a completion.

    A tokenizer of supervised training on a chat template often has another one than the model was published with. A
    warning names both if they differ.

    Raises:
        ValueError: If one of the generation config is not in the vocabulary.
    """
    config: Any = model.generation_config
    ids = None if config is None else config.eos_token_id
    ids = model.config.eos_token_id if ids is None else ids
    ids = [] if ids is None else [ids] if isinstance(ids, int | str) else ids
    vocab_size: int = model.config.vocab_size
    end_ids = check_end_tokens(ids, vocab_size, "eos_token_id of the model's generation_config")
    tokenizer_eos = None if tokenizer is None else tokenizer.eos_token_id
    if tokenizer is None or not _is_token(tokenizer_eos, vocab_size) or tokenizer_eos in end_ids:
        return end_ids
    if end_ids and tell:
        named = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in end_ids)
        warnings.warn(
            f"The model's generation_config ends completions with {named}, its tokenizer with {tokenizer.eos_token} "
            f"({tokenizer_eos}): either ends one, in rollouts and in what a warm-up teaches.",
            stacklevel=3,
        )
    return [*end_ids, cast(int, tokenizer_eos)]
