"""Observations to the token ids that a policy reads after its turn.

The turn stays as it was drawn, thoughts included, also where a chat template would write it in another way.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from sparse_rl_lightning.environments.base import Observation
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rollout.prompts import valid_messages, valid_unicode

_TURN, _CONTENT, _BREAK = (secrets.token_hex(16) for _ in range(3))  # marks that no observation can know
_MARGIN = 64
"""Tokens by which a text must be too long for any longer one to be so too: a character more can merge several."""
_Render: TypeAlias = Callable[[list[dict[str, Any]], bool], str]  # messages, and whether the assistant's turn follows


def encode_observation(
    tokenizer: PreTrainedTokenizerBase,
    observation: Observation,
    *,
    is_chat: bool,
    end_token: int | None = None,
    template: Mapping[str, Any] | None = None,
) -> list[int]:
    """Encode what the policy reads between its turn and its next one.

    After a prompt of text the observation is text and stands as it is: special tokens written out in it are
    recognized, as in such prompts. After a prompt of chat messages it goes through the tokenizer's chat template, from
    the end of the assistant's message up to where its next one begins; special tokens written out in it are plain
    text, since what tools find is hostile.

    Args:
        tokenizer: Tokenizer of the policy.
        observation: Text, or chat messages.
        is_chat: Whether the prompt was chat messages.
        end_token: End token with which the turn ended, which is not repeated; None if a stop string or a limit ended
            it, and what the template ends it with is written behind it.
        template: More arguments for the chat template.

    Returns:
        Token ids, at least one.

    Raises:
        ValueError: If the observation is empty or malformed, or is messages after a prompt of text, or the template
            refuses it or leaves some of it out.
    """
    if is_chat:
        special = _special_tokens(tokenizer)
        render = partial(_rendered, tokenizer, template or {})
        suffix = _behind_turn(render, _as_messages(observation, special), special)
        ids = [token for text in suffix.split(_BREAK) for token in encode_behind(tokenizer, text)]
        return ids[1:] if ids[:1] == [end_token] else ids
    if not isinstance(observation, str):
        raise UserError(
            "the observation is a list of chat messages, but the prompt is text: answer with text, or give the prompt "
            "as chat messages (as_chat of JsonlPrompts)."
        )
    if not observation:
        raise UserError("empty observation: after a prompt of text it adds nothing. Return None to end, or some text.")
    return encode_behind(tokenizer, observation)


def cut_observation(tokenizer: PreTrainedTokenizerBase, observation: Observation, most: int) -> Observation:
    """The observation, with its text cut after the last character that fits into ``most`` tokens.

    Those of the chat template do not count. Messages are filled in order; what follows has empty contents.

    Raises:
        ValueError: If a message has no role, or no content that is text.
    """
    if isinstance(observation, str):
        return _first_tokens(tokenizer, observation, most)
    valid_messages(observation)
    cut = []
    for message in observation:
        content = _first_tokens(tokenizer, message["content"], most)
        most -= _length(tokenizer, content)
        cut.append(message | {"content": content})
    return cut


def _first_tokens(tokenizer: PreTrainedTokenizerBase, text: str, most: int) -> str:
    # most texts are as long as a few characters per token say: what lies far behind is never encoded
    far = 4 * most + _MARGIN
    while far < len(text) and _length(tokenizer, text[:far]) <= most + _MARGIN:
        far *= 2
    if far >= len(text) and _length(tokenizer, text) <= most:
        return text

    def tokens(end: int) -> int:
        return most + 1 if end >= far else _length(tokenizer, text[:end])

    return text[: bisect_right(range(1, len(text)), most, key=tokens)]


def _length(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    return len(encode_behind(tokenizer, text))


def encode_behind(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode text that follows other text, where no tokenizer prepends a space or a special token."""
    before, text = "\x01", valid_unicode(text)  # which merges with nothing
    head, ids = (tokenizer(string, add_special_tokens=False)["input_ids"] for string in (before, before + text))
    if ids[: len(head)] == head:
        return list(ids[len(head) :])
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


# -------------------------------------------------------------------- chat templates


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches the first character of each special token, also where two overlap."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts = "|".join(map(re.escape, sorted(added | set(tokenizer.all_special_tokens))))
    return re.compile(rf"(?=(?:{texts}))." if texts else r"(?!)", re.DOTALL)


def _as_messages(observation: Observation, special: re.Pattern[str]) -> list[dict[str, Any]]:
    """The observation as chat messages in which every special token is broken in two."""
    messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    if not messages:
        raise UserError("empty observation: the list of chat messages is empty. Return None to end the conversation.")
    return [
        {
            key: special.sub(rf"\g<0>{_BREAK}", valid_unicode(value)) if isinstance(value, str) else value
            for key, value in message.items()
        }
        for message in valid_messages(messages)
    ]


def _rendered(
    tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any], messages: list[dict[str, Any]], goes_on: bool
) -> str:
    """Messages behind one of the user, as the template writes them."""
    whole = [{"role": "user", "content": "dummy"}, *messages]
    return str(tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=goes_on, **template))


def _behind_turn(render: _Render, messages: list[dict[str, Any]], special: re.Pattern[str]) -> str:
    """What the template writes behind an assistant's message that is answered with these messages.

    Raises:
        ValueError: If the template refuses the messages, or leaves some of them out.
    """
    marked = [message | {"content": _CONTENT} for message in messages]
    answers_calls = any(message["role"] == "tool" for message in messages)
    refusal = "it leaves some of them out"
    for write in (_behind_calls, _behind_text) if answers_calls else (_behind_text,):
        try:
            if write(render, marked, special).count(_CONTENT) >= len(messages):
                return write(render, messages, special)
        except Exception as error:  # templates raise any exception, e.g. for roles that do not alternate
            refusal = str(error)
    raise UserError(
        f"the chat template cannot write the observation {messages!r:.200}, since {refusal}. Answer with text, or with "
        "roles and keys that the template knows, or set the tokenizer's chat_template."
    )


def _behind_text(render: _Render, messages: list[dict[str, Any]], _: re.Pattern[str]) -> str:
    """What follows an assistant's text."""
    return render([{"role": "assistant", "content": _TURN}, *messages], True).partition(_TURN)[2]


def _behind_calls(render: _Render, messages: list[dict[str, Any]], special: re.Pattern[str]) -> str:
    """What follows an assistant's tool calls, from their last special token on; empty where that cannot be found."""
    calls = [
        {
            "type": "function",
            "id": message.get("tool_call_id"),
            "function": {"name": message.get("name"), "arguments": {"x": _TURN}},
        }
        for message in messages
        if message["role"] == "tool"
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    before, whole = render([turn], False), render([turn, *messages], True)
    ends = [match.start() for match in special.finditer(before, before.rfind(_TURN))]
    return whole[ends[-1] :] if ends and whole.startswith(before) else ""
