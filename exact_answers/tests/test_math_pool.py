"""math-verify's processes: killed, replaced, out of memory, forked, and never at the cost of another pair."""

from __future__ import annotations

import os
import signal

import pytest

from exact_answers import MathChecker
from exact_answers.checker import COUNTERS
from exact_answers.symbolic.pool import SymbolicPool, needs_math_verify

EASY = ("6", r"\sum_{k=1}^{3}k")  # answer and gold answer
SLOW = (r"\int_0^1 \sin(\sin(\sin(x^5)))e^{x^x}dx", r"\int_0^1 x^{x^{x^x}}dx")
ENOUGH = 240.0  # seconds, for what takes milliseconds
SHORT = 0.1  # for what takes minutes


def test_a_pair_that_takes_too_long_costs_its_timeout_and_nothing_else() -> None:
    pool = SymbolicPool(num_workers=1, timeout=ENOUGH)
    assert pool.compare([EASY]) == ["same"]
    (first,) = pool._workers
    pool.timeout = SHORT
    assert pool.compare([SLOW]) == ["timeout"]
    pool.timeout = ENOUGH
    assert first.process.returncode == -signal.SIGKILL
    assert pool.compare([EASY, ("7", EASY[1]), EASY]) == ["same", "different", "same"]
    pool.close()


def test_outcomes_keep_their_order_over_several_processes() -> None:
    pool = SymbolicPool(num_workers=2, timeout=ENOUGH)
    pairs = [(str(total), rf"\sum_{{k=1}}^{{{n}}}k") for n, total in ((3, 6), (4, 9), (4, 10), (5, 15), (6, 1))]
    assert pool.compare(pairs) == ["same", "different", "same", "same", "different"]
    assert len(pool._workers) == 2
    pool.close()
    assert pool._workers == []


def test_a_process_without_memory_or_life_is_replaced() -> None:
    pool = SymbolicPool(num_workers=1, timeout=ENOUGH, memory_limit=32 * 2**20)
    assert pool.compare([EASY, EASY]) == ["crash", "crash"]
    pool.memory_limit = 2**31
    assert pool.compare([EASY]) == ["same"]
    pool._workers[0].process.kill()
    pool._workers[0].process.wait()
    assert pool.compare([EASY, EASY])[1] == "same"
    pool.close()


@pytest.mark.parametrize("pair", [(r"\sum", "6"), (r"\sum_{k=1}^{3}k+\text{x}", "6"), (r"\sum_{k=1}^{3}q(k)", "6")])
def test_what_math_verify_reads_in_part_is_not_compared(pair: tuple[str, str]) -> None:
    pool = SymbolicPool(timeout=ENOUGH)
    assert pool.compare([pair]) == ["unparsed"]
    pool.close()


def test_only_what_needs_math_verify_is_sent_there() -> None:
    assert needs_math_verify(*EASY)
    assert not needs_math_verify("x+1", "1+x")
    assert not needs_math_verify(r"\sum_{k=1}^{3}k", r"\text{six}")


def test_a_fork_starts_processes_of_its_own() -> None:
    pool = SymbolicPool(timeout=ENOUGH)
    assert pool.compare([EASY]) == ["same"]
    child = os.fork()
    if child == 0:
        right = pool.compare([EASY]) == ["same"]
        pool.close()
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.compare([EASY]) == ["same"]
    pool.close()


def test_neither_alarms_nor_signal_handlers_are_touched() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGCHLD, signal.SIGINT)]
    signal.setitimer(signal.ITIMER_REAL, 100_000.0)
    try:
        assert MathChecker(timeout=ENOUGH).check([r"\boxed{6}"], [EASY[1]]) == [True]
        assert 90_000 < signal.getitimer(signal.ITIMER_REAL)[0] < 100_000
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    assert [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGCHLD, signal.SIGINT)] == handlers


def test_counters() -> None:
    checker = MathChecker(timeout=ENOUGH)
    completions = ["none", r"\boxed{}", r"\boxed{5}", r"\boxed{6}", r"\boxed{\sum}"]
    assert checker.check(completions, ["5", "5", "5", EASY[1], "n"]) == [False, False, True, True, False]
    checker.pool.timeout = SHORT
    assert checker.check([rf"\boxed{{{SLOW[0]}}}"], [SLOW[1]]) == [False]
    counts = {"checks": 6, "no_box": 2, "fallbacks": 3, "unparsed": 1, "timeouts": 1, "crashes": 0, "errors": 0}
    assert checker.take_counters() == counts
    assert checker.take_counters() == dict.fromkeys(COUNTERS, 0)
    checker.close()


@pytest.mark.parametrize("arguments", [{"num_workers": 0}, {"timeout": 0}])
def test_bad_arguments(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"num_workers must be at least 1 and timeout above 0"):
        MathChecker(**arguments)
