"""RequestSession: requests that come at any time, each with its own sampling parameters, drawn together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from sparse_rl_lightning.cache.compression import Trigger
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout.engine.finished import StopStrings
from sparse_rl_lightning.rollout.engine.requests import (
    MOST_ENDS,
    Ending,
    Request,
    RequestEngine,
    RequestLogs,
    RequestScheduler,
    refuse_penalty,
)
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams
from sparse_rl_lightning.rollout.prompts import check_end_tokens
from sparse_rl_lightning.rollout.sampler import RolloutSampler
from sparse_rl_lightning.rollout.session import RolloutSession, VersionedLogs, checked_prompts


class VersionedRequestLogs(RequestLogs, VersionedLogs):
    """Logs of requests with the version of the policy that drew each token."""


@dataclass(frozen=True)
class CompletedRequest:
    """The completions of a request, and what ended each of them."""

    rollout: Rollout  # a canceled request may have fewer completions than it asked for
    endings: tuple[Ending, ...]
    version_names: Mapping[int, str] = field(default_factory=dict)  # of those in the rollout's policy_versions


@dataclass(frozen=True)
class RequestLimits:
    """What a session of requests allows.

    Args:
        sampler: Sampler with model and compressor.
        params: ``top_logprobs`` is the most that a request may ask for.
        max_prompt_length: Number of tokens of the longest prompt; prompt and completion have together at most
            ``max_prompt_length + params.max_completion_length``.
    """

    sampler: RolloutSampler
    params: SamplingParams
    max_prompt_length: int

    def checked(self, request: Request) -> Request:
        """A request with prompt and end tokens as lists of integers.

        Raises:
            ValueError: If it exceeds the limits, the model's or the budget's, or has stop strings without a tokenizer.
        """
        model, params, limits = self.sampler.model, request.params, self.params
        (prompt,) = checked_prompts([request.prompt], params, model, self.max_prompt_length)
        ends = request.end_token_ids
        longest = self.max_prompt_length + limits.max_completion_length
        length = len(prompt) + params.max_completion_length
        if length > longest:
            raise UserError(
                f"A prompt of {len(prompt)} tokens and max_completion_length={params.max_completion_length} are more "
                f"than the {longest} tokens of a sequence of this session: shorten either."
            )
        if params.top_logprobs > limits.top_logprobs:
            raise UserError(
                f"top_logprobs must be at most the session's {limits.top_logprobs}, got {params.top_logprobs}."
            )
        if params.stop_strings:
            StopStrings(params.stop_strings, self.sampler.tokenizer)
        self._check_protected(len(prompt), length)
        ends = None if ends is None else check_end_tokens(ends, model.config.vocab_size)
        return replace(request, prompt=prompt, end_token_ids=ends)

    @cached_property
    def _num_layers(self) -> int:
        """How many layers the session compresses, which its longest sequence decides where there are windows."""
        longest = self.max_prompt_length + self.params.max_completion_length
        return CacheGeometry.of(self.sampler.model, longest=longest).num_layers

    def _check_protected(self, prompt: int, length: int) -> None:
        """Refuse a protected prompt that the budget cannot hold: it would end all that is drawn beside it."""
        c = self.sampler.compressor
        if not (c.evicts and c.protect_prompt):
            return
        budget = Trigger(c, self._num_layers).smallest_budget(prompt, length)  # which may have been raised
        if length > budget + c.buffer and prompt + c.window > budget:
            raise UserError(
                f"The prompt has {prompt} tokens, which protect_prompt keeps beside window={c.window}, and the budget "
                f"is {budget}: shorten the prompt."
            )


class RequestSession(RolloutSession):
    """Requests that join between two decode steps and leave when they are complete; each draws what it would alone.

    Args:
        sampler: Sampler with model, compressor and settings; ``num_slots`` must be set.
        params: Limits of all requests: none may ask for more ``top_logprobs``, and prompt and completion together have
            at most ``max_prompt_length + max_completion_length`` tokens. The other parameters are those of prompts
            given to :meth:`add`.
        max_prompt_length: Length of the longest prompt in tokens.

    Raises:
        ValueError: If the sampler has no ``num_slots``, records routing or has more than 16 end tokens, or there is a
            repetition penalty.

    Example::

        session = RequestSession(sampler, SamplingParams(max_completion_length=512), max_prompt_length=200)
        first = session.submit(Request(prompt, SamplingParams(temperature=0.7, stop_strings=("END",))))
        second = session.submit(Request(other, SamplingParams(temperature=0, max_completion_length=16)))
        session.advance(max_steps=64)
        session.drawn(first)  # the tokens so far
        session.cancel(first)
        session.advance()
        completed = session.take_request(second)
    """

    logs_type = VersionedRequestLogs
    engine_type = RequestEngine
    scheduler_type = RequestScheduler
    keeps_weights = True

    def __init__(self, sampler: RolloutSampler, params: SamplingParams, max_prompt_length: int) -> None:
        if sampler.recorded is not None:
            raise UserError("Requests cannot be drawn with record_routing=True: use RolloutSampler.generate.")
        if len(sampler.end_token_ids) > MOST_ENDS:
            raise UserError(f"Requests have at most {MOST_ENDS} end tokens, the sampler {len(sampler.end_token_ids)}.")
        refuse_penalty(params)
        self.limits = RequestLimits(sampler, params, max_prompt_length)
        # any request may truncate and have a minimum: memory is planned and logs are kept for those
        super().__init__(sampler, replace(params, top_k=1, min_completion_length=1), max_prompt_length)

    def submit(self, request: Request) -> int:
        """Queue a request; the number returned identifies it.

        Raises:
            ValueError: If it exceeds the limits of the session or the model.
        """
        return self._submit([request])[0]

    def queue(self, request: Request) -> int:
        """Queue a request that ``limits.checked`` has returned; the number returned identifies it."""
        strings = request.params.stop_strings
        return self._requests.submit(request, StopStrings(strings, self.sampler.tokenizer) if strings else None)

    def _submit(self, requests: Sequence[Request]) -> list[int]:
        """Queue requests, all of them or none."""
        return [self.queue(request) for request in [self.limits.checked(request) for request in requests]]

    def add(self, prompts: Sequence[Sequence[int]], sequence_ids: Sequence[int]) -> range:
        """Queue prompts as requests with the parameters of the session."""
        params = self.limits.params
        count = params.num_generations
        if not prompts or len(sequence_ids) != len(prompts) * count:
            raise UserError(f"sequence_ids must name {len(prompts) * count} sequences, got {len(sequence_ids)}.")
        ids = [tuple(sequence_ids[first : first + count]) for first in range(0, len(sequence_ids), count)]
        numbers = self._submit([Request(prompt, params, each) for prompt, each in zip(prompts, ids, strict=True)])
        return range(numbers[0], numbers[-1] + 1)

    def cancel(self, number: int) -> bool:
        """End a request at the next step of ``advance``; what it has drawn can be taken then.

        Returns:
            Whether there is anything to take; False if nothing of it had begun, and its number means nothing any more.

        Raises:
            ValueError: If there is no such request, or it has been taken.
        """
        self._check(number)
        return self._requests.cancel(number)

    def drawn(self, number: int, with_ended: bool = True) -> dict[int, list[int]]:
        """The tokens so far of each sample of a request that has a slot, or has ended too; on a GPU some steps late.

        Raises:
            ValueError: If there is no such request, or it has been taken.
        """
        self._check(number)
        return self._requests.drawn(number, with_ended)

    @property
    def in_slots(self) -> set[int]:
        """The requests with a sample in a slot."""
        return self._requests.requests_in_slots

    def take_request(self, number: int) -> CompletedRequest:
        """Remove a complete request, and return its completions with what ended them.

        Raises:
            ValueError: If it has not ended, or there is no such request.
        """
        self._check(number)
        endings = self._requests.endings[number]
        return CompletedRequest(self.take([number]), tuple(endings[sample] for sample in sorted(endings)))

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[CompletedRequest]:
        """Complete prompts, each with its own sampling parameters, with the model's current weights.

        Other requests of the session are drawn beside them, and go on with those weights too.

        Args:
            prompts: Token ids of each prompt.
            params: Sampling parameters of all prompts, or of each.

        Returns:
            The completions of each prompt; those of ``RolloutSampler.generate`` if all parameters are equal.

        Raises:
            ValueError: If there is no prompt, or a request exceeds the limits of the session or the model.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if not prompts or len(each) != len(prompts):
            raise UserError(f"params must be for {len(prompts)} prompts, at least one, got {len(each)}.")
        requests, first = list[Request](), 0
        for prompt, of_prompt in zip(prompts, each, strict=True):
            requests.append(Request(prompt, of_prompt, range(first, first := first + of_prompt.num_generations)))
        numbers = self._submit(requests)
        self.advance(0, until=lambda: set(numbers) <= set(self.complete), new_weights=True)
        return [self.take_request(number) for number in numbers]

    @property
    def _requests(self) -> RequestScheduler:
        assert isinstance(self.scheduler, RequestScheduler)
        return self.scheduler

    def _check(self, number: int) -> None:
        if number not in self._requests.requests:
            raise UserError(f"There is no request {number}: it was never submitted, or has been taken.")
