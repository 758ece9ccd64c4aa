"""``configs/cards/``: every file is what its own command writes, and says of itself what its plan says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparse_rl_lightning.cli.plan import job_of, main
from sparse_rl_lightning.planning import Plan, card_of
from sparse_rl_lightning.planning.memory import CONTEXT, slot_size, states
from sparse_rl_lightning.planning.propose import ALL_STEPS

ROOT = Path(__file__).resolve().parents[2]
CARDS = sorted((ROOT / "configs" / "cards").glob("*.yaml"))
every_card = pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)


def test_every_model_has_every_card() -> None:
    wanted = {f"qwen3-{model}b-{memory}gb" for model in ("1.7", "4", "8") for memory in (24, 48, 80, 141)}
    assert {path.stem for path in CARDS} == {*wanted, "qwen2.5-7b-80gb"}


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


def predicted(head: str) -> str:
    """The plan in the comments at a file's head."""
    lines = [line.removeprefix("# ").removeprefix("#") for line in head.splitlines() if line.startswith("#")]
    return "\n".join(lines[next(i for i, line in enumerate(lines) if line.startswith("GB per GPU")) :])


@pytest.mark.slow  # a prediction walks through all layers
@every_card
def test_what_is_planned_of_it_is_what_was_proposed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(path)
    plan = main(["--config", str(path), "--memory", arguments[arguments.index("--memory") + 1]])
    assert plan.fits
    assert plan.text == capsys.readouterr().out.strip() == predicted(path.read_text("utf-8"))


@every_card
def test_its_cache_and_hours_are_what_its_head_says(path: Path) -> None:
    """The quick part of the same, for every card: neither needs the learner's passes."""
    arguments, head = command(path), path.read_text("utf-8")
    job = job_of(["--config", str(path)])
    assert job.rollout.num_slots is not None
    cache, card = slot_size(job).of(job.rollout.num_slots), card_of(memory=arguments[arguments.index("--memory") + 1])
    plan = Plan(job, card, {"cache": (cache, cache, cache)}, job.rollout.num_slots)
    assert job.num_steps == ALL_STEPS
    assert f"# {plan.caches}\n" in head
    assert "".join(f"# {line}\n" for line in plan.timing.splitlines()) in head


@pytest.mark.slow
@pytest.mark.timeout(900)  # a proposal is many predictions
@every_card
def test_its_command_writes_it(path: Path, folder: Path) -> None:
    assert main(command(path)).fits
    assert (folder / path.relative_to(ROOT)).read_text("utf-8") == path.read_text("utf-8")
