"""RewardProcess: a reward function in a process of its own, which can be killed whatever it is doing.

A thread cannot be stopped from outside, and a backtracking regular expression does not even let another one run. The
process is a fork, because reward functions are lambdas, closures and objects that cannot be pickled. It gets batches as
our pickles and answers with JSON; nothing that it writes is unpickled.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from sparse_rl_lightning.rewards.base import Returned, RewardFailure, RewardFunction, RewardMistake, attempt

START_SECONDS = 60.0
"""Seconds a fork may take to be ready on a busy machine."""
LAST_SECONDS = 1.0
"""Seconds a process may take to end after closing its connection, before it is killed."""
LONGEST = 1e6
"""Seconds that a socket can wait, approximately; longer limits are cut to this."""

_LENGTH = struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1


class LostProcess(RewardFailure):
    """The process gave no answer: it took too long, or it ended."""


class RewardProcess:
    """Calls a reward function in a fork of this process, created on first use and after each that was lost.

    The function's state, random numbers and caches stay in that process between calls, and are lost with it. It has one
    thread for torch and no GPU, as CUDA does not survive a fork. It ends whenever and however this process ends.
    """

    def __init__(self, function: RewardFunction, name: str) -> None:
        self.function = function
        self.name = name
        self._children: list[_Child] = []
        self._owner = os.getpid()
        self._counts: Counter[str] = Counter()
        weakref.finalize(self, _end, self._children, self._owner)

    def judge(self, batch: Mapping[str, Sequence[Any]], timeout: float) -> list[Returned]:
        """The rewards of a batch.

        Raises:
            RewardMistake: For the reasons of :func:`attempt`, and if a column cannot be pickled.
            RewardFailure: For the reasons of :func:`attempt`; ``LostProcess`` without an answer in ``timeout`` seconds.
        """
        data = self._pickled(batch)
        child = self._running()
        try:
            answer = child.ask(data, len(batch["completions"]), timeout)
        except BaseException:  # the answer to an interrupted call would go to the next one
            self.close()
            raise
        self._counts.update(answer.get("counts", {}))
        if "mistake" in answer:
            raise RewardMistake(answer["mistake"])
        if "failure" in answer:
            raise RewardFailure(answer["failure"]) from _RemoteTraceback(answer["traceback"])
        rewards: list[Returned] = answer["rewards"]
        return rewards

    def take_counters(self) -> dict[str, float]:
        """The function's counts since the last call."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def close(self) -> None:
        """End the process; the next call starts a new one."""
        _end(self._children, self._owner)

    def _running(self) -> _Child:
        if os.getpid() != self._owner:  # we are a fork ourselves, the process is our parent's
            self._children, self._owner = [], os.getpid()
            weakref.finalize(self, _end, self._children, self._owner)
        if self._children and not self._children[0].is_alive():  # ended between two calls
            self.close()
        if not self._children:
            self._children.append(_start(self.function, self.name))
        return self._children[0]

    def _pickled(self, batch: Mapping[str, Sequence[Any]]) -> bytes:
        try:
            return pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise RewardMistake(
                f"The data cannot be handed to the process that reward_timeout gives the reward function {self.name}: "
                f"{ascii(error)[:200]}. Leave out what cannot be pickled, or set reward_timeout to null."
            ) from error


class _RemoteTraceback(Exception):
    """The traceback of a function that failed in its process, as text."""


