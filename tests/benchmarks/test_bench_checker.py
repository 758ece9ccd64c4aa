"""The checker's benchmark: its made-up sets are right, it prints what it promises, and rational answers are quick."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from benchmark_files import GOLDS, write_benchmarks

from benchmarks.checker import __main__ as command
from sparse_rl_lightning.rewards.math import MathChecker


def step_of_a_loop() -> float:
    """Processor seconds."""
    start, total = time.process_time(), 0
    for i in range(1_000_000):
        total += i * i % 7
    return (time.process_time() - start) / 1e6


def test_a_rational_answer_costs_less_than_ten_thousand_steps_of_a_loop() -> None:
    """In processor seconds, thousands in one; each gold answer once right, once wrong, nothing parsed before."""
    golds = command.rationals(1000)
    found = command.cases(golds)
    own = MathChecker()
    command.forget()
    start = time.process_time()
    right = own.check([completion for completion, _ in found], [gold for _, gold in found])
    seconds = time.process_time() - start
    assert seconds < len(found) * 10_000 * step_of_a_loop()
    assert all(right[:1000])
    assert sum(right[1000:]) < 10  # neighbors that happen to be equal
    assert own.take_counters()["fallbacks"] == 0


def test_conventions_are_compared_on_outputs(tmp_path: Path) -> None:
    """Five outputs of one problem, one strictly right and three leniently, with another grader's verdicts."""
    right, wrong = [r"\boxed{25}", r"\boxed{20+5=25}", r"\boxed{\sqrt{625}}"], ["The answer is 25.", r"\boxed{26}"]
    texts = [json.dumps({"idx": 0, "code": [text], "score": [text in right]}) for text in right + wrong]
    folders = write_benchmarks(tmp_path / "data"), tmp_path / "outputs" / "aime24"
    folders[1].mkdir(parents=True)
    (folders[1] / "test.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    assert GOLDS["aime24"] == ["025"]
    page = tmp_path / "page.md"
    with pytest.warns(UserWarning, match="published"):
        text = command.conventions(str(folders[0]), tmp_path / "outputs", page)
    assert text in page.read_text(encoding="utf-8")
    assert "| aime24 | 5 | 60.00 | 20.00 | 80.00 | 60.00 |" in text
    for kind in ("said, not boxed", "last side of a chain", "arithmetic not done"):
        assert f"| {kind} | 1 | 20.000 |" in text
    assert "| rounded decimal | 0 | 0.000 |" in text
    assert "| The answer is 5. |" in text
