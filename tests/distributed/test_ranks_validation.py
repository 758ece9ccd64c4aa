"""Two real processes: validation of rows that they do not share evenly, so that the second one repeats a row."""

from __future__ import annotations

from typing import Any

import pytest
from rank_runs import outcome_of, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Outcomes = dict[str, dict[str, Any]]
ONE_STEP = {"max_steps": 1, "limit_val_batches": 1.0, "num_sanity_val_steps": 0}
VALIDATED: dict[str, Any] = {  # after the one step of a rollout
    "letters": True,
    "val_rows": 5,  # two to a batch: the last batch of the second rank is a row again
    "settings": {"num_iterations": 1},
    "trainer": {**ONE_STEP, "val_check_interval": 2},
}
ALONE: dict[str, dict[str, Any]] = {
    "grpo": VALIDATED,
    "loaders": VALIDATED | {"own_loaders": True, "summary": True},
    "warm-up": {"warms_up": True, "trainer": ONE_STEP},
}
TOGETHER = {
    "ddp": ("grpo", "ddp"), "zero3": ("grpo", "zero3"), "loaders": ("loaders", "ddp"), "warm-up": ("warm-up", "ddp"),
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("alone")
    return {name: outcome_of({"name": name, **job}, 1, folder) for name, job in ALONE.items()}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    jobs = [{"name": name, "strategy": strategy, **ALONE[job]} for name, (job, strategy) in TOGETHER.items()]
    return run(jobs, tmp_path_factory.mktemp("together"), 2, timeout=600)


def validation(outcome: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in outcome["metrics"].items() if name.startswith("val")}


@pytest.mark.parametrize(("name", "measures"), [("ddp", 10), ("zero3", 10), ("warm-up", 2)])
def test_validation_is_that_of_one_rank(name: str, measures: int, together: Outcomes, alone: Outcomes) -> None:
    """Greedy, after the same step: means over the rows, each of which counts once."""
    expected = validation(alone[TOGETHER[name][0]])
    assert len(expected) == measures
    assert len(set(expected.values())) > 1
    assert validation(together[name]) == pytest.approx(expected, abs=1e-5)


def test_the_summary_measures_on_all_rows_of_ones_own_loader(together: Outcomes, alone: Outcomes) -> None:
    before = alone["loaders"]["before"]
    assert set(before) == {"dense", "sparse"}
    assert together["loaders"]["before"] == pytest.approx(before, abs=1e-5)
