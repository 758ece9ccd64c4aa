"""Whole rollouts that measured steps add up to: by hand, beside the one that was timed, and as the page says."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from benchmarks.rollout import modeled
from docs.quoted import measured

PAGE = Path(__file__).parents[2] / "docs" / "measured" / "gpu.md"


def kept_steps() -> modeled.Steps:
    cells = measured("../benchmarks/results/gpu-cells-1.5b.md", "Steps at given lengths")
    rows = measured("../benchmarks/results/gpu-memory.md", "Equal memory: 40 GB, Qwen2.5-1.5B, length 16,384")
    return modeled.Steps.of([*cells, *({**row, "batch": row["slots"], "length": "0"} for row in rows[1:])])


def test_seconds_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a millisecond for each sequence: three and one tokens, in one slot, in two, and in memory for one."""
    monkeypatch.setattr(modeled, "PROMPT", 2)
    batches: list[int] = []

    def cost(batch: int, tokens: float) -> float:
        batches.append(batch)
        return 1000.0 * batch

    assert modeled.seconds([3, 1], cost, slots=1) == 4.0
    assert batches == [1, 1]
    assert modeled.seconds([3, 1], cost, slots=2) == 2.0 + 2.0
    batches.clear()
    assert modeled.seconds([3, 3], cost, slots=2, tokens=7) == 6.0, "the second waits, begins where it was, and ends"
    assert batches == [2, 1, 1], "together while both fit"


def test_lengths_have_their_mean() -> None:
    lengths = modeled.completions(512, 958, 4096)
    assert statistics.fmean(lengths) == pytest.approx(958, rel=1e-3)
    assert max(lengths) == 4096
    assert lengths != sorted(lengths)


def test_the_rollout_that_was_timed_is_met_within_a_tenth() -> None:
    full, slots = measured("../benchmarks/results/gpu-whole-1.5b.md", "Whole rollouts, Qwen2.5-1.5B")[:2]
    steps, lengths = kept_steps(), modeled.completions(512, 958, 4096)
    reserving, compressed = (modeled.seconds(lengths, cost, 256) for cost in (steps.full, steps.compressed))
    assert reserving == pytest.approx(float(full["seconds"]), rel=0.12)
    assert compressed == pytest.approx(float(slots["seconds"]), rel=0.1)
    assert reserving / compressed == pytest.approx(float(slots["times as fast as FullKV"]), rel=0.05)


def test_the_page_says_what_whole_sequences_leave_of_the_last_token() -> None:
    full, slots, _ = measured("measured/gpu.md", "Equal memory")
    batch, rate = int(full["slots"]), float(slots["tokens/s"].replace(",", ""))
    middle = kept_steps().full(batch, batch * 8192)
    paged = 2 * batch / float(full["ms per step"]) * 1000
    text = " ".join(PAGE.read_text("utf-8").split())
    assert f"would take {middle:.1f} ms a step" in text
    assert f"leaves a factor of {rate / (batch / middle * 1000):.1f}." in text
    assert f"holds {2 * batch} and reads as much" in text
    assert f"That leaves {rate / paged:.1f}." in text
