"""LearnedEvictionGRPO with LearnedScore on two real processes: the network learns what it does on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_runs import STEPS, run, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Outcomes = dict[str, dict[str, Any]]
LEARNED: dict[str, Any] = {"learns_evictions": True, "letters": True, "strategy": "ddp"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process, which samples itself."""
    return train({"name": "alone", **LEARNED, "trainer": {"max_steps": 1}}, 1, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Two processes: whole, and in two parts."""
    folder = tmp_path_factory.mktemp("together")
    parts = str(folder / "parts")
    jobs = [
        {"name": "whole", **LEARNED, "checkpoints": str(folder / "whole")},
        {"name": "part", **LEARNED, "checkpoints": parts, "trainer": {"max_steps": 3}},
        {"name": "rest", **LEARNED, "checkpoints": parts, "ckpt_path": f"{parts}/last.ckpt"},
    ]
    return run(jobs, folder, 2, timeout=500)


def test_gradients_of_one_rank(alone: dict[str, Any], together: Outcomes) -> None:
    """Each rank draws for its own prompts by the numbers that one rank gives them, and gradients are averaged."""
    (want,), own = alone["gradients"], together["whole"]["gradients"][0]
    assert own.keys() == want.keys()
    # the first step moves the last layer alone: it begins at zero and hands nothing on to the one before
    assert any(value.abs().max() > 0 for name, value in want.items() if name.startswith("network."))
    for name, value in want.items():
        torch.testing.assert_close(own[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()))


def test_resume_is_bitwise(together: Outcomes) -> None:
    whole, rest = together["whole"]["weights"], together["rest"]["weights"]
    assert together["rest"]["global_step"] == STEPS
    assert whole.keys() == rest.keys()
    for name, value in whole.items():
        assert torch.equal(value, rest[name]), name
