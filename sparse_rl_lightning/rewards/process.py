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
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import torch

from sparse_rl_lightning.rewards.base import Returned, RewardFailure, RewardFunction, RewardMistake, attempt

START_SECONDS = 60.0
"""Seconds a fork may take to be ready on a busy machine."""
LAST_SECONDS = 1.0
"""Seconds a process may take to end after closing its connection, before it is killed."""
LONGEST = 1e6
"""Seconds that a socket can wait, approximately; longer limits are cut to this."""
MOST_BYTES = 2**28
"""Bytes of the longest answer."""

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
        self._child: _Child | None = None
        self._counts: Counter[str] = Counter()

    def judge(self, batch: Mapping[str, Sequence[Any]], timeout: float) -> list[Returned]:
        """The rewards of a batch.

        Raises:
            RewardMistake: For the reasons of :func:`attempt`, and if a column cannot be pickled.
            RewardFailure: For the reasons of :func:`attempt`; ``LostProcess`` without an answer in ``timeout`` seconds.
        """
        try:
            data = pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise RewardMistake(
                f"The data cannot be handed to the process that reward_timeout gives the reward function {self.name}: "
                f"{ascii(error)[:200]}. Leave out what cannot be pickled, or set reward_timeout to null."
            ) from error
        if self._child is None or not self._child.is_alive():  # it may have ended between two calls
            self.close()
            self._child = _start(self.function, self.name)
        try:
            answer = self._child.ask(data, len(batch["completions"]), timeout)
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
        if self._child is not None:
            self._child.kill()
            self._child = None


class _RemoteTraceback(Exception):
    """The traceback of a function that failed in its process, as text."""


# ---------------------------------------------------------------- our side


class _Child:
    """A process and our end of the connection to it; ``kill`` ends both, as do our own end and that of this object."""

    def __init__(self, process: BaseProcess, connection: socket.socket) -> None:
        self.process = process
        self.connection = connection
        self.owner = os.getpid()
        # not in a fork of ours, whose child it is not; a priority has it called before multiprocessing waits at exit
        self.kill = Finalize(self, _kill, (process, connection), exitpriority=1)

    def is_alive(self) -> bool:
        """Whether the process is still running, and ours: in a fork of this process it is our parent's."""
        return os.getpid() == self.owner and self.process.is_alive()

    def ask(self, data: bytes, count: int, timeout: float) -> dict[str, Any]:
        """Send a batch of ``count`` samples and wait for the answer."""
        deadline = time.monotonic() + timeout
        try:
            self.connection.settimeout(min(timeout, LONGEST))
            self.connection.sendall(data)
            return _checked(self.line(deadline), count)
        except TimeoutError:
            raise LostProcess(f"gave no answer within {timeout:g} seconds") from None
        except (OSError, EOFError):
            raise LostProcess(f"ended its process{self._how()}") from None
        except (ValueError, RecursionError):
            raise LostProcess("wrote into its process's connection to us") from None

    def line(self, deadline: float) -> bytes:
        """The next line that the process writes, however slowly, by a time of the monotonic clock."""
        text = bytearray()
        while not text.endswith(b"\n") and len(text) < MOST_BYTES:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.connection.settimeout(min(left, LONGEST))
            received = self.connection.recv(2**20)
            if not received:
                raise EOFError
            text += received
        return bytes(text)

    def _how(self) -> str:
        until = time.monotonic() + LAST_SECONDS
        while self.process.exitcode is None and time.monotonic() < until:  # join() believes one that has closed a pipe
            time.sleep(0.001)
        code = self.process.exitcode
        if code is None:
            return "'s connection"
        return f" with status {code}" if code >= 0 else f" by signal {-code} ({signal.strsignal(-code)})"


def _start(function: RewardFunction, name: str) -> _Child:
    ours, theirs = socket.socketpair()
    arguments = (function, name, ours, theirs, os.getpid(), ctypes.CDLL(None))
    child = _Child(multiprocessing.get_context("fork").Process(target=_serve, args=arguments), ours)
    try:
        with theirs, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads, which the child does not use
            child.process.start()
        child.line(time.monotonic() + START_SECONDS)
    except (OSError, EOFError, AssertionError) as error:  # the last where we are daemonic, and may have no children
        child.kill()
        raise LostProcess(f"could not be given a process of its own ({error})") from error
    return child


def _kill(process: BaseProcess, connection: socket.socket) -> None:
    """Kill a process and everything it has started, and close our end of the connection."""
    if process.is_alive():
        assert process.pid is not None
        for kill in (os.killpg, os.kill):  # it may hang in a fork hook, without a group yet
            with suppress(ProcessLookupError):
                kill(process.pid, signal.SIGKILL)
        process.join()
    connection.close()


def _checked(line: bytes, count: int) -> dict[str, Any]:
    """An answer of :func:`_answer`, checked: foreign code in the process may have written something else.

    Raises:
        ValueError: If it is anything else.
    """
    answer = json.loads(line)
    match answer:
        case {"rewards": list(rewards), "counts": dict(counts)} if len(rewards) == count:
            is_ours = all(map(_is_reward, rewards)) and all(isinstance(number, float) for number in counts.values())
        case {"mistake": str()} | {"failure": str(), "traceback": str()}:
            is_ours = True
        case _:
            is_ours = False
    if not is_ours:
        raise ValueError
    return dict(answer)


def _is_reward(value: object) -> bool:
    return value is None or isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))


# ---------------------------------------------------------------- the side of the process


def _serve(
    function: RewardFunction, name: str, theirs: socket.socket, connection: socket.socket, parent: int,
    libc: ctypes.CDLL,
) -> None:  # fmt: skip
    """Answer batch after batch, until the parent closes the connection."""
    try:
        theirs.close()
        _leave(libc, parent)
        connection.sendall(b"ready\n")
        with connection.makefile("rb") as questions:
            while True:
                answer = _answer(function, name, pickle.load(questions))  # from the process that we are a fork of
                for stream in (sys.stdout, sys.stderr):
                    with suppress(AttributeError, OSError, ValueError):
                        stream.flush()
                connection.sendall(json.dumps(answer).encode() + b"\n")
    finally:
        os._exit(1)  # the child must not run the parent's cleanup


def _leave(libc: ctypes.CDLL, parent: int) -> None:
    """Detach the child from its parent after a fork."""
    if sys.platform == "linux":  # die with the parent, whose locks and rank connections it has
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()  # Ctrl-C goes to the trainer only; kill the group as a whole
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # schedulers send them to all processes, the trainer handles them
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs started from here would inherit
    gc.freeze()  # collected objects might have finalizers for a GPU
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(1)  # other threads were not forked


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
