"""RequestThread: requests that come at any time, from any thread, drawn together in a thread of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rollout.engine.requests import Request
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams
from sparse_rl_lightning.rollout.requests import CompletedRequest, RequestLimits, RequestSession
from sparse_rl_lightning.rollout.sampler import RolloutSampler

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
UNKNOWN = object()  # a variant that nobody asks for


@dataclass(eq=False)
class PendingRequest:
    """A request on its way through the thread.

    Args:
        request: The request.
        name: What its sender calls it.
        on_tokens: Called in the thread between two steps with the tokens so far, by sample.
        on_begin: Called in the thread between two steps, before the request is drawn; one request a step.
        variant: What the thread's ``select`` makes of the model before the request is drawn, None for the plain one.
    """

    request: Request
    name: str = ""
    on_tokens: Callable[[dict[int, list[int]]], object] | None = None
    on_begin: Callable[[], object] | None = None
    variant: object = None
    done: Future[CompletedRequest | None] = field(default_factory=Future)  # in the host's memory; None if aborted
    is_canceled: bool = False

    def finish(self, completed: CompletedRequest | None) -> None:
        """Say what became of it; what is drawn after an abort is dropped."""
        with suppress(InvalidStateError):
            self.done.set_result(completed)

    def fail(self, error: Exception) -> None:
        """Say what went wrong, to those that still wait."""
        with suppress(InvalidStateError):
            self.done.set_exception(error)


@dataclass(frozen=True)
class Usage:
    """What a thread is doing."""

    num_running: int  # requests with a sample in a slot
    num_waiting: int  # other requests
    num_occupied: int  # slots in use
    num_slots: int
    cache_bytes: int  # of keys and values that the slots take


class _AbortedError(Exception):
    """Ends a session between two steps."""


class RequestThread:
    """Draws requests in a thread of its own: new ones join between two decode steps, and leave when they are complete.

    An exception is that of the requests that ran: they get it, it is logged, and the next ones get a new session.

    Args:
        sampler: Sampler with model, compressor and ``num_slots``.
        limits: Limits of all requests, as of a :class:`~sparse_rl_lightning.rollout.RequestSession`.
        max_prompt_length: Length of the longest prompt in tokens.
    """

    def __init__(self, sampler: RolloutSampler, limits: SamplingParams, max_prompt_length: int) -> None:
        self.sampler, self.limits = sampler, RequestLimits(sampler, limits, max_prompt_length)
        self.failed_at: float | None = None  # time.monotonic() of the last error, until a request is completed again
        self.select: Callable[[Any], object] | None = None  # a variant of the model, while nothing is drawn
        self.selected: object = None
        self.has_new_weights = False  # since the last step; set by a :meth:`call`
        self.weight_version = "0"  # what the current weights are called
        self._version, self._version_names = 0, dict[int, str]()  # the session's number of them, and names by it
        self._state = threading.Condition()  # guards what follows
        self._queue: deque[PendingRequest] = deque()
        self._calls = list[Callable[[], None]]()
        self._running: dict[int, PendingRequest] = {}  # by the session's number
        self._closed: set[str] = set()  # reasons to draw nothing
        self._rejects, self._aborting, self._drawing = False, False, False
        self._frozen = False
        self._session: RequestSession | None = None  # of the thread alone
        threading.Thread(target=self._serve, name="sparse-rl requests", daemon=True).start()

    def prepare(self) -> None:
        """Make a session now, and not when the first request comes; before that, or in the thread.

        Raises:
            ValueError: If there is none with these limits, or its memory is not there.
        """
        if self._session is None:  # no lock: those who submit do not wait for memory
            self._version_names = {}
            self._session = RequestSession(self.sampler, self.limits.params, self.limits.max_prompt_length)

    def pending(
        self, request: Request, name: str = "", on_tokens: Callable[[dict[int, list[int]]], object] | None = None
    ) -> PendingRequest:
        """A request that can be submitted; arguments are those of ``PendingRequest``.

        Raises:
            ValueError: If it exceeds the limits.
        """
        return PendingRequest(self.limits.checked(request), name, on_tokens)

    def submit(self, pending: PendingRequest) -> Future[CompletedRequest | None]:
        """Queue a request; while the thread is closed it waits, or is aborted after ``abort_all(reject=True)``."""
        with self._state:
            if self._rejects:
                pending.finish(None)
            else:
                self._queue.append(pending)
                self._state.notify_all()
        return pending.done

    def cancel(self, pending: PendingRequest) -> None:
        """End a request between two steps: it completes with what it has drawn, or as aborted if that is nothing."""
        with self._state:
            pending.is_canceled = True
            if pending in self._queue:
                self._queue.remove(pending)
                pending.finish(None)

    def abort_all(self, reject: bool = False) -> list[str]:
        """Abort everything and free the slots; until :meth:`resume` requests wait, or are aborted (``reject``)."""
        with self._state:
            self._closed.add("abort")
            self._rejects, self._aborting = reject, True
            aborted = [*self._queue, *self._running.values()]
            self._queue.clear()
            self._state.wait_for(lambda: not self._drawing)
            self._aborting = False
        for pending in aborted:
            pending.finish(None)
        return [pending.name for pending in aborted]

    def resume(self) -> None:
        """Draw again after :meth:`abort_all`, unless closed for other reasons."""
        with self._state:
            self._rejects = False
            self.open("abort")

    def close(self, why: str) -> None:
        """Complete the running requests, then draw nothing and hold no memory until :meth:`open` for this reason."""
        with self._state:
            self._closed.add(why)
            self._state.wait_for(lambda: not self._drawing and not self._running)
            self._session = None

    def open(self, why: str) -> None:
        """Draw again, unless closed for other reasons."""
        with self._state:
            self._closed.discard(why)
            self._state.notify_all()

    def freeze(self) -> None:
        """Stop between two steps, with all requests and their slots kept, until :meth:`thaw`."""
        with self._state:
            self._frozen = True
            self._state.wait_for(lambda: not self._drawing)

    def thaw(self) -> None:
        """Go on after :meth:`freeze`."""
        with self._state:
            self._frozen = False
            self._state.notify_all()

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Run a function of a trainer's in the thread between two steps, whether it is closed or frozen, or not."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():  # nobody waits for it
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        with self._state:
            self._calls.append(run)
            self._state.notify_all()
        return future

    def cancel_all(self) -> int:
        """Cancel all requests, and return their number."""
        with self._state:
            pending = [*self._queue, *self._running.values()]
        for each in pending:
            self.cancel(each)
        return len(pending)

    @property
    def usage(self) -> Usage:
        """What is going on now."""
        session, running, queued = self._session, len(self._running), len(self._queue)
        if session is None:
            return Usage(0, queued, 0, 0, 0)
        scheduler, begun = session.scheduler, len(session.in_slots)
        return Usage(
            begun, running - begun + queued, scheduler.num_slots - len(scheduler.free), scheduler.num_slots,
            session.engine.cache.pool_bytes,
        )  # fmt: skip

    # ---------------------------------------------------------------- the thread

    def _serve(self) -> None:
        while True:
            with self._state:
                self._drawing = False
                self._state.notify_all()
                self._state.wait_for(lambda: self._calls or self._may_draw())
                self._drawing, calls, self._calls = True, self._calls, []
            for call in calls:
                call()
            try:
                if not calls:
                    self._draw()
            except _AbortedError:
                self._drop(None)
            except Exception as error:
                self._drop(error)

    def _may_draw(self) -> bool:
        return not self._frozen and bool(self._running or (self._queue and not self._closed))

    def _is_wanted(self) -> bool:
        """Whether the thread has to stop between two steps."""
        return self._frozen or bool(self._calls)

    def _draw(self) -> None:
        """Draw until no request is left that may be drawn with this variant."""
        if not self._select():
            return
        self.prepare()
        session = self._session
        assert session is not None

        def between_steps() -> None:
            if self._aborting:
                raise _AbortedError
            self._cancel(session)
            self._deliver(session)
            self._admit(session)

        self._admit(session)
        new_weights, self.has_new_weights = self.has_new_weights, False
        self._version = session.version + (new_weights or not session.version)
        session.advance(0, until=self._is_wanted, progress=lambda _: between_steps(), new_weights=new_weights)
        self._deliver(session)

    def _admit(self, session: RequestSession) -> None:
        self._begin_first()
        with self._state:
            while (first := self._first()) is not None and first.on_begin is None:
                pending = self._queue.popleft()
                if not pending.done.set_running_or_notify_cancel():  # nobody waits for a canceled one
                    continue
                try:
                    self._running[session.queue(pending.request)] = pending
                except Exception as error:  # it is in nobody's hands now
                    pending.fail(error)
                    raise

    def _first(self) -> PendingRequest | None:
        """The first waiting request, if it may be drawn now; others wait until those before are done."""
        first = self._queue[0] if self._queue and not self._closed else None
        return None if first is None or first.variant is not self.selected else first

    def _select(self) -> bool:
        """Where nothing runs, take the variant that the first waiting request is drawn with; False if it cannot be."""
        with self._state:
            first = self._queue[0] if self._queue and not self._running else None
        if first is None or first.variant is self.selected or self.select is None:
            return True
        self._session, self.selected = None, UNKNOWN  # its memory is needed
        try:
            self.select(first.variant)
        except Exception as error:
            logger.exception("A variant of the model has failed.")
            self.failed_at = time.monotonic()
            with self._state:
                waiting = [pending for pending in self._queue if pending.variant is first.variant]
            for pending in waiting:
                pending.fail(error)
                self.cancel(pending)
            return False
        self.selected = first.variant
        return True

    def _begin_first(self) -> None:
        """Call what the first waiting request wants called, which may take long: without the lock, and one a step."""
        with self._state:
            pending = self._first()
        if pending is None or pending.on_begin is None:
            return
        begin, pending.on_begin = pending.on_begin, None
        try:
            begin()
        except Exception as error:
            logger.exception("A request has failed before it was drawn.")
            pending.fail(error)
            self.cancel(pending)

    def _cancel(self, session: RequestSession) -> None:
        for number, pending in list(self._running.items()):
            if not pending.is_canceled:
                continue
            pending.is_canceled = False  # once
            if not session.cancel(number):
                with self._state:
                    del self._running[number]
                pending.finish(None)

    def _deliver(self, session: RequestSession) -> None:
        self._version_names[self._version] = self.weight_version
        for number in session.complete:
            completed = session.take_request(number)
            rollout, names = completed.rollout.to("cpu"), dict(self._version_names)
            completed = replace(completed, rollout=rollout, version_names=names)
            with self._state:
                pending = self._running.pop(number)
            self.failed_at = None
            pending.finish(completed)
        for number in session.in_slots:
            tell = self._running[number].on_tokens
            if tell is not None:
                with suppress(RuntimeError):  # the loop of a client that has gone is closed
                    tell(session.drawn(number, with_ended=False))  # whose last text may be a stop string

    def _drop(self, error: Exception | None) -> None:
        """Give up a session; an error is that of the requests that ran, or of all if no session could be made."""
        self._session = None
        if error is not None:
            self.failed_at = time.monotonic()
            logger.error("Requests have failed: %s", error, exc_info=None if isinstance(error, UserError) else error)
        with self._state:
            dropped = list(self._running.values())
            if error is not None and not dropped:
                dropped = list(self._queue)
                self._queue.clear()
            self._running = {}
        for pending in dropped:
            if error is not None:
                pending.fail(error)
            pending.finish(None)
