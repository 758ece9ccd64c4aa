"""Bodies of requests: hostile JSON to sampling parameters; what would change the text and is not honored is refused.

Names and defaults are vLLM's; other unknown fields are ignored, as there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rollout import SamplingParams
from sparse_rl_lightning.rollout.engine.requests import MOST_ENDS
from sparse_rl_lightning.rollout.prompts import with_tools

BODY_SECONDS = 30.0  # that a body may take to arrive
MOST_COMPLETIONS, MOST_STOPS, MOST_STOP_BYTES, MOST_PROMPTS = 64, 4, 256, 256
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},), "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,),
    "bad_words": ([],), "allowed_token_ids": ([],), "structured_outputs": (), "response_format": ({"type": "text"},),
    "use_beam_search": (False,), "best_of": (1,), "length_penalty": (1,), "truncate_prompt_tokens": (),
    "echo": (False,), "suffix": ("",), "chat_template": (), "documents": ([],), "functions": ([],),
    "prompt_embeds": (), "logits_processors": ([],),
    "tool_choice": ("auto", "none"), "parallel_tool_calls": (True,), "reasoning_effort": (),
    "thinking_token_budget": (), "features": (), "content_parts": (), "return_token_strs": (False,),
}  # fmt: skip
"""Fields that are not honored and would change what is drawn, and their values that would not, beside null."""


class BadRequest(UserError):
    """What is wrong with a request, as OpenAI's clients read it."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


def _parsed(text: str) -> Any:
    """What JSON holds; half of a surrogate pair, which cannot be tokenized nor sent back, is a ValueError."""
    value = json.loads(text)
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_json(content: bytes) -> dict[str, Any]:
    """The object that a body holds.

    Raises:
        BadRequest: If it is no JSON, too deeply nested, or no object.
    """
    try:
        body = _parsed(content.decode("utf-8-sig"))  # json.loads alone takes bytes of a lone surrogate
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is no JSON: {type(error).__name__}.") from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    return body


async def receive(request: Request, or_empty: bool = False) -> dict[str, Any]:
    """The object in the body of a request, once it has arrived; ``or_empty`` takes no body for an empty one.

    Raises:
        BadRequest: If it takes too long, or is none.
    """
    try:
        content = await asyncio.wait_for(request.body(), BODY_SECONDS)
        return read_json(content or b"{}" if or_empty else content)
    except TimeoutError:
        raise BadRequest(f"The body took more than {BODY_SECONDS:g} seconds.", status=408) from None


