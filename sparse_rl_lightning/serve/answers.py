"""Answers: completions as OpenAI's and vLLM's clients read them, with text before the end where it is streamed."""

from __future__ import annotations

import base64
import json
import math
import uuid
from collections.abc import Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sparse_rl_lightning.environments.tools import found_calls
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout.engine.finished import CONTEXT
from sparse_rl_lightning.rollout.engine.requests import Ending
from sparse_rl_lightning.rollout.prompts import valid_unicode
from sparse_rl_lightning.rollout.requests import CompletedRequest
from sparse_rl_lightning.serve.bodies import Wanted
from sparse_rl_lightning.serve.scoring import TokenScore

UNDECIDED = 16  # tokens without a whole character, which a character never has
REASONS: dict[Ending, str] = {"end_token": "stop", "stop_string": "stop", "length": "length", "canceled": "abort"}


class Completion:
    """One completion of a request, for any route.

    Args:
        completed: The request, None if nothing of it was drawn.
        row: Which of its completions; one that is not there was canceled before it began.
        wanted: How it is to be answered.
        tokenizer: Tokenizer of the policy.
        prompt: Token ids of its prompt.
        scores: Those of the prompt, if they are wanted.
    """

    def __init__(
        self,
        completed: CompletedRequest | None,
        row: int,
        wanted: Wanted,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int] = (),
        scores: Sequence[TokenScore] | None = None,
    ) -> None:
        self.wanted, self.tokenizer, self.row, self.prompt, self.scores = wanted, tokenizer, row, list(prompt), scores
        self.rollout: Rollout | None = None
        self.ids, self.text, self.reason = list[int](), "", "abort"
        if completed is None or row >= len(completed.endings):
            return
        self.rollout, self.version_names = completed.rollout, completed.version_names
        ending = completed.endings[row]
        self._is_drawn = self.rollout.completion_mask[row]
        self.ids, self.reason = self.rollout.sequences[row, self._is_drawn].tolist(), REASONS[ending]
        self.text = finished_text(self.ids, ending, wanted, tokenizer, self.prompt)

    def _of(self, log: Tensor) -> Any:
        """What a log has for each token."""
        return log[self.row, self._is_drawn.to(log.device)].tolist()

    def logprobs(self) -> list[tuple[int, float, list[tuple[int, float]]]]:
        """Each token, its log-probability and the most likely ones, under the distribution that was drawn from."""
        rollout, count = self.rollout, self.wanted.logprobs or 0
        if rollout is None:
            return []
        sampler, top = self._of(rollout.sampler_logprobs), [list[tuple[int, float]]() for _ in self.ids]
        drawn = sampler if rollout.behavior_logprobs is None else self._of(rollout.behavior_logprobs)
        if count and rollout.topk_ids is not None and rollout.topk_logprobs is not None:
            ids, logprobs = self._of(rollout.topk_ids), self._of(rollout.topk_logprobs)
            support = [0] * len(ids) if rollout.support is None else self._of(rollout.support)
            for at, (left, b, s) in enumerate(zip(support, drawn, sampler, strict=True)):
                most = min(count, left or count)  # truncation leaves so many, and makes all of them likelier by as much
                top[at] = [(i, p + b - s) for i, p in zip(ids[at][:most], logprobs[at][:most], strict=True)]
        return list(zip(self.ids, drawn, top, strict=True))

    def name(self, token: int) -> str:
        """A token in a list of log-probabilities."""
        return f"token_id:{token}" if self.wanted.tokens_as_ids else str(self.tokenizer.decode([token]))

    def completion_logprobs(self) -> dict[str, Any] | None:
        """Log-probabilities as ``/v1/completions`` has them."""
        if self.wanted.logprobs is None:
            return None
        rows: list[tuple[int, float | None, list[tuple[int, float]]]] = [*self.logprobs()]
        if self.wanted.echo and self.scores is not None:
            of_prompt = [(score.token, score.logprob, score.top[: self.wanted.logprobs]) for score in self.scores]
            rows = [(self.prompt[0], None, []), *of_prompt, *rows]
        offsets, length = [], 0
        for token, *_ in rows:
            offsets.append(length)
            length += len(self.name(token))
        return {
            "tokens": [self.name(token) for token, *_ in rows],
            "token_logprobs": [None if logprob is None else finite(logprob) for _, logprob, _ in rows],
            "top_logprobs": [
                None if logprob is None else {self.name(i): finite(p) for i, p in [*top, (token, logprob)]}
                for token, logprob, top in rows
            ],
            "text_offset": offsets,
        }

    def chat_logprobs(self, in_ids: bool = False) -> dict[str, Any] | None:
        """Log-probabilities as ``/v1/chat/completions`` has them; ``in_ids`` as ``/inference/v1/generate``."""
        if self.wanted.logprobs is None:
            return None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            if in_ids:  # both spellings that vLLM's versions have had
                return {"token": f"token_id:{token}", "token_id": token, "logprob": finite(logprob)}
            name = self.name(token)
            return {"token": name, "logprob": finite(logprob), "bytes": list(name.encode())}

        content = [
            entry(token, logprob) | {"top_logprobs": [entry(i, p) for i, p in top]}
            for token, logprob, top in self.logprobs()
        ]
        return {"content": content}

    def weight_versions(self) -> list[dict[str, Any]]:
        """The weights that drew the tokens: spans of a version, as vLLM has them."""
        if self.rollout is None or self.rollout.policy_versions is None:
            return []
        numbers, spans, start = self._of(self.rollout.policy_versions), list[dict[str, Any]](), 0
        for number, tokens in groupby(numbers):
            end = start + len(list(tokens))
            spans.append({"version": self.version_names[number], "start": start, "end": end})
            start = end
        return spans

    def sample_support(self) -> dict[str, Any]:
        """The tokens that truncation left at each position: int32 (T, top_k), padded with -1."""
        width, rollout = self.wanted.params.top_k, self.rollout
        if rollout is None or rollout.topk_ids is None or rollout.support is None:
            return {"data": "", "shape": [0, width], "dtype": "int32"}
        counts = np.array(self._of(rollout.support), dtype=np.int32)
        ids = np.array(self._of(rollout.topk_ids), dtype=np.int32).reshape(len(counts), -1)[:, :width]
        ids[np.arange(width) >= counts[:, None]] = -1
        return {"data": base64.b64encode(ids.tobytes()).decode(), "shape": list(ids.shape), "dtype": "int32"}


