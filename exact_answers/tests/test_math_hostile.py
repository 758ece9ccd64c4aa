"""Hostile completions neither crash nor hang the checker, are not paid, and leave no memory behind."""

from __future__ import annotations

import gc
import resource
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile import Hostile, hostile_completions

from exact_answers import MathChecker, answer_kind
from exact_answers.boxes import extract_boxed
from exact_answers.compare import Comparison

HOSTILE = hostile_completions()
ENOUGH, TIMEOUT = 240.0, 1.0  # seconds for what takes milliseconds, and for what takes minutes


@pytest.fixture(scope="module")
def checker() -> Iterator[MathChecker]:
    checker = MathChecker(num_workers=1, timeout=ENOUGH)
    assert checker.check([r"\boxed{6}"], [r"\sum_{k=1}^{3}k"]) == [True]
    yield checker
    checker.close()


def test_there_are_enough_of_them() -> None:
    assert len({hostile.completion for hostile in HOSTILE}) >= 150
    assert len({hostile.name for hostile in HOSTILE}) == len(HOSTILE)


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
def test_is_not_paid_and_takes_no_time(hostile: Hostile) -> None:
    """Without math-verify: processor seconds, as the machine may be busy."""
    start = time.process_time()
    boxed = extract_boxed(hostile.completion)
    assert boxed is None or not Comparison().same(boxed, hostile.gold)
    assert time.process_time() - start < 1.0
    answer_kind(hostile.completion)  # as a gold answer
    assert time.process_time() - start < 2.0


@pytest.mark.slow
def test_all_together_cost_their_timeouts_and_pay_nothing(
    checker: MathChecker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker.take_counters()
    monkeypatch.setattr(checker.pool, "timeout", TIMEOUT)
    paid = checker.check([h.completion for h in HOSTILE], [h.gold for h in HOSTILE])
    assert [h.name for h, right in zip(HOSTILE, paid, strict=True) if right] == []
    counts = checker.take_counters()
    assert counts["checks"] == len(HOSTILE)
    assert 1 <= counts["timeouts"] <= counts["fallbacks"] <= 12
    assert list(folder.iterdir()) == []  # nothing was executed
    monkeypatch.undo()
    assert checker.check([r"\boxed{6}", r"\boxed{5}"], [r"\sum_{k=1}^{3}k", "5"]) == [True, True]


def test_memory_is_given_back(checker: MathChecker) -> None:
    cheap = [h for h in HOSTILE if not h.name.startswith(("symbolic", "long_texts"))]
    texts, golds = [h.completion for h in cheap], [h.gold for h in cheap]
    for _ in range(2):  # caches fill up
        checker.check(texts, golds)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(5):
            checker.check(texts, golds)
        gc.collect()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 200_000
    assert peak - before < 50_000_000
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4_000_000  # kilobytes, of any child so far
