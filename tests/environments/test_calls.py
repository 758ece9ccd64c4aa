"""Calls: results, errors and time limits of functions and coroutines, none of which harms another call."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch

from sparse_rl_lightning.environments import calls
from sparse_rl_lightning.environments.calls import CallFailure, CallTimeout, start


def plain(value: Any) -> Any:
    return value


async def coroutine(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


def returns_coroutine(value: Any) -> Any:
    return coroutine(value)


def raises(error: BaseException) -> Any:
    raise error


async def raises_later(error: BaseException) -> Any:
    await asyncio.sleep(0)
    raise error


def returns_raising(error: BaseException) -> Any:
    return raises_later(error)


@pytest.mark.parametrize("timeout", [None, 20.0])
@pytest.mark.parametrize("function", [plain, coroutine, returns_coroutine])
def test_results_come_back(function: Any, timeout: float | None) -> None:
    running = [start(function, n, timeout=timeout) for n in range(200)]
    assert [call.result() for call in running] == list(range(200))


def test_a_call_in_this_thread_puts_back_what_it_changed_at_once() -> None:
    """Of threads it is put back behind all calls, by those who wait for them."""
    default = torch.get_default_dtype()
    start(torch.set_default_dtype, torch.float64)
    assert torch.get_default_dtype() == default


@pytest.mark.parametrize("timeout", [None, 20.0])
@pytest.mark.parametrize("error", [ValueError("a"), SystemExit(3), asyncio.CancelledError()], ids=repr)
@pytest.mark.parametrize("function", [raises, raises_later, returns_raising])
def test_errors_are_of_their_call_alone(function: Any, error: BaseException, timeout: float | None) -> None:
    if function is not raises_later and timeout is None and isinstance(error, asyncio.CancelledError):
        function = raises_later
    broken, other = start(function, error, timeout=timeout), start(coroutine, 1, timeout=20.0)
    with pytest.raises(CallFailure, match="raised"):
        broken.result()
    assert other.result() == 1
    assert start(returns_coroutine, 2, timeout=20.0).result() == 2


def test_a_coroutine_that_takes_too_long_is_cancelled() -> None:
    seen = threading.Event()

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.set()
            raise

    for function in (waits, lambda: waits()):
        seen.clear()
        with pytest.raises(CallTimeout, match=r"more than 0\.2 seconds"):
            start(function, timeout=0.2).result()
        assert seen.wait(20)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_loop_that_is_blocked_is_left(hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: others that wait for it do not wait for its reaction again."""
    monkeypatch.setattr(calls, "PATIENCE", 0.5)
    go_on = threading.Event()

    async def blocks() -> None:
        go_on.wait(60)

    function: Any = (lambda: blocks()) if hidden else blocks
    stuck = [start(function, timeout=0.2) for _ in range(6)]
    begin = time.monotonic()
    for call in stuck:
        with pytest.raises(CallTimeout):
            call.result()
    assert time.monotonic() - begin < 3
    assert start(coroutine, 5, timeout=20.0).result() == 5
    go_on.set()


def test_threads_are_limited_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call's time counts from its own beginning, and those that hang give way to those that wait."""
    monkeypatch.setattr(calls, "MAX_THREADS", 2)
    monkeypatch.setattr(calls, "_WORKERS", calls._Workers())
    go_on = threading.Event()
    hanging = [start(go_on.wait, 60, timeout=0.3) for _ in range(2)]
    waiting = [start(plain, n, timeout=0.3) for n in range(5)]
    for call in hanging:
        with pytest.raises(CallTimeout):
            call.result()
    assert [call.result() for call in waiting] == list(range(5))
    most, lock, alive = [0], threading.Lock(), [0]

    def counts() -> None:
        with lock:
            alive[0] += 1
            most[0] = max(most[0], alive[0])
        time.sleep(0.05)
        with lock:
            alive[0] -= 1

    running = [start(counts, timeout=20.0) for _ in range(6)]
    go_on.set()  # the threads that were given up end, and take no more calls
    for call in running:
        call.result()
    assert most[0] == 2


def test_errors_are_shown_safely() -> None:
    class Bad(Exception):
        def __repr__(self) -> str:
            raise RuntimeError

    assert calls.shown(Bad()) == "Bad"
    assert calls.shown(ValueError("\x1b[2J" + "a" * 500)).startswith("ValueError('\\x1b[2Jaa")
    assert len(calls.shown("a" * 500)) < 210


def test_one_answer_ends_the_waiting_for_any() -> None:
    slow, fast = start(time.sleep, 3, timeout=20.0), start(plain, 1, timeout=20.0)
    before = time.monotonic()
    calls.wait_for_any([slow, fast])
    assert time.monotonic() - before < 2
    assert fast.is_over


def test_calls_that_hang_unawaited_give_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as an environment's close(): those behind it have no time limit until their turn comes."""
    monkeypatch.setattr(calls, "MAX_THREADS", 2)
    monkeypatch.setattr(calls, "PATIENCE", 0.05)
    monkeypatch.setattr(calls, "_WORKERS", calls._Workers())
    go_on, found = threading.Event(), list[Any]()
    for _ in range(2):
        start(go_on.wait, 60, timeout=0.1)
    waiting = [start(plain, n, timeout=20.0) for n in range(5)]
    thread = threading.Thread(target=lambda: found.extend(call.result() for call in waiting), daemon=True)
    thread.start()
    thread.join(3)
    assert found == list(range(5))
    go_on.set()
