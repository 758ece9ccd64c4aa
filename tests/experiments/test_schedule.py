"""The schedule's benchmark: which schedule meets the fixed budget, and what is said of finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.common.pages import insert
from experiments.schedule import __main__ as command
from experiments.schedule.calibrated import Tails, calibration_table
from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.calibration.calibrate import Calibration
from sparse_rl_lightning.calibration.table import Cell, choose

SIZES = {"buffer": 4, "num_sinks": 0, "window": 2}
TAILS = {8: [0.9, 0.2, 0.1], 16: [0.95, 0.9, 0.4], 24: [1.0, 1.0, 0.9]}  # by bin of 16 tokens


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    """What a calibration leaves: a table, and dense completions of 30 and 40 tokens behind prompts of 6."""
    table = {b: [Cell(100, v, v, v, v, v, v) for v in values] for b, values in TAILS.items()}
    found = Calibration(table, choose(table, 0.85, 16), ceiling=1.0, target=0.85, bin_size=16)
    found.write(tmp_path)
    (tmp_path / "parts/dense").mkdir(parents=True)
    lengths = torch.cat([torch.arange(6, 36), torch.arange(6, 46)]).to(torch.int32)
    owners = torch.tensor([0] * 30 + [1] * 40, dtype=torch.int32)
    save_file({"lengths": lengths, "sequences": owners}, tmp_path / "parts/dense/part_0000.safetensors")
    return tmp_path


def held_by_hand(budget: Any, prompt: int, tokens: int) -> list[int]:
    held, read = prompt, []
    for fed in range(prompt + 1, prompt + tokens + 1):
        held += 1
        read.append(held)
        own = budget if isinstance(budget, int) else budget.at(fed)
        held = own if held >= own + 4 else held
    return read


def test_the_schedule_is_the_best_that_costs_no_more(calibration: Path) -> None:
    found = command.plan(calibration, 16, SIZES, 16)
    assert found.schedule == LengthSchedule([0, 16], [8, 16])  # 24 from 32 tokens on would cost too much
    assert found.target == pytest.approx(0.4)
    for arm, budget in (("fixed", 16), ("schedule", found.schedule)):
        read = held_by_hand(budget, 6, 30) + held_by_hand(budget, 6, 40)
        assert found.entries[arm] == pytest.approx(sum(read) / len(read))
    assert found.entries["schedule"] <= found.entries["fixed"]
    with pytest.raises(ValueError, match="no schedule costs as little as a fixed budget of 2"):
        command.plan(calibration, 2, SIZES, 16)


def test_a_schedule_is_told_by_its_own_check(calibration: Path, tmp_path: Path) -> None:
    """Its budgets' tails alone say nothing of it; lengths that hardly any sequence has do not count."""
    table = {b: [Cell(100, v, v, v, v, v, v) for v in values] for b, values in TAILS.items()}
    free, worse = tmp_path / "free", [Cell(100, v, v, v, v, v, v) for v in (0.5, 0.0003, 0.0001)]
    free.mkdir()
    for folder, check in ((calibration, table[16]), (free, worse)):
        Calibration(table, choose(table, 0.85, 16), 1.0, 0.85, 16, check).write(folder)
    tails = [Tails.read(folder) for folder in (calibration, free)]
    assert tails[0].worst == {"8": 0.1, "16": 0.4, "24": 0.9, "schedule": 0.4}
    rows = str(calibration_table(*tails, lambda budget: 7.0 if isinstance(budget, int) else 8.0)).splitlines()
    assert "| 16, fixed | 7.0 | 0.400 |" in rows
    assert "| rising: 8 from 0, 16 from 16, 24 from 32 | 8.0 | 0.400 |" in rows
    assert "| chosen bin by bin: 8 from 0, 16 from 16, 24 from 32 | 8.0 | 0.0001 |" in rows


def test_a_run_that_lost_half_of_its_reward_has_collapsed() -> None:
    def run(rewards: list[float]) -> Any:
        summary = {"after": {"dense": 0.5, "sparse": 0.4}, "rejection_rate": 0.1, "kv_saving_integral": 0.2}
        return command.Outcome.of("fixed", 0, {"summary": summary, "history": [{"reward": r} for r in rewards]})

    assert not run([0.1] * 20 + [0.4] * 40).collapsed
    lost = run([0.1] * 20 + [0.4] * 20 + [0.1] * 20)
    assert lost.collapsed
    assert (lost.best, lost.reward) == pytest.approx((0.4, 0.1))


def test_the_page_says_what_was_found(calibration: Path, tmp_path: Path) -> None:
    own = command.plan(calibration, 16, SIZES, 16)
    outcomes = [command.Outcome(arm, 0, 0.5, 0.25, 0.4, 0.6, 0.1, 0.2) for arm in command.ARMS]
    page = tmp_path / "sparrow.md"
    page.write_text(f"before\n{command.BEGIN}\nold\n<!-- until here -->\nafter\n")
    insert(page, command.page(own, outcomes, 240, SIZES), command.BEGIN)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "\nold\n" not in text
    assert "| schedule | 0 | 0.500 | 0.250 | 0.400 | 0.600 | 10.0% | 20.0% | no |" in text
    assert "schedule: accuracy 0.500 with the full cache and 0.250 with the compressed one, 0 of 1 runs" in text


def test_settings_are_those_of_the_calibration() -> None:
    compressor, bin_size = command.configured()
    assert command.entries_per_token(30, [(12, 40)], compressor) > 0  # R-KV takes them
    assert bin_size == 4
