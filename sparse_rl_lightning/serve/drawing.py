"""Drawing: the prompts of a body on their way through the engine's thread, canceled when their client has gone."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rollout import CompletedRequest
from sparse_rl_lightning.rollout import Request as DrawRequest
from sparse_rl_lightning.rollout.request_thread import PendingRequest, RequestThread
from sparse_rl_lightning.serve.adapters import Adapter
from sparse_rl_lightning.serve.answers import REASONS
from sparse_rl_lightning.serve.bodies import BadRequest, Limits, Wanted
from sparse_rl_lightning.serve.scoring import TokenScore, prompt_scores

MOST_SCORES = 2**21  # log-probs of prompts in an answer, which JSON makes some 60 bytes each


class EngineError(BadRequest):
    """What went wrong while a request was drawn, which is not the request's fault."""


@dataclass(eq=False)
class Job(PendingRequest):
    """A prompt of a body on its way, with the scores of its tokens if they are wanted."""

    scores: list[TokenScore] | None = None  # once it is drawn

    def score(self, model: PreTrainedModel, count: int) -> None:
        """Score the prompt's tokens, with the ``count`` most likely ones at each."""
        temperature = self.request.params.temperature or 1.0  # 1 for greedy ones
        self.scores = prompt_scores(model, self.request.prompt, temperature, count)


