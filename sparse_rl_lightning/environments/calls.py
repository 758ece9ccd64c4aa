"""Calls of environments beside the rollout: functions in threads, coroutines in one loop, each with a time limit.

A thread cannot be stopped: one that hangs is left behind, and ends with the program. Code that holds Python's lock,
such as a backtracking regular expression, stops everything for as long as it runs; it belongs into a process.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError
from concurrent.futures import wait as wait_for
from contextlib import nullcontext, suppress
from typing import Any

from sparse_rl_lightning.rewards.base import undisturbed, users_line
from sparse_rl_lightning.text import shown

PATIENCE = 1.0
"""Seconds within which a loop must react after one of its coroutines has timed out, or it is left behind too."""
MAX_THREADS = 64
"""Functions that run at the same time; others wait for their turn, which their time limit does not count."""


class CallFailure(Exception):
    """A call raised an error, which is the cause, or took too long."""


class CallTimeout(CallFailure):
    """A call took too long."""


class Call:
    """A call of a function, which may be ``async``, under way.

    Args:
        function: Function to call.
        arguments: Its arguments.
        timeout: Seconds that it may take from its beginning, None for any time.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float | None) -> None:
        self.function, self.arguments, self.timeout = function, arguments, timeout
        self.future: Future[Any] = Future()
        self.deadline: float | None = None  # by time.monotonic(), once it has begun
        self._task: Future[Any] | None = None  # of a coroutine
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_over(self) -> bool:
        """Whether there is a result, or no time left for one."""
        return self.future.done() or (self.deadline is not None and time.monotonic() >= self.deadline)

    def result(self) -> Any:
        """What the call returned; waits for it.

        Raises:
            CallFailure: If it raised, even to end the program, or took too long; KeyboardInterrupt passes through.
        """
        wait_for_any([self])
        if not self.future.done():
            self._abandon()
            raise CallTimeout(f"took more than {self.timeout:g} seconds")
        try:
            return self.future.result()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise CallFailure(f"raised {shown(error)}{users_line(error)}") from error

    def run(self) -> None:
        """Call the function in this thread; what is ``async`` of it goes on in the loop."""
        if self.timeout is not None:
            self.deadline = time.monotonic() + self.timeout
        try:
            with undisturbed() if self.timeout is None else nullcontext():  # of threads it is put back behind all calls
                result = self.function(*self.arguments)
            if inspect.isawaitable(result):
                self._loop = _running_loop()
                self._task = asyncio.run_coroutine_threadsafe(self._awaited(result), self._loop)
                return
        except BaseException as error:
            self._end(error)
        else:
            self._end(None, result)

    async def _awaited(self, awaitable: Awaitable[Any]) -> None:
        """Take over the result or any error: what leaves a coroutine to end the program would end its loop."""
        try:
            result = await awaitable
        except BaseException as error:
            self._end(error)
            if isinstance(error, asyncio.CancelledError):
                raise
        else:
            self._end(None, result)

    def _end(self, error: BaseException | None, result: Any = None) -> None:
        with suppress(InvalidStateError):  # nobody waits for it any more
            self.future.set_result(result) if error is None else self.future.set_exception(error)

    def _abandon(self) -> None:
        self.future.cancel()
        if self._task is None:
            _WORKERS.fill()
        else:
            self._task.cancel()
            assert self._loop is not None
            _leave_if_stuck(self._loop)


def start(function: Callable[..., Any], *arguments: Any, timeout: float | None = None) -> Call:
    """Call a function, which may be ``async``.

    Args:
        function: Function to call.
        *arguments: Its arguments.
        timeout: Seconds that it may take. None for any time: it is then called at once, in this thread.
    """
    call = Call(function, arguments, timeout)
    if timeout is None or inspect.iscoroutinefunction(function):
        call.run()
    else:
        _WORKERS.add(call)
    return call


def wait_for_any(calls: Iterable[Call]) -> None:
    """Wait until one of the calls is over."""
    calls = list(calls)
    while not any(call.is_over for call in calls):
        _WORKERS.fill()  # others may have run out of time, and nobody waits for them
        deadlines = [call.deadline for call in calls if call.deadline is not None]
        left = min(deadlines) - time.monotonic() if deadlines else PATIENCE  # some may not have begun
        wait_for([call.future for call in calls], max(0.0, min(left, PATIENCE)), FIRST_COMPLETED)


class _Workers:
    """Threads that run calls in the order in which they come; one that hangs is replaced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Call] = deque()
        self._running: dict[int, Call] = {}  # by thread

    def add(self, call: Call) -> None:
        with self._lock:
            self._waiting.append(call)
        self.fill()

    def fill(self) -> None:
        """Start threads for calls that wait; those of calls that are over, whether hanging or not, count no more."""
        with self._lock:
            self._running = {thread: call for thread, call in self._running.items() if not call.is_over}
            while self._waiting and len(self._running) < MAX_THREADS:
                call = self._waiting.popleft()
                thread = threading.Thread(target=self._work, args=(call,), name="environment", daemon=True)
                self._running[id(thread)] = call
                thread.start()

    def _work(self, call: Call) -> None:
        thread_id = id(threading.current_thread())
        while True:
            call.run()
            with self._lock:
                if self._running.get(thread_id) is not call:  # it was given up meanwhile
                    return
                if not self._waiting:
                    del self._running[thread_id]
                    return
                call = self._running[thread_id] = self._waiting.popleft()


_WORKERS = _Workers()
_LOCK = threading.Lock()
_LOOPS: list[asyncio.AbstractEventLoop] = []  # the one that is used


def _running_loop() -> asyncio.AbstractEventLoop:
    """The loop of all coroutines, which runs in a separate thread."""
    with _LOCK:
        if not _LOOPS:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
            _LOOPS.append(loop)
        return _LOOPS[0]


def _leave_if_stuck(loop: asyncio.AbstractEventLoop) -> None:
    """Use another loop from now on if a coroutine blocks this one."""
    if loop not in _LOOPS:
        return
    reacted = threading.Event()
    loop.call_soon_threadsafe(reacted.set)
    if not reacted.wait(PATIENCE):
        with _LOCK:
            if loop in _LOOPS:
                _LOOPS.remove(loop)
