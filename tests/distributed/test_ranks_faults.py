"""Two real processes, killed and resumed, fed by one process, more than before, and with many uneven steps."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import STEPS, run, statuses_of, train
from test_ranks import STRATEGIES, Outcomes, text, uneven

from sparse_rl_lightning.callbacks.guards.rank_watch import STATUS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # more than the processes that all tests share may take
SHARDING = [name for name in STRATEGIES if name != "ddp"]
THIRDS: dict[str, Any] = {  # three micro-batches to an optimizer step
    "settings": {"num_generations": 6, "steps_per_generation": 3},
    "trainer": {"accumulate_grad_batches": 3},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process, whose rollouts the others are fed."""
    folder = tmp_path_factory.mktemp("alone")
    outcome = train({"name": "alone", **THIRDS}, 1, folder)
    torch.save(outcome["sampled"], folder / "record.pt")
    return outcome | {"record": str(folder / "record.pt")}


@pytest.fixture(scope="module")
def together(alone: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What is killed has processes of its own; what goes on from that, and everything else, shares two."""
    folder = tmp_path_factory.mktemp("faults")
    single = [
        {"name": f"single-{name}", "strategy": name, "checkpoints": str(folder / f"single-{name}"), **steps(3)}
        for name in SHARDING
    ]
    run(single, folder, 1)
    jobs: list[dict[str, Any]] = []
    for name in STRATEGIES:
        place = {"strategy": name, "checkpoints": str(folder / f"killed-{name}"), "every": 2}
        statuses, texts = statuses_of([{"name": "killed", **place, "kill": 1}], folder, 2)
        assert statuses == [STATUS, -signal.SIGKILL], texts
        assert "Rank 1 has died. Rank 0 stops as well" in texts[0]
        jobs += [
            {"name": f"whole-{name}", "strategy": name},
            {"name": f"resumed-{name}", **place, "ckpt_path": str(folder / f"killed-{name}" / "last.ckpt")},
            {"name": f"thirds-{name}", "strategy": name, "record": alone["record"], **THIRDS},
            uneven(name, "SparseGRPO") | steps(24),
        ]
    jobs += [
        {"name": f"more-{name}", "strategy": name, "ckpt_path": str(folder / f"single-{name}" / "last.ckpt")}
        for name in SHARDING
    ]
    for name in ("zero2", "fsdp2"):
        parts = {"checkpoints": str(folder / f"parts-{name}"), "last_rank": {"own_parts": str(folder / f"own-{name}")}}
        full = {"checkpoints": str(folder / f"full-{name}"), "full_disk": 1}
        jobs += [
            {"name": f"{what}-{name}", "strategy": name, **own} for what, own in (("parts", parts), ("full", full))
        ]
    return run(jobs, folder, 2, timeout=1500) | {"folder": {"path": str(folder)}}


def steps(count: int) -> dict[str, Any]:
    return {"trainer": {"max_steps": count}}


@pytest.mark.parametrize("name", STRATEGIES)
def test_killed_and_resumed_bitwise(name: str, together: Outcomes) -> None:
    """From the checkpoint of step 2, in the fourth step: both rollouts and their rest come again."""
    whole, resumed = together[f"whole-{name}"], together[f"resumed-{name}"]
    assert (resumed["global_step"], len(resumed["gradients"])) == (STEPS, STEPS - 2)
    assert whole["weights"].keys() == resumed["weights"].keys()
    assert all(torch.equal(value, resumed["weights"][key]) for key, value in whole["weights"].items())


@pytest.mark.parametrize("name", STRATEGIES)
def test_accumulation_of_three_is_that_of_one_process(name: str, alone: dict[str, Any], together: Outcomes) -> None:
    outcome = together[f"thirds-{name}"]
    for own, want in zip(outcome["gradients"], alone["gradients"], strict=True):
        for key, value in want.items():
            torch.testing.assert_close(own[key], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()))
    for key, value in alone["weights"].items():
        torch.testing.assert_close(outcome["weights"][key], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", STRATEGIES)
def test_many_steps_of_different_lengths(name: str, together: Outcomes) -> None:
    outcome = together[f"uneven-SparseGRPO-{name}"]
    assert (outcome["global_step"], outcome["num_rollouts"]) == (24, 12)
    assert all(bool(value.isfinite().all()) for value in outcome["weights"].values())


@pytest.mark.parametrize("name", SHARDING)
def test_from_one_rank_to_two(name: str, together: Outcomes) -> None:
    """The rest of the rollout is dropped; training goes on from the weights of the third step."""
    outcome = together[f"more-{name}"]
    assert (outcome["global_step"], len(outcome["gradients"])) == (STEPS, STEPS - 3)
    assert "this run has 2: the rest of its last rollout" in text(together)


@pytest.mark.parametrize("name", ["zero2", "fsdp2"])
def test_parts_that_rank_zero_does_not_see_replace_nothing(name: str, together: Outcomes) -> None:
    folder = Path(together["folder"]["path"])
    assert together[f"parts-{name}"]["global_step"] == STEPS
    kept = torch.load(folder / f"parts-{name}" / "last.ckpt" / "trainer.pt", weights_only=True)
    assert kept["global_step"] == 2
    assert "could not be saved: rank 0 does not see 1 of" in text(together)


@pytest.mark.parametrize("name", ["zero2", "fsdp2"])
def test_a_full_disk_of_one_rank_costs_checkpoints_and_nothing_else(name: str, together: Outcomes) -> None:
    folder = Path(together["folder"]["path"]) / f"full-{name}"
    assert together[f"full-{name}"]["global_step"] == STEPS
    assert torch.load(folder / "last.ckpt" / "trainer.pt", weights_only=True)["global_step"] == 2
    assert not list((folder / ".incomplete").iterdir())
    assert f"{folder}/epoch=0-step=3.ckpt could not be saved: rank 1: [Errno 27] File too large" in text(together)