def prompt_logprobs(
    scores: Sequence[TokenScore] | None, wanted: Wanted, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any] | None] | None:
    """Log-probabilities of a prompt as all of vLLM's routes have them: by token id, the first token without."""
    if wanted.prompt_logprobs is None or scores is None:
        return None
    decoded = cache(lambda token: tokenizer.decode([token]))

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": decoded(token)}

    return [
        None,
        *(
            {
                str(token): entry(token, p, rank)
                for rank, (token, p) in enumerate(score.top[: wanted.prompt_logprobs], 1)
            }
            | {str(score.token): entry(score.token, score.logprob, score.rank)}
            for score in scores
        ),
    ]


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, -9999.0) if not math.isnan(logprob) else -9999.0


def context_of(prompt: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The end of a prompt, to be decoded before its completion: decoders strip the space that a text begins with.

    None of it if the prompt ends inside a character.
    """
    end = list(prompt[-CONTEXT:])
    return [] if str(tokenizer.decode(end)).endswith("\ufffd") else end


def finished_text(
    ids: list[int], ending: Ending, wanted: Wanted, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = ()
) -> str:
    """The text of tokens behind a prompt, without the end token or stop string that ended them unless it is wanted."""
    context = context_of(prompt, tokenizer)
    decode = partial(tokenizer.decode, skip_special_tokens=wanted.skip_special_tokens)
    start = len(decode(context))

    def decoded(tokens: list[int]) -> str:
        return str(decode([*context, *tokens])[start:])

    if ending == "end_token" and not wanted.include_stop:
        ids = ids[:-1]
    text = decoded(ids)
    if ending != "stop_string":
        return text
    before = len(decoded(ids[:-1]).rstrip("\ufffd"))  # the last token completes it
    stops = wanted.params.stop_strings
    places = [(at, at + len(stop)) for stop in stops if (at := text.find(stop, max(0, before - len(stop) + 1))) >= 0]
    if not places:  # of bytes that decode otherwise alone
        return text
    return text[: min(end for _, end in places) if wanted.include_stop else min(at for at, _ in places)]


class TextStream:
    """The text of a completion that is still being drawn, piece by piece.

    Held back is what may still change: half a character, an end token, and the beginning of a stop string.

    Args:
        wanted: How the completion is to be answered.
        tokenizer: Tokenizer of the policy.
        prompt: Token ids that stand before the completion.
    """

    def __init__(self, wanted: Wanted, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = ()) -> None:
        self.wanted, self.tokenizer = wanted, tokenizer
        self._text, self._num_sent = "", 0
        self._context = context_of(prompt, tokenizer)
        # tokens whose text is known, of which those from the first on are decoded again
        self._first, self._last = 0, len(self._context)

    def add(self, ids: list[int]) -> str:
        """The new piece of text, given all tokens so far of a completion that has not ended."""
        if ids and ids[-1] in self.wanted.end_token_ids:
            ids = ids[:-1]
        ids = [*self._context, *ids]
        before, now = self._decode(ids[self._first : self._last]), self._decode(ids[self._first :])
        if not now.endswith("\ufffd") or len(ids) - self._last > UNDECIDED:
            self._text += now[len(before) :]
            self._first, self._last = self._last, len(ids)
        return self._sent(len(self._text) - self._held())

    def rest(self, text: str) -> str:
        """The last piece, given the whole text."""
        self._text = text
        return self._sent(len(text))

    def _sent(self, end: int) -> str:
        piece, self._num_sent = self._text[self._num_sent : end], max(self._num_sent, end)
        return piece

    def _held(self) -> int:
        """How many characters at the end could begin a stop string; a complete one was drawn too early to count."""
        stops = self.wanted.params.stop_strings
        return max((n for stop in stops for n in range(1, len(stop)) if self._text.endswith(stop[:n])), default=0)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=self.wanted.skip_special_tokens))


def message(completion: Completion, with_tools: bool) -> tuple[dict[str, Any], str]:
    """The assistant's message of a completion, its calls taken out if there are tools, and why it ended."""
    calls_at = [(call, span) for call, span in found_calls(completion.text) if call.error is None] if with_tools else []
    if not calls_at:
        return {"role": "assistant", "content": completion.text}, completion.reason
    calls = [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "index": index,
            "type": "function",
            "function": {
                "name": valid_unicode(call.name),
                "arguments": valid_unicode(json.dumps(call.arguments, ensure_ascii=False)),
            },
        }
        for index, (call, _) in enumerate(calls_at)
    ]
    text = completion.text
    for _, (first, last) in reversed(calls_at):
        text = text[:first] + text[last:]
    answer = {"role": "assistant", "content": text.strip() or None, "tool_calls": calls}
    return answer, "tool_calls" if completion.reason == "stop" else completion.reason


def usage(prompts: Sequence[Sequence[int]], completed: Sequence[CompletedRequest | None]) -> dict[str, int]:
    """Numbers of tokens."""
    read = sum(map(len, prompts))
    drawn = sum(int(done.rollout.completion_mask.sum()) for done in completed if done is not None)
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}
