"""Conversations: multi-turn episodes of a session's sequences with environments, each going on as its turn is over.

While environments think, the other sequences are decoded; what is answered enters the slots, that of several sequences
together. A rollout of one version of the policy does not depend on how long an environment takes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from sparse_rl_lightning.environments.base import Environment, EnvironmentFactory, Observation
from sparse_rl_lightning.environments.calls import Call, CallFailure, CallTimeout, start, wait_for_any
from sparse_rl_lightning.environments.tools import ToolEnvironment
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.records import Conversation, Rollout, Rows
from sparse_rl_lightning.rewards.base import undisturbed, users_function
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams
from sparse_rl_lightning.rollout.engine.scheduler import Progress
from sparse_rl_lightning.rollout.observations import cut_observation, encode_observation
from sparse_rl_lightning.rollout.options import RolloutOptions
from sparse_rl_lightning.rollout.prompts import Prompt, decode_texts, encode_prompt, valid_messages, with_tools
from sparse_rl_lightning.rollout.sampler import RolloutSampler
from sparse_rl_lightning.rollout.session import RolloutSession
from sparse_rl_lightning.text import shown


@dataclass
class Episode:
    """A conversation under way."""

    environment: Environment
    conversation: Conversation
    is_chat: bool = False  # the prompt is chat messages
    end_token: int | None = None  # with which the last turn ended


@dataclass
class Opening:
    """Prompts of environments, and their conversations, prompt by prompt."""

    rows: Rows  # with their prompts
    prompts: list[list[int]]  # token ids
    episodes: list[Episode]


class Conversations:
    """The conversations of a session's sequences with their environments.

    Args:
        factory: Creates the environment of a sequence.
        options: Limits of turns, arguments of the chat template, and how turns are decoded.
        tokenizer: Tokenizer of the policy.
    """

    def __init__(
        self, factory: EnvironmentFactory, options: RolloutOptions, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.factory, self.tokenizer, self.limits = factory, tokenizer, options.turns
        self.template, self.skip_special_tokens = options.chat_template_kwargs or {}, options.skip_special_tokens
        self.episodes: dict[int, Episode] = {}  # by sequence, until its prompt is taken
        self.calls: dict[int, Call] = {}  # by sequence, turns that are being answered
        self.ending: dict[int, str] = {}  # by sequence, why it ends, while its environment computes the reward
        self.session: RolloutSession  # whose sequences converse, once open() was called

    # ---------------------------------------------------------------- from the first prompt to the last turn

    @undisturbed()
    def begin(self, rows: Rows, num_generations: int) -> Opening:
        """Begin ``num_generations`` conversations about each row.

        Raises:
            ValueError: If two conversations have the same environment, environments do not give all samples of a row
                the same prompt, or a row has none.
        """
        repeated = [row for row in rows for _ in range(num_generations)]
        episodes = [Episode(self.factory(), Conversation(row)) for row in repeated]
        self._check_environments(episodes)
        calls = [  # each with a copy of its row, which samples and epochs share
            start(episode.environment.reset, copy.deepcopy(episode.conversation.row), timeout=self.limits.timeout)
            for episode in episodes
        ]
        replies = [_prompt_of(episode, call) for episode, call in zip(episodes, calls, strict=True)]
        opened, encoded = list[dict[str, Any]](), list[list[int]]()
        for number, row in enumerate(rows):
            samples = slice(number * num_generations, (number + 1) * num_generations)
            prompt = _common_prompt(replies[samples], row, [episode.conversation for episode in episodes[samples]])
            for episode in episodes[samples]:
                episode.is_chat = not isinstance(prompt, str)
            template = with_tools(self.template, episodes[samples.start].environment.tools)
            encoded.append(encode_prompt(self.tokenizer, prompt, template))
            opened.append(row | {"prompt": prompt})
        return Opening(opened, encoded, episodes)

    def open(
        self, sampler: RolloutSampler, params: SamplingParams, max_prompt_length: int, num_sequences: int | None = None
    ) -> RolloutSession:
        """Open the session of the conversations; arguments are those of ``RolloutSession``."""
        self.session = RolloutSession(
            sampler, params, max_prompt_length, turns=True, max_turn_length=self.limits.max_turn_length,
            num_sequences=num_sequences,
        )  # fmt: skip
        return self.session

    def add(self, opening: Opening, sequence_ids: Sequence[int]) -> range:
        """Queue the prompts of an opening in the session; returns the prompts' numbers."""
        numbers = self.session.add(opening.prompts, sequence_ids)
        first = numbers.start * self.session.params.num_generations
        self.episodes |= dict(enumerate(opening.episodes, first))
        return numbers

    @undisturbed()
    def advance(
        self,
        max_steps: int | None = None,
        *,
        until: Callable[[], bool] | None = None,
        progress: Callable[[Progress], None] | None = None,
        new_weights: bool = False,
    ) -> None:
        """Decode and answer; arguments are those of the session. At the end no environment is being waited for."""
        session = self.session
        stop = None if max_steps is None else session.scheduler.num_steps + max_steps

        def is_over() -> bool:
            return stop is not None and session.scheduler.num_steps >= stop and (until is None or until())

        while True:
            self._ask()
            self._answer()
            if is_over() or not (session.scheduler.has_unfinished or self.calls):
                break
            if session.scheduler.has_unfinished:
                session.advance(
                    0, until=lambda: is_over() or self._has_news, progress=progress, new_weights=new_weights
                )
                new_weights = False
            else:
                wait_for_any(self.calls.values())
        while self.calls:
            wait_for_any(self.calls.values())
            self._answer()

    def take(self, prompts: Sequence[int]) -> tuple[Rollout, list[Conversation]]:
        """Remove complete prompts, as the session does; with their conversations."""
        count = self.session.params.num_generations
        episodes = [self.episodes.pop(number * count + sample) for number in prompts for sample in range(count)]
        return self.session.take(prompts), [episode.conversation for episode in episodes]

    # ---------------------------------------------------------------- turns

    @property
    def _has_news(self) -> bool:
        """Whether a turn has ended, or was answered."""
        waiting = self.session.waiting_turns
        return any(sequence not in self.calls or self.calls[sequence].is_over for sequence in waiting)

    def _ask(self) -> None:
        """Hand the turns that have just ended to their environments."""
        for sequence in [sequence for sequence in self.session.waiting_turns if sequence not in self.calls]:
            episode = self.episodes[sequence]
            if episode.conversation.has_failed:  # at its beginning
                self._end(sequence, episode.conversation.end)
                continue
            tokens = self.session.turn(sequence)
            ends = self.session.sampler.end_token_ids
            (text,) = decode_texts(self.tokenizer, [tokens], ends, self.skip_special_tokens)
            episode.conversation.messages.append({"role": "assistant", "content": text})
            episode.conversation.num_turns += 1
            episode.conversation.cut_turns += self.session.was_cut(sequence)
            episode.end_token = tokens[-1] if tokens[-1] in self.session.sampler.end_token_ids else None
            self.calls[sequence] = start(episode.environment.step, text, timeout=self.limits.timeout)

    def _answer(self) -> None:
        """Append the observations of environments that have answered, and end conversations that are over."""
        for sequence in [sequence for sequence, call in self.calls.items() if call.is_over]:
            call, episode = self.calls.pop(sequence), self.episodes[sequence]
            is_last = sequence in self.ending
            try:
                answer = (None, call.result()) if is_last else call.result()
                observation, episode.conversation.reward = _checked(answer, episode.conversation.reward)
            except CallFailure as failure:
                where = "" if failure.__cause__ else users_function(call.function)
                self._fail(sequence, failure, where)
                continue
            if observation is None:
                self._end(sequence, self.ending.pop(sequence, "environment"))
            elif episode.conversation.num_turns >= self.limits.max_turns:
                self._cut(sequence, "turns")
            else:
                self._give(sequence, episode, observation)

    def _give(self, sequence: int, episode: Episode, observation: Observation) -> None:
        """Append an observation, truncated if need be; without room for it the conversation ends."""
        most, room = self.limits.max_observation_length, self.session.room(sequence)
        try:
            observation = observation if isinstance(observation, str) else valid_messages(observation)
            shortened = cut_observation(self.tokenizer, observation, room if most is None else most)
            if most is None and shortened != observation:
                self._cut(sequence, "length")
                return
            tokens = encode_observation(
                self.tokenizer, shortened, is_chat=episode.is_chat, end_token=episode.end_token, template=self.template
            )
        except UserError as error:
            self._fail(sequence, CallFailure(f"answered what cannot be read: {error}"))
            return
        if len(tokens) > room:
            self._cut(sequence, "length")
            return
        self.session.append(sequence, tokens)
        episode.conversation.cut_observations += shortened != observation
        if isinstance(shortened, str):
            shortened = [{"role": "user" if episode.is_chat else "environment", "content": shortened}]
        for message in shortened:
            episode.conversation.messages.append({name: str(message[name]) for name in ("role", "content")})

    def _fail(self, sequence: int, failure: CallFailure, where: str = "") -> None:
        _note_failure(self.episodes[sequence], failure, where)
        self.ending.pop(sequence, None)
        self._end(sequence, self.episodes[sequence].conversation.end)

    def _cut(self, sequence: int, why: str) -> None:
        """Request the environment's reward, and end the conversation after it."""
        self.ending[sequence] = why
        self.calls[sequence] = start(self.episodes[sequence].environment.cut, timeout=self.limits.timeout)

    def _end(self, sequence: int, why: str) -> None:
        episode = self.episodes[sequence]
        episode.conversation.end = why
        self.session.finish(sequence, cut=why in ("turns", "length"))
        if type(episode.environment).close is not Environment.close:
            start(episode.environment.close, timeout=self.limits.timeout)  # nobody waits for it

    # ---------------------------------------------------------------- beginnings

    def _check_environments(self, new: Sequence[Episode]) -> None:
        """Refuse conversations that share their environment, or its object, with others that are not over.

        Raises:
            ValueError: If two do.
        """
        running = [e.environment for e in (*self.episodes.values(), *new) if not e.conversation.end]
        inside = [environment.environment for environment in running if isinstance(environment, ToolEnvironment)]
        for owners in (running, [owner for owner in inside if owner is not None]):
            if len(set(map(id, owners))) < len(owners):
                raise UserError(
                    f"environment gives several conversations the same {type(owners[0]).__name__}: their turns would "
                    "mix. Create a new object in every call, such as by giving the class itself."
                )


