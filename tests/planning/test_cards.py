"""``configs/cards/``: every file is what its own command writes, and says of itself what its plan says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparse_rl_lightning.cli.plan import job_of, main
from sparse_rl_lightning.planning import card_of
from sparse_rl_lightning.planning.memory import CONTEXT, slot_size, states

ROOT = Path(__file__).resolve().parents[2]
CARDS = sorted((ROOT / "configs" / "cards").glob("*.yaml"))
every_card = pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)


def test_every_model_has_every_card() -> None:
    wanted = {f"qwen3-{model}b-{memory}gb" for model in ("1.7", "4", "8") for memory in (24, 48, 80, 141)}
    assert {path.stem for path in CARDS} == wanted


def command(path: Path) -> list[str]:
    """The arguments that the file says it was written by."""
    found = re.search(r"^# Written by `sparse-rl plan (.*)`\.$", path.read_text("utf-8"), re.M)
    assert found, path
    return found[1].split()


@every_card
def test_states_and_slots_leave_room(path: Path) -> None:
    """The quick half of the plan, and what the file says of the whole one, which is made below."""
    arguments = command(path)
    assert arguments[arguments.index("--output") + 1] == path.relative_to(ROOT).as_posix()
    memory = arguments[arguments.index("--memory") + 1]
    assert path.stem.endswith(f"-{memory.lower()}")
    job = job_of(["--config", str(path)])
    assert job.length == int(arguments[arguments.index("--length") + 1])
    assert job.rollout.num_slots is not None
    held = states(job).total + slot_size(job).of(job.rollout.num_slots)
    assert CONTEXT + held < card_of(memory=memory).memory
    head = path.read_text("utf-8")
    assert re.search(
        rf"^# Fits: ([\d.]+) GB of the {memory.removesuffix('GB')}\.0 GB of [a-z0-9-]+, \d\d%\.$", head, re.M
    )
    assert "All figures are predicted, none measured on a GPU" in head
    assert ("In the host's memory besides: " in head) == (job.learner.gradient_checkpointing == "offload")


@pytest.mark.slow
@every_card
def test_its_command_writes_it(path: Path, folder: Path) -> None:
    assert main(command(path)).fits
    assert (folder / path.relative_to(ROOT)).read_text("utf-8") == path.read_text("utf-8")
