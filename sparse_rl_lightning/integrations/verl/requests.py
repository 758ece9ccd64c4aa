"""RequestEngine: completions of requests that come at any time, drawn together in one session of the sampler."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams
from sparse_rl_lightning.rollout.prompts import check_prompts


@dataclass(frozen=True)
class Request:
    """A prompt to complete once."""

    name: str
    prompt: list[int]
    params: SamplingParams
    number: int  # sequence id: with params.seed it determines the random numbers
    done: Future[Rollout | None] = field(default_factory=Future)  # the completion, None if it was aborted

    def finish(self, rollout: Rollout | None) -> None:
        """Say what became of it, once: what is drawn after an abort is dropped."""
        if not self.done.done():
            self.done.set_result(rollout)


class _AbortedError(Exception):
    """Ends a session between two steps."""


class RequestEngine:
    """Draws requests in a thread of its own: new ones join between two decode steps, and leave when they are complete.

    Requests that are drawn together have the same sampling parameters; the first of others waits for the end of those
    that run, and nothing overtakes it. An aborted request is never continued: all tokens of a completion are drawn
    under one cache with the same weights, so that its record of evictions is exact.

    Args:
        sampler: Sampler with model, compressor and ``num_slots``.
        max_prompt_length: Length of the longest prompt in tokens.
    """

    def __init__(self, sampler: RolloutSampler, max_prompt_length: int) -> None:
        self.sampler, self.max_prompt_length = sampler, max_prompt_length
        self._state = threading.Condition()  # guards what follows
        self._queue: deque[Request] = deque()
        self._running: dict[int, Request] = {}  # by the session's number of the prompt
        self._closed: set[str] = set()  # reasons to draw nothing
        self._rejects, self._aborting, self._drawing = False, False, False
        self._session: RolloutSession | None = None  # of the thread alone
        threading.Thread(target=self._serve, name="sparse-rl requests", daemon=True).start()

    def submit(self, request: Request) -> Future[Rollout | None]:
        """Queue a request; while the engine is closed it waits, or is aborted after ``abort_all(reject=True)``.

        Raises:
            ValueError: If the prompt is empty, too long, or has unknown tokens.
        """
        check_prompts([request.prompt], request.params, self.sampler.model)
        if len(request.prompt) > self.max_prompt_length:
            raise UserError(
                f"A prompt has {len(request.prompt)} tokens, and the engine was made for {self.max_prompt_length} "
                "(verl's rollout.prompt_length)."
            )
        with self._state:
            if self._rejects:
                request.finish(None)
            else:
                self._queue.append(request)
                self._state.notify_all()
        return request.done

    def abort_all(self, reject: bool = False) -> list[str]:
        """Abort everything and free the slots; until :meth:`resume` requests wait, or are aborted (``reject``)."""
        with self._state:
            self._closed.add("abort")
            self._rejects, self._aborting = reject, True
            aborted = [*self._queue, *self._running.values()]
            self._queue.clear()
            self._state.wait_for(lambda: not self._drawing)
            self._aborting = False
        for request in aborted:
            request.finish(None)
        return [request.name for request in aborted]

    def resume(self) -> None:
        """Draw again after :meth:`abort_all`, unless closed for other reasons."""
        with self._state:
            self._rejects = False
            self.open("abort")

    def close(self, why: str) -> None:
        """Complete the running requests, then draw nothing and hold no memory until :meth:`open` for this reason."""
        with self._state:
            self._closed.add(why)
            self._state.wait_for(lambda: not self._drawing)
            self._session = None

    def open(self, why: str) -> None:
        """Draw again, unless closed for other reasons."""
        with self._state:
            self._closed.discard(why)
            self._state.notify_all()

    # ---------------------------------------------------------------- the thread

    def _serve(self) -> None:
        while True:
            with self._state:
                self._drawing = False
                self._state.notify_all()
                self._state.wait_for(lambda: not self._closed and bool(self._queue))
                self._drawing = True
                params = self._queue[0].params
            try:
                self._draw(params)
            except _AbortedError:
                self._drop(None, params)
            except Exception as error:
                self._drop(error, params)

    def _draw(self, params: SamplingParams) -> None:
        """Draw until no request of these parameters is left that may be drawn."""
        if self._session is None or self._session.params != params:
            self._session = None  # frees its memory
            self._session = RolloutSession(self.sampler, params, self.max_prompt_length)
        session = self._session

        def between_steps() -> None:
            if self._aborting:
                raise _AbortedError
            self._deliver(session)
            self._admit(session)

        self._admit(session)
        session.advance(progress=lambda _: between_steps(), new_weights=False)
        self._deliver(session)

    def _admit(self, session: RolloutSession) -> None:
        with self._state:
            while not self._closed and self._queue and self._queue[0].params == session.params:
                request = self._queue.popleft()
                self._running[session.add([request.prompt], [request.number])[0]] = request

    def _deliver(self, session: RolloutSession) -> None:
        for number in session.complete:
            rollout = session.take([number]).to("cpu")
            with self._state:
                request = self._running.pop(number)
            request.finish(rollout)

    def _drop(self, error: Exception | None, params: SamplingParams) -> None:
        """Give up a session; an error is that of its requests, and of those that would meet it in the next one."""
        self._session = None
        with self._state:
            dropped = [
                *self._running.values(),
                *(request for request in self._queue if error and request.params == params),
            ]
            self._queue = deque(request for request in self._queue if request not in dropped)
            self._running = {}
        for request in dropped:
            if error is not None and not request.done.done():
                request.done.set_exception(error)
            request.finish(None)