def converse(
    sampler: RolloutSampler,
    conversations: Conversations,
    rows: Rows,
    params: SamplingParams,
    sequence_ids: Sequence[int],
    progress: Callable[[Progress], None] | None = None,
) -> tuple[Rows, Rollout, list[Conversation]]:
    """Draw whole conversations about these rows; returns the rows with their prompts too.

    Arguments are as in :meth:`~sparse_rl_lightning.rollout.RolloutSampler.generate`.
    """
    opening = conversations.begin(rows, params.num_generations)
    conversations.open(sampler, params, max(map(len, opening.prompts)), num_sequences=len(opening.episodes))
    numbers = conversations.add(opening, sequence_ids)
    try:
        conversations.advance(progress=progress, new_weights=True)
        rollout, finished = conversations.take(list(numbers))
    finally:
        if not sampler.keep_pool:
            sampler.release()
    return opening.rows, rollout, finished


def check_not_all_failed(conversations: Sequence[Conversation]) -> None:
    """Refuse conversations of a training rollout in all of which the environment failed, not by time-outs alone.

    Raises:
        RuntimeError: If it did.
    """
    failed = [conversation for conversation in conversations if conversation.end == "failed"]
    if failed and all(conversation.has_failed for conversation in conversations):
        raise RuntimeError(
            f"The environment failed in all {len(conversations)} conversations, first: {failed[0].error}."
        )