class _Child:
    """Our side of a process."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection
        self.status: int | None = None

    def ask(self, data: bytes, count: int, timeout: float) -> dict[str, Any]:
        """Send a batch of ``count`` samples and wait for the answer."""
        deadline = time.monotonic() + timeout
        try:
            self._wait_until(deadline)
            self.connection.sendall(_LENGTH.pack(len(data)) + data)
            return _checked(json.loads(self.line(deadline)), count)
        except TimeoutError:
            raise LostProcess(f"gave no answer within {timeout:g} seconds") from None
        except (OSError, EOFError):
            raise LostProcess(f"ended its process{self._how()}") from None
        except (ValueError, RecursionError):
            raise LostProcess("wrote into its process's connection to us") from None

    def line(self, deadline: float) -> bytes:
        """The next line that the process writes."""
        said = bytearray()
        while not said.endswith(b"\n"):
            self._wait_until(deadline)
            part = self.connection.recv(1 << 20)
            if not part:
                raise EOFError
            said += part
        return bytes(said)

    def is_alive(self) -> bool:
        """Whether the process is still running."""
        if self.status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # someone else has waited for it
                pid, status = self.pid, 0
            self.status = status if pid else None
        return self.status is None

    def kill(self) -> None:
        """Kill the process and everything it has started."""
        if self.is_alive():
            for end in (os.killpg, os.kill):  # it may hang in a fork hook, without a group yet
                with suppress(ProcessLookupError):
                    end(self.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        self.connection.close()

    def _wait_until(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(min(left, LONGEST))

    def _how(self) -> str:
        until = time.monotonic() + LAST_SECONDS
        while self.is_alive() and time.monotonic() < until:
            time.sleep(0.001)
        if self.status is None:
            return "'s connection"
        if os.WIFSIGNALED(self.status):
            return f" by signal {os.WTERMSIG(self.status)} ({signal.strsignal(os.WTERMSIG(self.status))})"
        return f" with status {os.waitstatus_to_exitcode(self.status)}"


def _checked(answer: Any, count: int) -> dict[str, Any]:
    """An answer of :func:`_answer`, checked: foreign code in the process may have written something else.

    Raises:
        ValueError: If it is anything else.
    """
    match answer:
        case {"rewards": list(rewards), "counts": dict(counts)}:
            numbers = [reward for reward in rewards if not (reward is None or isinstance(reward, str))]
            is_ours = all(isinstance(number, float) for number in (*numbers, *counts.values()))
            is_ours = is_ours and len(rewards) == count and all(map(math.isfinite, numbers))
        case {"mistake": str()} | {"failure": str(), "traceback": str()}:
            is_ours = True
        case _:
            is_ours = False
    if not is_ours:
        raise ValueError
    return dict(answer)


def _start(function: RewardFunction, name: str) -> _Child:
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):  # buffered output would be written twice
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    parent, libc = os.getpid(), ctypes.CDLL(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forks with threads, which the child does not use
        try:
            pid = os.fork()
        except OSError as error:
            raise LostProcess(f"could not be given a process of its own ({error})") from error
    if pid == 0:
        try:
            ours.close()
            _leave(libc, parent)
            _serve(function, name, theirs)
        finally:
            os._exit(1)  # the child must not run the parent's cleanup
    theirs.close()
    child = _Child(pid, ours)
    try:
        child.line(time.monotonic() + START_SECONDS)
    except BaseException as error:
        child.kill()
        if isinstance(error, (OSError, EOFError)):
            raise LostProcess("could not be given a process of its own") from error
        raise
    return child


def _end(children: list[_Child], owner: int) -> None:
    if os.getpid() == owner:
        while children:
            children.pop().kill()


def _leave(libc: ctypes.CDLL, parent: int) -> None:
    """Detach the child from its parent after a fork."""
    if sys.platform == "linux":  # die with the parent, whose locks and rank connections it has
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()  # Ctrl-C goes to the trainer only; kill the group as a whole
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # schedulers send them to all processes, the trainer handles them
        signal.signal(number, _ignore)
    gc.freeze()  # collected objects might have finalizers for a GPU
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(1)  # other threads were not forked


def _ignore(*_: Any) -> None:
    """Do nothing; programs started from here do not inherit this, unlike SIG_IGN."""


def _serve(function: RewardFunction, name: str, connection: socket.socket) -> None:
    """Answer batch after batch, until the parent closes the connection."""
    connection.sendall(b"ready\n")
    with connection.makefile("rb") as questions:
        while len(length := questions.read(_LENGTH.size)) == _LENGTH.size:
            batch = pickle.loads(questions.read(_LENGTH.unpack(length)[0]))  # from the process that we are a fork of
            answer = _answer(function, name, batch)
            for stream in (sys.stdout, sys.stderr):
                with suppress(AttributeError, OSError, ValueError):
                    stream.flush()
            connection.sendall(json.dumps(answer).encode() + b"\n")


def _answer(function: RewardFunction, name: str, batch: dict[str, list[Any]]) -> dict[str, Any]:
    take: Callable[[], Mapping[str, float]] = getattr(function, "take_counters", dict)
    try:
        rewards = attempt(function, name, batch)
        return {"rewards": rewards, "counts": {key: float(value) for key, value in take().items()}}
    except RewardMistake as mistake:
        return {"mistake": str(mistake)}
    except BaseException as error:
        text = "".join(traceback.format_exception(error.__cause__ or error))
        shown = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text[-4000:])
        failure = str(error) if isinstance(error, RewardFailure) else f"raised {type(error).__name__}"
        return {"failure": failure, "traceback": f"\n{shown}"}
