"""Drawing: the prompts of a body on their way through the engine's thread, canceled when their client has gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import ClientDisconnect, Request

from sparse_rl_lightning.rollout import CompletedRequest
from sparse_rl_lightning.rollout import Request as DrawRequest
from sparse_rl_lightning.rollout.request_thread import PendingRequest, RequestThread
from sparse_rl_lightning.serve.answers import REASONS
from sparse_rl_lightning.serve.bodies import BadRequest, Limits, Wanted


@dataclass(frozen=True)
class Job:
    """A prompt that is drawn for a body."""

    prompt: list[int]
    pending: PendingRequest


class Drawing:
    """Draws the prompts of bodies, and counts.

    Args:
        thread: Thread of the engine.
        limits: What a request may ask for.
        max_queue: Number of requests that run or wait, above which others are refused.
        timeout: Seconds after which a request ends with what it has.
    """

    def __init__(self, thread: RequestThread, limits: Limits, max_queue: int, timeout: float) -> None:
        self.thread, self.limits, self.max_queue, self.timeout = thread, limits, max_queue, timeout
        self.counts: Counter[str] = Counter()

    def jobs(self, prompts: Sequence[list[int]], wanted: Wanted, default: int | None) -> list[Job]:
        """The draws of a body, of which none has begun.

        Args:
            prompts: Token ids of each prompt.
            wanted: How the body wants to be drawn.
            default: Number of tokens if the body names none, None for as many as fit.

        Raises:
            BadRequest: If prompt and completion are too long together, or too many requests wait.
        """
        jobs = []
        for prompt in prompts:
            left = self.limits.max_length - len(prompt)
            max_tokens = wanted.max_tokens or (left if default is None else min(default, left))
            if not 1 <= max_tokens <= left:
                raise BadRequest(
                    f"The prompt has {len(prompt)} tokens and max_tokens is {max(1, max_tokens)}, together more than "
                    f"the {self.limits.max_length} of this server.",
                    "max_tokens",
                )
            params = replace(wanted.params, max_completion_length=max_tokens)
            jobs.append(Job(prompt, PendingRequest(DrawRequest(prompt, params, None, wanted.end_token_ids))))
        if self.thread.num_running + self.thread.num_queued + len(jobs) > self.max_queue:
            raise BadRequest("Too many requests are waiting: try again.", status=429)
        return jobs

    async def complete(self, request: Request, jobs: Sequence[Job]) -> list[CompletedRequest]:
        """Draw until all is done or took too long.

        Raises:
            ClientDisconnect: If the client has gone; what it max_tokens for is canceled.
        """
        futures = [asyncio.wrap_future(self.thread.submit(job.pending)) for job in jobs]
        drawn: asyncio.Future[Any] = asyncio.ensure_future(_all(futures))
        gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({gone, drawn}, timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not drawn.done():
                drawn.cancel()
                raise ClientDisconnect
            self._cancel(jobs)  # which took too long: what there is comes at the next step
            return [self._counted(job, done) for job, done in zip(jobs, await drawn, strict=True)]
        finally:
            gone.cancel()
            self._cancel(jobs)

    async def news(self, jobs: Sequence[Job]) -> AsyncIterator[tuple[int, dict[int, list[int]] | CompletedRequest]]:
        """Draw, and yield the index of a job with its tokens so far, by sample, or at last with what is complete."""
        loop, news = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Any]]()
        for index, job in enumerate(jobs):

            def tell(what: Any, index: int = index) -> None:
                loop.call_soon_threadsafe(news.put_nowait, (index, what))

            job.pending.on_tokens = tell
            self.thread.submit(job.pending).add_done_callback(tell)
        deadline, num_left = loop.time() + self.timeout, len(jobs)
        try:
            while num_left:
                if loop.time() > deadline:
                    self._cancel(jobs)
                index, what = await news.get()
                if not isinstance(what, dict):
                    what = self._counted(jobs[index], what.result())
                    num_left -= 1
                yield index, what
        finally:
            self._cancel(jobs)

    def _cancel(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if not job.pending.done.done():
                self.thread.cancel(job.pending)

    def _counted(self, job: Job, completed: CompletedRequest | None) -> CompletedRequest:
        """Count a request's tokens, unless none was drawn."""
        if completed is None:
            raise BadRequest("The request was aborted before anything was drawn.", status=503)
        rollout = completed.rollout
        assert rollout.kv is not None
        self.counts["vllm:prompt_tokens"] += len(job.prompt)
        self.counts["vllm:generation_tokens"] += int(rollout.completion_mask.sum())
        self.counts["sparse_rl:evicted_tokens"] += int((rollout.kv.full - rollout.kv.stored).sum())
        for ending in completed.endings:
            self.counts[f"vllm:request_success/{REASONS[ending]}"] += 1
        return completed


async def _all(futures: Sequence[asyncio.Future[Any]]) -> list[Any]:
    return [await future for future in futures]


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