def _prompt_of(episode: Episode, call: Call) -> Prompt | None:
    try:
        prompt = call.result()
    except CallFailure as failure:
        _note_failure(episode, failure)
        return None
    messages = prompt if isinstance(prompt, list) else []
    is_prompt = prompt is None or isinstance(prompt, str | list)
    if not is_prompt or not all(isinstance(message, Mapping) for message in messages):
        raise UserError(
            f"reset() of {type(episode.environment).__name__}{users_function(call.function)} returned {shown(prompt)}: "
            "return the prompt as text or as chat messages with role and content, or None for the row's own."
        )
    return cast("Prompt | None", prompt)


def _common_prompt(
    replies: Sequence[Prompt | None], row: dict[str, Any], conversations: Sequence[Conversation]
) -> Prompt:
    """The prompt that a row's environments returned, or the row's.

    Raises:
        ValueError: If they differ, or there is none.
        RuntimeError: If there is none because all of them failed.
    """
    prompts = [prompt for prompt in replies if prompt is not None]
    if any(prompt != prompts[0] for prompt in prompts):
        raise UserError(
            f"reset() of the environment gave samples of one row different prompts, {shown(prompts[0])} and "
            f"{shown(next(prompt for prompt in prompts if prompt != prompts[0]))}: samples are compared with each "
            "other, so the prompt must follow from the row alone."
        )
    if not prompts and row.get("prompt") is None:
        if conversations[0].has_failed:
            raise RuntimeError(f"The environment gave no prompt, and the row has none: {conversations[0].error}.")
        raise UserError(
            "reset() of the environment gave no prompt, and the row has none: return one, or give the data a column "
            f"'prompt'. The row has {sorted(row)}."
        )
    return prompts[0] if prompts else row["prompt"]


def _checked(answer: Any, before: float) -> tuple[Observation | None, float]:
    """The observation that ``step`` returned, and the reward with what there was ``before``.

    Raises:
        CallFailure: If it is not an observation and a number, or the sum is not finite, as float32.
    """
    if not (isinstance(answer, tuple) and len(answer) == 2):
        raise CallFailure(f"returned {shown(answer)}, not an observation (or None) and a reward (or None)")
    observation, reward = answer
    if not (observation is None or isinstance(observation, str | list)):
        raise CallFailure(f"returned the observation {shown(observation)}, not text, chat messages or None")
    number: float | None = None
    with suppress(Exception):  # of others' numbers
        number = 0.0 if reward is None else float(reward)
    if number is None or isinstance(reward, str | bytes):
        raise CallFailure(f"returned the reward {shown(reward)}, not a number or None")
    if not abs(before + number) <= torch.finfo(torch.float32).max:
        raise CallFailure(f"returned the reward {number}, which added to {before} is not finite")
    return observation, before + number


def _note_failure(episode: Episode, failure: CallFailure, where: str = "") -> None:
    conversation = episode.conversation
    conversation.end, conversation.reward = "timeout" if isinstance(failure, CallTimeout) else "failed", math.nan
    conversation.error = f"{type(episode.environment).__name__} {failure}{where}"