def value_or(body: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of a body, the default where it is missing or null, and only there."""
    value = body.get(name)
    return default if value is None else value


def number(body: Mapping[str, Any], name: str, default: Any, least: float, most: float, whole: bool = True) -> Any:
    """A number of a body, the default where it is missing or null.

    Raises:
        BadRequest: If it is none, not finite, or outside the limits.
    """
    value = body.get(name)
    if value is None:
        return default
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        expected = "an integer" if whole else "a number"
        raise BadRequest(f"{name} must be {expected} between {least:g} and {most:g}, got {value!r:.50}.", name)
    return value


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A switch of a body."""
    value = value_or(body, name, default)
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false, got {value!r:.50}.", name)
    return value


def token_ids(value: Any, name: str, vocabulary: int, most: int) -> list[int]:
    """A list of token ids.

    Raises:
        BadRequest: If it is none, or too long.
    """
    if isinstance(value, list) and len(value) > most:
        raise BadRequest(f"{name} may have {most} entries, got {len(value)}.", name)
    if not isinstance(value, list) or any(type(token) is not int or not 0 <= token < vocabulary for token in value):
        raise BadRequest(f"{name} must be a list of token ids from 0 to {vocabulary - 1}.", name)
    return value


@dataclass(frozen=True)
class Limits:
    """What a server allows."""

    max_length: int  # tokens of a prompt and its completion
    max_logprobs: int
    vocabulary: int
    max_text: int  # characters of a prompt

    def too_long(self, prompt: int, completion: int) -> BadRequest:
        """The error of a prompt and a completion that are too long, in words that clients look for."""
        return BadRequest(
            f"This model's maximum context length is {self.max_length} tokens. The prompt has {prompt} and max_tokens "
            f"is {completion}: shorten either.",
            "max_tokens",
        )


@dataclass(frozen=True)
class Wanted:
    """How a request wants to be drawn and answered."""

    params: SamplingParams  # its max_completion_length is that of an empty prompt
    end_token_ids: tuple[int, ...]
    max_tokens: int | None  # None for as many as fit
    logprobs: int | None = None  # number of most likely tokens beside the drawn one, None for no log-probs
    prompt_logprobs: int | None = None  # the same of the prompt's tokens
    echo: bool = False  # the prompt before its completion
    eviction_record: bool = False
    weight_versions: bool = False
    sample_support: bool = False
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    skip_special_tokens: bool = True
    include_stop: bool = False

    @property
    def scores(self) -> int | None:
        """Number of most likely tokens at each token of the prompt, None where no log-probs of it are wanted."""
        wanted = [count for count in (self.prompt_logprobs, self.logprobs if self.echo else None) if count is not None]
        return max(wanted, default=None)

    @property
    def is_text_alone(self) -> bool:
        """Whether nothing is wanted that is known at the end, or before the completion."""
        more = self.echo, self.eviction_record, self.weight_versions, self.sample_support, self.return_token_ids
        return self.logprobs is None and self.prompt_logprobs is None and not any(more)


def refuse_unhonored(body: Mapping[str, Any]) -> None:
    """Refuse what would change the text and is not honored.

    Raises:
        BadRequest: If there is anything.
    """
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise BadRequest(f"{name}={value!r:.80} is not supported: leave it out.", name)
    if guided := [name for name in body if name.startswith("guided_") and body[name] is not None]:
        raise BadRequest(f"{guided[0]:.80} is not supported: leave it out.", guided[0][:80])


def wanted(
    body: Mapping[str, Any], limits: Limits, end_token_ids: list[int], logprobs: int | None, echo: bool = False
) -> Wanted:
    """The sampling parameters of a body, checked.

    Args:
        body: Body of a request, or its ``sampling_params``.
        limits: What the server allows.
        end_token_ids: Those of the model.
        logprobs: Number of most likely tokens that the route asks for, None for no log-probabilities.
        echo: Whether the prompt is wanted before its completion.

    Raises:
        BadRequest: If a value is wrong, or not honored.
    """
    refuse_unhonored(body)
    most = limits.max_length
    max_tokens = number(body, "max_completion_tokens", number(body, "max_tokens", None, 1, 2**31), 1, 2**31)
    min_tokens = number(body, "min_tokens", 0, 0, max_tokens or most)
    stops = [] if body.get("stop") in (None, "") else body["stop"]
    stops = [stops] if isinstance(stops, str) else stops
    fine = isinstance(stops, list) and all(
        isinstance(s, str) and 0 < len(s.encode(errors="replace")) <= MOST_STOP_BYTES for s in stops
    )
    if not fine or len(stops) > MOST_STOPS:
        raise BadRequest(f"stop must be at most {MOST_STOPS} texts of 1 to {MOST_STOP_BYTES} bytes.", "stop")
    extra = token_ids(value_or(body, "stop_token_ids", []), "stop_token_ids", limits.vocabulary, MOST_ENDS)
    ends = tuple(dict.fromkeys([*([] if flag(body, "ignore_eos") else end_token_ids), *extra]))
    if len(ends) > MOST_ENDS:
        raise BadRequest(f"The model's end tokens and stop_token_ids are more than {MOST_ENDS}.", "stop_token_ids")
    top_k = max(0, number(body, "top_k", 0, -1, limits.vocabulary))
    support = flag(body, "return_sample_support")
    if support and not 1 < top_k <= limits.max_logprobs:
        raise BadRequest(f"return_sample_support needs top_k between 2 and {limits.max_logprobs}.", "top_k")
    params = SamplingParams(
        num_generations=number(body, "n", 1, 1, MOST_COMPLETIONS),
        max_completion_length=most,
        min_completion_length=min_tokens,
        temperature=float(number(body, "temperature", 1.0, 0, 1e6, whole=False)),
        top_k=top_k,
        top_p=float(number(body, "top_p", 1.0, 1e-9, 1, whole=False)),
        min_p=float(number(body, "min_p", 0.0, 0, 1, whole=False)),
        top_logprobs=max(logprobs or 0, top_k if support else 0),
        stop_strings=tuple(stops),
        seed=number(body, "seed", None, -(2**63), 2**63 - 1),
    )
    options = body.get("stream_options")
    wanted = Wanted(
        params, ends, max_tokens, logprobs,
        prompt_logprobs=number(body, "prompt_logprobs", None, 0, limits.max_logprobs), echo=echo,
        eviction_record=flag(body, "return_eviction_record"), weight_versions=flag(body, "return_weight_versions"),
        sample_support=support, stream=flag(body, "stream"),
        include_usage=isinstance(options, dict) and flag(options, "include_usage"),
        return_token_ids=flag(body, "return_token_ids"), tokens_as_ids=flag(body, "return_tokens_as_token_ids"),
        skip_special_tokens=flag(body, "skip_special_tokens", True),
        include_stop=flag(body, "include_stop_str_in_output"),
    )  # fmt: skip
    if wanted.stream and not wanted.is_text_alone:
        raise BadRequest(
            "Log-probs, ids, records, versions and prompts are not streamed: leave out stream, or these.",
            "stream",
        )
    return wanted


def prompts(body: Mapping[str, Any], limits: Limits) -> list[str | list[int]]:
    """The prompts of a completion: a text, several, token ids, or several lists of them.

    Raises:
        BadRequest: If they are none of these, or too many or too long.
    """
    sent = body.get("prompt")
    listed = sent if isinstance(sent, list) and sent and not isinstance(sent[0], int) else [sent]
    if len(listed) > MOST_PROMPTS:
        raise BadRequest(f"prompt may have {MOST_PROMPTS} prompts, got {len(listed)}.", "prompt")
    checked: list[str | list[int]] = []
    for prompt in listed:
        if isinstance(prompt, str) and prompt:
            checked.append(text(prompt, "prompt", limits))
        elif isinstance(prompt, list) and prompt:
            checked.append(token_ids(prompt, "prompt", limits.vocabulary, limits.max_length))
        else:
            raise BadRequest(
                "prompt must be a text or a list of token ids that is not empty, or a list of such.", "prompt"
            )
    return checked


def text(value: str, name: str, limits: Limits) -> str:
    """A text that is not too long to be tokenized.

    Raises:
        BadRequest: If it is.
    """
    if len(value) > limits.max_text:
        raise BadRequest(f"{name} may have {limits.max_text} characters, got {len(value)}.", name)
    return value


def messages(body: Mapping[str, Any], limits: Limits) -> list[dict[str, Any]]:
    """The chat messages of a body, with contents of null as empty texts and arguments of calls as objects.

    Raises:
        BadRequest: If they are no list of messages, or too long, or the last is the assistant's and is not continued.
    """
    sent = body.get("messages")
    if not isinstance(sent, list) or not sent or not all(isinstance(message, dict) for message in sent):
        raise BadRequest("messages must be a list of objects that is not empty.", "messages")
    text(json.dumps([sent, body.get("tools")]), "messages", limits)
    goes_on = flag(body, "continue_final_message")
    if (sent[-1].get("role") == "assistant") != goes_on or flag(body, "add_generation_prompt", not goes_on) == goes_on:
        raise BadRequest(
            "A last message of the assistant is continued: it needs continue_final_message=true and "
            "add_generation_prompt=false, which go with no other.",
            "messages",
        )
    return [_message(message) for message in sent]


def template_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for the chat template, tools among them.

    Raises:
        BadRequest: If there is anything but scalars, or tools that are no objects.
    """
    options, tools = value_or(body, "chat_template_kwargs", {}), value_or(body, "tools", [])
    scalar = (str, int, float, bool, type(None))
    if not isinstance(options, dict) or len(options) > 16 or not all(isinstance(v, scalar) for v in options.values()):
        raise BadRequest("chat_template_kwargs must be an object of at most 16 scalars.", "chat_template_kwargs")
    if forbidden := [name for name in options if name in ("chat_template", "tools", "documents") or len(name) > 64]:
        raise BadRequest(f"chat_template_kwargs may not have {forbidden[0]:.64}.", "chat_template_kwargs")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRequest("tools must be a list of objects.", "tools")
    return with_tools(options, tools)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    read = {**message, "content": "" if message.get("content") is None else message["content"]}
    calls = message.get("tool_calls")
    if calls is None:
        return read
    try:
        read["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"])}}
            for call in calls
        ]
    except (TypeError, KeyError, ValueError, RecursionError):
        raise BadRequest("tool_calls of a message must have a function with name and arguments.", "messages") from None
    return read


def _arguments(value: Any) -> Any:
    """A call's arguments as templates want them; OpenAI's clients send JSON in a string."""
    return _parsed(value or "{}") if isinstance(value, str) else value
