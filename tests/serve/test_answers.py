"""Texts that are streamed are the whole text, whatever tokens it comes in; calls are told from text."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sparse_rl_lightning.rollout import SamplingParams
from sparse_rl_lightning.serve.answers import TextStream, finished_text, message
from sparse_rl_lightning.serve.bodies import Wanted
from sparse_rl_lightning.testing import character_tokenizer

STORIES = Path(os.environ.get("SPARSE_RL_STORIES", Path(__file__).parents[3] / "shared/models/stories260K"))
TOKENIZERS: dict[str, Any] = {"characters": character_tokenizer()}
if STORIES.is_dir():
    TOKENIZERS["sentencepiece, with bytes"] = AutoTokenizer.from_pretrained(STORIES)


def wanted(*stops: str, **more: Any) -> Wanted:
    return Wanted(SamplingParams(stop_strings=stops), (), None, **more)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(3, 90), max_size=40), steps=st.lists(st.integers(1, 9), max_size=40))
@example(ids=[3 + byte for byte in "wörter, \u5b57 and \U0001f600 too".encode()], steps=[1] * 40)
def test_pieces_are_the_whole_text(name: str, ids: list[int], steps: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    stream, sent, at = TextStream(wanted(), tokenizer), "", 0
    whole = finished_text(ids, "length", wanted(), tokenizer)
    for step in steps:
        at = min(len(ids), at + step)
        piece = stream.add(ids[:at])
        assert not piece.endswith("\ufffd") or whole.startswith(sent + piece)
        sent += piece
    sent += stream.rest(whole)
    assert sent == whole


@pytest.mark.skipif(len(TOKENIZERS) < 2, reason="needs the model of stories")
def test_a_completion_goes_on_where_its_prompt_ends() -> None:
    """Decoders of this family strip the space of the first token."""
    tokenizer = TOKENIZERS["sentencepiece, with bytes"]
    ids = tokenizer("Once upon a time, there was a w\u00f6rd")["input_ids"]
    prompt, rest, inside = ids[:6], ids[6:], tokenizer("w\u00f6")["input_ids"][:-1]
    assert tokenizer.decode(prompt, skip_special_tokens=True) == "Once upon a time,"
    assert finished_text(rest, "length", wanted(), tokenizer, prompt) == " there was a w\u00f6rd"
    assert finished_text(rest[:1], "stop_string", wanted(" there"), tokenizer, prompt) == ""
    stream = TextStream(wanted(), tokenizer, prompt)
    assert [stream.add(rest[:count]) for count in (1, 2)] == [" there", " was"]
    assert finished_text(rest[:1], "length", wanted(), tokenizer, inside) == "there"  # inside a character


def test_nothing_of_a_stop_string_is_sent() -> None:
    tokenizer = TOKENIZERS["characters"]
    asked, text = wanted("END", "stop"), "a sto E ENE EN stop"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream, pieces = TextStream(asked, tokenizer), []
    for count in range(1, len(ids)):  # the end is told with the last token
        pieces.append(stream.add(ids[:count]))
    whole = finished_text(ids, "stop_string", asked, tokenizer)
    assert whole == "a sto E ENE EN "
    assert "".join(pieces) + stream.rest(whole) == whole
    assert finished_text(ids, "stop_string", wanted("END", "stop", include_stop=True), tokenizer) == text
    assert len([piece for piece in pieces if piece]) > 5


def completion(text: str, reason: str = "stop") -> Any:
    return SimpleNamespace(text=text, reason=reason)


def test_calls_are_told_from_text() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
    answer, reason = message(completion(f"Let me see. {call}{call}"), with_tools=True)
    assert (answer["content"], reason) == ("Let me see.", "tool_calls")
    assert [each["function"]["name"] for each in answer["tool_calls"]] == ["add", "add"]
    (half,) = message(completion(call.replace("1}", '"\\ud83d"}')), with_tools=True)[0]["tool_calls"]
    assert json.loads(half["function"]["arguments"]) == {"x": "\ufffd"}, "half of a pair could not be sent back"
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"x": 1}
    assert len({each["id"] for each in answer["tool_calls"]}) == 2
    for text in ("None.", "<tool_call>{broken</tool_call>", f"<think>{call}</think>No."):
        assert message(completion(text), with_tools=True) == ({"role": "assistant", "content": text}, "stop")
    assert message(completion(call), with_tools=False)[0]["content"] == call
    assert message(completion(call, "length"), with_tools=True)[1] == "length"
    assert message(completion(call), with_tools=True)[0]["content"] is None
