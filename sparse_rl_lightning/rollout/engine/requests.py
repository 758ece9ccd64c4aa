"""Requests: prompts with sampling parameters, seeds and ends of their own, drawn together; each can be canceled.

What a request draws is what it would draw alone, token for token: the parameters lie in tables, a row per slot, which
the op ``draw`` reads. When slots are filled, at most ``max_prefill_tokens`` tokens of prompts are read, so those that
run do not wait for a long one. Tokens are known to the host at every check for ends, before their sequence has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.draw import RowParams
from sparse_rl_lightning.ops.transfers import upload
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout.engine.engine import Engine
from sparse_rl_lightning.rollout.engine.finished import FinishCheck, NewestTokens, StopStrings
from sparse_rl_lightning.rollout.engine.prefill import Prefill, ReadPrompt, read_in_chunks
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams, prompt_key, sequence_keys
from sparse_rl_lightning.rollout.engine.scheduler import CachedPrompt, Scheduler, steps_per_check
from sparse_rl_lightning.rollout.engine.sequences import RunningSequence, SequenceGroup, SequenceLogs

MOST_SAMPLES = 1 << 16  # completions of a request: sequences of request r are numbered from r x MOST_SAMPLES on
MOST_ENDS = 16  # end tokens of a request
Ending: TypeAlias = Literal["end_token", "stop_string", "length", "canceled"]
"""What ended a completion."""


@dataclass(frozen=True)
class Request:
    """A prompt to complete, with sampling parameters of its own.

    Args:
        prompt: Token ids.
        params: Sampling parameters; ``num_generations`` is the number of completions.
        sequence_ids: Id of each completion: with ``params.seed`` it determines the random numbers. Default 0, 1, ...,
            or without a seed other ids for each request.
        end_token_ids: Tokens that end a completion, None for those of the sampler.

    Raises:
        ValueError: If there is a repetition penalty, or more completions or end tokens than a request may have.
    """

    prompt: Sequence[int]
    params: SamplingParams
    sequence_ids: Sequence[int] | None = None
    end_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        count = self.params.num_generations
        if self.sequence_ids is not None and len(self.sequence_ids) != count:
            raise UserError(f"sequence_ids must name {count} completions, got {len(self.sequence_ids)}.")
        refuse_penalty(self.params)
        for name, number, most in (
            ("num_generations", count, MOST_SAMPLES),
            ("the number of end_token_ids", len(self.end_token_ids or ()), MOST_ENDS),
        ):
            if number > most:
                raise UserError(f"{name} must be at most {most} in a request, got {number}.")


def refuse_penalty(params: SamplingParams) -> None:
    """Refuse a repetition penalty: which tokens have occurred is not kept for requests.

    Raises:
        ValueError: If there is one.
    """
    if params.repetition_penalty != 1:
        raise UserError(
            f"repetition_penalty must be 1 for requests, got {params.repetition_penalty}: use RolloutSampler.generate."
        )


class RequestLogs(SequenceLogs):
    """Logs of requests, with the sampling parameters of each slot."""

    def __init__(self, num_slots: int, length: int, params: SamplingParams, device: torch.device) -> None:
        super().__init__(num_slots, length, params, device)
        numbers = torch.tensor([1.0, 0, 1, 0, 0, 0], dtype=torch.float64, device=device)  # as in RowParams
        self.row_params = numbers.repeat(num_slots + 1, 1)
        self.row_ends = torch.full((num_slots + 1, MOST_ENDS), -1, dtype=torch.int64, device=device)


class RequestEngine(Engine):
    """Engine whose slots have sampling parameters of their own; arguments as for ``Engine``."""

    logs: RequestLogs

    def set_params(self, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """Give slots the parameters of their requests, in one copy that the host does not wait for."""
        params = [request.params for request in requests]
        numbers = [
            [p.temperature, p.top_k, p.top_p, p.min_p or 0, p.min_completion_length, p.top_logprobs] for p in params
        ]
        # float64 numbers travel as integers of the same bits
        bits = torch.tensor(numbers, dtype=torch.float64).view(torch.int64).tolist()
        end_ids = [self.key.end_token_ids if r.end_token_ids is None else r.end_token_ids for r in requests]
        padded = [[*ids, *[-1] * (MOST_ENDS - len(ids))] for ids in end_ids]
        places, rows, ends = upload([slots, bits, padded], self.logs.row_ends.device)
        self.logs.row_params[places], self.logs.row_ends[places] = rows.view(torch.float64), ends

    def draw(self, logits: Tensor, places: Tensor, at: Tensor) -> None:
        """Draw as the base class does, each row with the parameters of its slot."""
        cache, logs = self.cache, self.logs
        rows = RowParams(logs.row_params[places], logs.row_ends[places])
        drawn = ops.draw(
            logits.float() if logits.dtype == torch.float64 else logits,  # the logs are float32
            cache.sequence_keys[places],
            at - cache.prompt_lengths[places],
            top_logprobs=self.key.params.top_logprobs,
            with_support=logs.support is not None,
            rows=rows,
        )
        cache.tokens[places, at] = drawn.tokens
        logs.record(places, at, drawn, rows.ends)


@dataclass
class RequestSequence(RunningSequence):
    """A completion of a request, in its slot."""

    drawn: list[int] = field(default_factory=list)  # its tokens that the host knows
    is_canceled: bool = False


class RequestTokens(NewestTokens):
    """The tokens that running completions drew since the host has seen them, in which stop strings are searched too.

    Arguments are those of ``NewestTokens``; slots whose request has no stop strings have no search.
    """

    def first(self, slot: int, running: RunningSequence) -> int:
        """The index of the first token that is copied."""
        assert isinstance(running, RequestSequence)
        unseen = running.prompt_length + len(running.drawn)
        return min(unseen, super().first(slot, running)) if slot in self.stops else unseen

    def find(self, tokens: Sequence[list[int]], slot: int, running: RunningSequence, last: int) -> int | None:
        """Take the new tokens over, up to the one that completes a stop string, whose index is returned."""
        assert isinstance(running, RequestSequence)
        stopped = super().find(tokens, slot, running, last) if slot in self.stops else None
        unseen = running.prompt_length + len(running.drawn)
        end = last if stopped is None else stopped
        running.drawn += tokens[self.row[slot]][unseen - self.firsts[slot] : max(0, end + 1 - self.firsts[slot])]
        return stopped


@dataclass(frozen=True)
class LongPrompt:
    """A prompt of more than ``max_prefill_tokens`` tokens, which is read a chunk per step, in a slot taken for it."""

    number: int  # of the request
    slot: int
    chunks: Iterator[ReadPrompt | None]


class RequestScheduler(Scheduler):
    """Scheduler of requests: each has its parameters, completions, seed, ends and limit, and can be canceled.

    Arguments are those of ``Scheduler``; ``params`` are limits of all requests. It checks for ends as seldom as that.
    """

    sequence = RequestSequence
    engine: RequestEngine

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        num_slots: int,
        stop: StopStrings | None = None,
        max_prefill_tokens: int = 16384,
    ) -> None:
        params = replace(params, num_generations=MOST_SAMPLES)  # so a sequence's number tells its request
        check_every = steps_per_check(engine.key.geometry.device)
        super().__init__(engine, params, num_slots, stop, max_prefill_tokens, check_every)
        self.running: dict[int, RequestSequence]  # type: ignore[assignment]  # of requests alone
        self.requests: dict[int, Request] = {}  # by number, until they are taken
        self.stops: dict[int, StopStrings] = {}  # of requests with stop strings
        self.endings: dict[int, dict[int, Ending]] = {}  # of completions that have ended, by request and sample
        self.texts: dict[int, dict[int, list[int]]] = {}  # tokens of these
        self.long_prompt: LongPrompt | None = None  # the one that is being read

    # ---------------------------------------------------------------- input and output

    def submit(self, request: Request, stop: StopStrings | None = None) -> int:
        """Queue a request behind the waiting ones; the number returned identifies it. ``stop`` searches its strings."""
        number, params = self.num_prompts, request.params
        self.num_prompts += 1
        first, count = number * MOST_SAMPLES, params.num_generations
        # without a seed no two requests have the same random numbers
        usual = range(count) if params.seed is not None else range(first, first + count)
        ids = usual if request.sequence_ids is None else request.sequence_ids
        keys, prompt = sequence_keys(params.seed, ids).tolist(), list(request.prompt)
        self.groups[number] = SequenceGroup(prompt, prompt_key(params.seed, prompt), keys, num_waiting=len(keys))
        self.requests[number], self.endings[number], self.texts[number] = request, {}, {}
        if stop is not None:
            self.stops[number] = stop
        self.waiting = [*reversed(range(first, first + count)), *self.waiting]
        return number

    def cancel(self, number: int) -> bool:
        """End a request: what has been drawn is kept, samples that still wait for a slot are dropped.

        Returns:
            Whether there is anything to take once the next step is done; False if none of its samples had begun.
        """
        group, num_waiting = self.groups[number], len(self.waiting)
        self.waiting = [sequence for sequence in self.waiting if sequence // MOST_SAMPLES != number]
        del group.keys[len(group.keys) - (num_waiting - len(self.waiting)) :]  # the last samples are those that wait
        group.num_waiting = 0
        self.cached_prompts.pop(number, None)
        if self.long_prompt is not None and self.long_prompt.number == number:
            self._stop_reading()
        for sequence in self.running.values():
            if sequence.number // MOST_SAMPLES == number and sequence.num_fed < sequence.last:
                sequence.last, sequence.is_canceled = sequence.num_fed, True
        if not group.keys:
            del self.groups[number]
            self._forget(number)
        return bool(group.keys)

    @property
    def requests_in_slots(self) -> set[int]:
        """The requests with a sample in a slot; another thread may ask."""
        return {sequence.number // MOST_SAMPLES for sequence in list(self.running.values())}

    def drawn(self, number: int, with_ended: bool = True) -> dict[int, list[int]]:
        """The tokens so far of each sample of a request that is in a slot, or has ended too, by sample.

        On a GPU they are known in pieces of several steps, when the host reads which sequences have ended.
        """
        running = [sequence for sequence in self.running.values() if sequence.number // MOST_SAMPLES == number]
        ended = self.texts[number] if with_ended else {}
        return ended | {sequence.number % MOST_SAMPLES: list(sequence.drawn) for sequence in running}

    def take(self, prompts: Sequence[int]) -> Rollout:
        """Remove complete requests; what none of them asked for (most likely tokens, truncation) is not returned."""
        rollout, requests = super().take(prompts), [self.requests[number] for number in prompts]
        for number in prompts:
            self._forget(number)
        params = [request.params for request in requests]
        count, truncates = max(p.top_logprobs for p in params), any(p.truncates for p in params)
        kv = rollout.kv
        if kv is not None and self.engine.key.compressor.evicts:  # the session's limit is not what these could become
            longest = max(len(request.prompt) + request.params.max_completion_length for request in requests)
            kv = replace(kv, full_peak_bytes=self.cache.full_bytes(longest))
        return replace(
            rollout,
            topk_ids=None if not count or rollout.topk_ids is None else rollout.topk_ids[..., :count],
            topk_logprobs=None if not count or rollout.topk_logprobs is None else rollout.topk_logprobs[..., :count],
            behavior_logprobs=rollout.behavior_logprobs if truncates else None,
            support=rollout.support if truncates and count else None,
            kv=kv,
        )

    def forget_prompts(self) -> None:
        """Read prompts again that were read with other weights."""
        super().forget_prompts()
        self._stop_reading()

    # ---------------------------------------------------------------- in place of the plain scheduler's

    def start(self, sequence: int) -> RunningSequence:
        """Begin a completion with the limits of its request."""
        started, params = super().start(sequence), self.requests[sequence // MOST_SAMPLES].params
        started.last = started.prompt_length + params.max_completion_length - 1
        started.searched = started.prompt_length + params.min_completion_length
        return started

    def admit(self) -> bool:
        """Give free slots to waiting samples whose prompts have together no more than ``max_prefill_tokens`` tokens.

        A longer prompt is read a chunk per call, in a slot lent to it, and then waits beside the cache for slots of its
        samples. Nobody overtakes it.
        """
        left = self.max_prefill_tokens - self._read_on()
        free_of_cost, count = set(self.cached_prompts), 0
        for sequence in reversed(self.waiting[len(self.waiting) - min(len(self.waiting), len(self.free)) :]):
            number = sequence // MOST_SAMPLES
            left -= 0 if number in free_of_cost else len(self.groups[number].prompt)
            if left < 0:
                break
            free_of_cost.add(number)
            count += 1
        if not count:
            return False
        later, self.waiting = self.waiting[:-count], self.waiting[-count:]
        try:
            return super().admit()
        finally:
            self.waiting = later + self.waiting

    def end(self, slot: int, sequence: RunningSequence, end: int, by_token: bool) -> None:
        """Store a completion, and what ended it."""
        assert isinstance(sequence, RequestSequence)
        super().end(slot, sequence, end, by_token)
        number, sample = divmod(sequence.number, MOST_SAMPLES)
        ids = self.requests[number].end_token_ids
        is_end = sequence.drawn[-1] in (self.engine.key.end_token_ids if ids is None else ids)
        ending: Ending = "canceled" if sequence.is_canceled else "length"
        self.texts[number][sample] = sequence.drawn
        self.endings[number][sample] = ending if not by_token else "end_token" if is_end else "stop_string"

    def _upload(self, admitted: dict[int, list[int]]) -> list[Tensor]:
        """As the base class, and the parameters of the slots, before anything is drawn in them."""
        pairs = [(slot, self.requests[number]) for number, slots in admitted.items() for slot in slots]
        self.engine.set_params([slot for slot, _ in pairs], [request for _, request in pairs])
        return super()._upload(admitted)

    def _queue_check(self) -> FinishCheck:
        stops = {
            slot: self.stops[number]
            for slot, sequence in self.running.items()
            if (number := sequence.number // MOST_SAMPLES) in self.stops
        }
        tokens = RequestTokens(stops, self.running, self.cache.tokens)
        return FinishCheck(self.running, self.logs, self.cache.pools, self.num_steps, tokens)

    # ---------------------------------------------------------------- long prompts

    def _read_on(self) -> int:
        """Read the next chunk of the long prompt whose turn it is, if there is one, and return its number of tokens."""
        if self.long_prompt is None:
            number = self.waiting[-1] // MOST_SAMPLES if self.waiting and self.free else None
            if number is None or number in self.cached_prompts:
                return 0
            group, slot = self.groups[number], self.free[-1]
            if len(group.prompt) <= self.max_prefill_tokens:
                return 0
            self.free.pop()
            self.cache.begin([slot], [group.prompt], [group.key])
            prompt = Prefill.of(group.prompt, slot, self.engine.compression.trigger)
            self.long_prompt = LongPrompt(number, slot, read_in_chunks(self.engine, prompt, self.max_prefill_tokens))
        read = next(self.long_prompt.chunks)
        if read is not None:
            prompt, logits, staged = read
            content = self.cache.save(prompt.slot, len(prompt.tokens), prompt.num_entries)
            cached = CachedPrompt(prompt, logits, content, self.cache.content_bytes(content))
            self.cached_prompts[self.long_prompt.number] = cached
            nbytes = staged + sum(each.nbytes for each in self.cached_prompts.values())
            self.prefill_peak_bytes = max(self.prefill_peak_bytes, nbytes)
            self._stop_reading()
        return self.max_prefill_tokens

    def _stop_reading(self) -> None:
        if self.long_prompt is not None:
            self.free = sorted([*self.free, self.long_prompt.slot], reverse=True)
            self.long_prompt = None

    def _forget(self, number: int) -> None:
        del self.requests[number], self.endings[number], self.texts[number]
        self.stops.pop(number, None)
