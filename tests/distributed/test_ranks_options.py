"""Two real processes: what can be asked of sharding beside the strategy, signals, full disks, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import STEPS, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # more than the processes that all tests share may take
Outcomes = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("options")
    return run(described(folder), folder, 2, timeout=900) | {"folder": {"path": str(folder)}}


def described(folder: Path) -> list[dict[str, Any]]:
    """One job after the other, for the same two processes."""
    jobs: list[dict[str, Any]] = [
        {"name": "kept", "strategy": "zero3"},
        {"name": "freed", "strategy": "zero3", "sharding": {"keep_shadow": False}},
        {"name": "half", "strategy": "zero3", "sharding": {"shadow_dtype": "bfloat16"}},
    ]
    for name in ("ddp", "zero2"):
        place = {"strategy": name, "checkpoints": str(folder / f"told-{name}")}
        jobs += [
            {"name": f"whole-{name}", "strategy": name},
            {"name": f"told-{name}", **place, "every": STEPS, "terminate": 1},
            {"name": f"later-{name}", **place, "ckpt_path": str(folder / f"told-{name}" / "last.ckpt")},
        ]
    jobs += [
        {"name": "full", "strategy": "zero2", "checkpoints": str(folder / "full"), "full_disk": 1},
        {"name": "offload2", "strategy": "zero2-offload"},
        {"name": "offload3", "strategy": "zero3-offload"},
    ]
    return jobs


def test_a_long_step_is_told_of_with_the_numbers_of_the_rank_that_made_it(tmp_path: Path) -> None:
    """With ``loss.delta`` no step is long: there it is the ratio by itself, once, if nothing corrects the eviction."""
    one: dict[str, Any] = {"long_steps": 1, "lr": 1e-4, "trainer": {"max_steps": 4}}
    jobs = [
        job
        for name in ("ddp", "zero2")
        for job in (
            {"name": name, "strategy": name, **one, "settings": {"num_iterations": 1}},
            {
                "name": f"bounded-{name}", "strategy": name, **one,
                "settings": {"num_iterations": 1, "delta": 2.0}, "corrected": False,
            },
        )
    ]  # fmt: skip
    for name, outcome in run(jobs, tmp_path, 2).items():
        (told,) = [text for text in outcome["warnings"] if "optimizer step" in text]
        said = "The largest staleness ratio of optimizer step" if "bounded" in name else "times as long as usual"
        assert said in told, name
        assert "staleness ratio is 1.6e+05" in told or "is 1.6e+05: tokens" in told, name


def test_a_shadow_that_is_given_back_changes_nothing(together: Outcomes) -> None:
    kept, freed = together["kept"], together["freed"]
    assert kept["shadow"] > 0
    assert freed["shadow"] == 0
    assert freed["metrics"]["sharding/shadow_bytes"] == kept["metrics"]["sharding/shadow_bytes"] == kept["shadow"]
    assert all(torch.equal(value, freed["weights"][name]) for name, value in kept["weights"].items())


def test_a_shadow_in_half_precision(together: Outcomes) -> None:
    """Half the bytes, and another sampler than the learner: the mismatch is no longer rounding alone."""
    kept, half = together["kept"], together["half"]
    assert half["metrics"]["sharding/shadow_bytes"] == half["shadow"] == kept["shadow"] / 2
    assert any(not torch.equal(value, half["weights"][name]) for name, value in kept["weights"].items())
    assert all(bool(value.isfinite().all()) for value in half["weights"].values())


@pytest.mark.parametrize("name", ["ddp", "zero2"])
def test_a_signal_to_one_rank_stops_both_and_loses_nothing(name: str, together: Outcomes) -> None:
    whole, told, later = (together[f"{kind}-{name}"] for kind in ("whole", "told", "later"))
    assert told["status"] == 0
    assert 0 < told["global_step"] < STEPS
    assert (later["global_step"], len(later["gradients"])) == (STEPS, STEPS - told["global_step"])
    assert all(torch.equal(value, later["weights"][key]) for key, value in whole["weights"].items())


def test_full_disk_of_one_rank_costs_checkpoints_and_nothing_else(together: Outcomes) -> None:
    """Rank one cannot write its shards from the third step on."""
    folder = Path(together["folder"]["path"])
    assert all(torch.equal(v, together["full"]["weights"][k]) for k, v in together["whole-zero2"]["weights"].items())
    kept = torch.load(folder / "full" / "last.ckpt" / "trainer.pt", weights_only=True)
    assert kept["global_step"] == 2
    assert (folder / "rank0.txt").read_text().count("could not be saved: rank 1: ") == 1
    assert not list((folder / "full" / ".incomplete").iterdir())


@pytest.mark.parametrize("stage", [2, 3])
def test_offload_trains_as_without(stage: int, together: Outcomes) -> None:
    name = {2: "whole-zero2", 3: "kept"}[stage]
    for key, value in together[name]["weights"].items():
        torch.testing.assert_close(together[f"offload{stage}"]["weights"][key], value, rtol=0, atol=1e-6)


def test_resume_of_shards_on_fewer_ranks(together: Outcomes, tmp_path: Path) -> None:
    """The second step's checkpoint, of the disk that was full afterwards."""
    last = Path(together["folder"]["path"]) / "full" / "last.ckpt"
    state = tmp_path / "state"
    state.symlink_to(Path(together["folder"]["path"]) / "state")  # the account's key
    outcome = run([{"name": "fewer", "strategy": "zero2", "ckpt_path": str(last)}], tmp_path, 1)["fewer"]
    assert (outcome["global_step"], len(outcome["gradients"]), outcome["num_rollouts"]) == (STEPS, STEPS - 2, 3)
    said = (tmp_path / "rank0.txt").read_text()
    assert "of 2 rank(s) with ZeRO-2, this run has 1 with ZeRO-2: the weights are taken, the optimizer starts" in said