class Drawing:
    """Draws the prompts of bodies, and counts.

    Args:
        thread: Thread of the engine.
        limits: What a request may ask for.
        max_queue: Number of completions that run or wait, above which others are refused.
        timeout: Seconds after which a request ends with what it has.
    """

    def __init__(self, thread: RequestThread, limits: Limits, max_queue: int, timeout: float) -> None:
        self.thread, self.limits, self.max_queue, self.timeout = thread, limits, max_queue, timeout
        self.num_open = 0  # completions that run or wait
        self.counts: Counter[str] = Counter()

    def refuse_if_full(self, more: int = 1) -> None:
        """Refuse a body that has to wait for too many.

        Raises:
            BadRequest: If there is no room for so many completions more.
        """
        if more > self.max_queue:
            raise BadRequest(f"A request may have {self.max_queue} completions here, got {more}.", "n")
        if self.num_open + more > self.max_queue:
            raise BadRequest("Too many requests are waiting: try again.", status=429)

    def jobs(
        self, prompts: Sequence[list[int]], wanted: Wanted, default: int | None, adapter: Adapter | None
    ) -> list[Job]:
        """The draws of a body, checked, of which none has begun.

        Args:
            prompts: Token ids of each prompt.
            wanted: How the body wants to be drawn.
            default: Number of tokens if the body names none, None for as many as fit.
            adapter: Adapter that draws, None for none.

        Raises:
            BadRequest: If prompt and completion are too long together.
            ValueError: If a prompt is not one for the engine.
        """
        jobs = []
        for prompt in prompts:
            left = self.limits.max_length - len(prompt)
            max_tokens = wanted.max_tokens or (left if default is None else min(default, left))
            if not 1 <= max_tokens <= left:
                raise self.limits.too_long(len(prompt), max(1, max_tokens))
            if wanted.params.min_completion_length > max_tokens:
                raise BadRequest(f"min_tokens must be at most max_tokens, which is {max_tokens}.", "min_tokens")
            seed = secrets.randbits(63) if wanted.params.seed is None else wanted.params.seed  # of each prompt
            params = replace(wanted.params, max_completion_length=max_tokens, seed=seed)
            request = DrawRequest(prompt, params, None, wanted.end_token_ids)
            job = Job(self.thread.limits.checked(request), variant=adapter)
            if wanted.scores is not None:
                job.on_begin = partial(job.score, self.thread.sampler.model, wanted.scores)
            jobs.append(job)
        numbers = 0 if wanted.scores is None else sum(map(len, prompts)) * (1 + wanted.scores)
        if numbers * wanted.params.num_generations > MOST_SCORES:
            raise BadRequest(f"Log-probs of prompts are at most {MOST_SCORES:,} numbers: send fewer at once.", "prompt")
        return jobs

    @contextmanager
    def opened(self, jobs: Sequence[Job]) -> Iterator[None]:
        """Count the completions of a body as open before anything waits, and cancel in the end what is not done.

        Raises:
            BadRequest: If too many requests wait.
        """
        count = sum(job.request.params.num_generations for job in jobs)
        self.refuse_if_full(count)
        self.num_open += count
        try:
            yield
        finally:
            self.num_open -= count
            self._cancel(jobs)

    async def complete(self, request: Request, jobs: Sequence[Job]) -> list[CompletedRequest | None]:
        """Draw until all is done or took too long; None for a prompt that nothing was drawn of. Within :meth:`opened`.

        Raises:
            ClientDisconnect: If the client has gone.
            EngineError: If the engine has failed.
        """
        gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(request))
        try:
            futures = [asyncio.wrap_future(self.thread.submit(job)) for job in jobs]
            drawn: asyncio.Future[Any] = asyncio.ensure_future(_all(futures))
            await asyncio.wait({gone, drawn}, timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not drawn.done():
                drawn.cancel()
                raise ClientDisconnect
            self._cancel(jobs)  # which took too long: what there is comes at the next step
            results = await drawn
        finally:
            gone.cancel()
        return [self._counted(job, done) for job, done in zip(jobs, results, strict=True)]

    async def news(
        self, jobs: Sequence[Job]
    ) -> AsyncIterator[tuple[int, dict[int, list[int]] | CompletedRequest | None]]:
        """Draw, and yield the index of a job with its tokens so far, by sample, or at last with what is complete.

        Tokens that come while the client does not read are told together. Within :meth:`opened`.

        Raises:
            EngineError: If the engine has failed.
        """
        loop, newest, wake = asyncio.get_running_loop(), dict[int, Any](), asyncio.Event()

        def put(index: int, what: Any) -> None:
            newest[index] = what  # the future that is done comes last
            wake.set()

        def teller(index: int) -> Callable[[Any], object]:
            return lambda what: loop.call_soon_threadsafe(put, index, what)

        for index, job in enumerate(jobs):
            job.on_tokens = teller(index)
        deadline, num_left = loop.time() + self.timeout, len(jobs)
        for index, job in enumerate(jobs):
            self.thread.submit(job).add_done_callback(teller(index))
        while num_left:
            with suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), max(0.0, deadline - loop.time()) or None)
            if loop.time() >= deadline:
                self._cancel(jobs)
            wake.clear()
            for index in list(newest):
                told = newest.pop(index)
                if isinstance(told, dict):
                    yield index, told
                    continue
                (done,) = await _all([asyncio.wrap_future(told)])
                num_left -= 1
                yield index, self._counted(jobs[index], done)

    def _cancel(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if not job.done.done():
                self.thread.cancel(job)

    def _counted(self, job: Job, completed: CompletedRequest | None) -> CompletedRequest | None:
        """Count a request's tokens."""
        self.counts["vllm:prompt_tokens"] += len(job.request.prompt)
        if completed is not None:
            rollout = completed.rollout
            assert rollout.kv is not None
            self.counts["vllm:generation_tokens"] += int(rollout.completion_mask.sum())
            self.counts["sparse_rl:evicted_tokens"] += int((rollout.kv.full - rollout.kv.stored).sum())
            for ending in completed.endings:
                self.counts[f"vllm:request_success/{REASONS[ending]}"] += 1
        return completed


async def _all(futures: Sequence[asyncio.Future[Any]]) -> list[Any]:
    """The results of the engine.

    Raises:
        EngineError: If there is none.
    """
    try:
        return [await future for future in futures]
    except Exception as error:
        raise EngineError(
            f"The engine has failed: {error if isinstance(error, UserError) else type(error).__name__}", status=500
        ) from error


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
