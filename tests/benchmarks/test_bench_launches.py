"""What the host asks of a GPU stays below the counts of today, which work on it lowers."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import launches

SLOTS, LAYERS = 64, 4
SHAPE: dict[str, Any] = launches.SHAPES["Qwen2.5-1.5B"] | {"num_hidden_layers": LAYERS}
LIMITS = {  # launches, waits: what was counted last; lower them with the code, never raise them
    "decode step": (60, 0),
    "draw, greedy": (15, 0),
    "draw, temperature 1": (15, 0),
    "draw, top-k 50": (16, 0),
    "draw, top-p 0.95": (16, 0),
    "draw, min-p 0.05": (16, 0),
    "draw, 20 top log-probs": (17, 0),
    "compression, R-KV, all slots": (5, 0),
    "compression, R-KV, 8 scattered": (5, 0),
    "compression, SnapKV, all slots": (4, 0),
    "compression, SnapKV, 8 scattered": (4, 0),
    "compression, StreamingLLM, all slots": (4, 0),
    "compression, StreamingLLM, 8 scattered": (4, 0),
    "admission, 1 prompt x 8": (227, 0),
    "admission, 8 prompts x 8": (225, 0),
    "look": (3, 0),
    "look, stop strings": (9, 0),
}


def test_every_phase_has_limits() -> None:
    assert {name for name, _ in launches.phases(SHAPE, SLOTS)} == set(LIMITS)


@pytest.mark.parametrize("name", LIMITS)
def test_launches_and_waits_do_not_grow(name: str) -> None:
    found = dict(launches.phases(SHAPE, SLOTS))[name]()
    most_launches, most_waits = LIMITS[name]
    assert len(found.log) <= most_launches, found.by_file()
    assert found.waits.total() <= most_waits, found.waits
    if name.startswith("draw"):
        assert found.passes(2 * SLOTS * SHAPE["vocab_size"]) == 0  # nothing but the op reads the logits
        assert found.num_own == 1


@pytest.mark.slow
def test_whole_rollouts_wait_at_most_16_times_in_128_steps() -> None:
    """Compressions, refills and stop strings included."""
    found = launches.whole(24, 4, stop_strings=("a", "Z"))
    assert found.steps > 128
    assert 128 * found.idle <= 16 * found.steps
    assert found.behind > found.steps / 8 - 4  # the looks


def test_a_step_has_at_most_252_launches() -> None:
    """Of 28 layers: eight each, and 28 around them."""
    assert len(launches.step(launches.SHAPES["Qwen2.5-1.5B"], SLOTS).log) <= 252


def test_tables_have_a_row_for_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {name: shape | {"num_hidden_layers": 1} for name, shape in launches.SHAPES.items()}
    monkeypatch.setattr(launches, "SHAPES", small)
    whole, passes, files = launches.tables(8)
    assert [row[0] for row in whole.rows] == [name for name, _ in launches.phases(small["Qwen2.5-7B"], 8)]
    assert len(passes.rows) == len(launches.DRAWS)
    assert sum(int(row[1]) for row in files.rows) == int(whole.rows[0][1])
