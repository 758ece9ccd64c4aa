"""``docs/cards.yaml``: every row is what the command writes for that model and card, and what its plan says of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from docs.predictions import CARDS, COLUMNS, LENGTH, card_row, figures, kept_cards
from sparse_rl_lightning.cli import main as train
from sparse_rl_lightning.cli.plan import job_of, main
from sparse_rl_lightning.planning import card_of
from sparse_rl_lightning.planning.memory import CONTEXT, slot_size, states
from sparse_rl_lightning.planning.propose import ALL_STEPS
from tests.docs.test_configs import read, shrunk, tiny_policy

__all__ = ["tiny_policy"]  # a fixture
ROWS = kept_cards()
every_card = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0].split('/')[1]}-{row[1]}")


def test_every_model_has_every_card() -> None:
    wanted = {(f"Qwen/Qwen3-{size}B", f"{memory}GB") for size in ("1.7", "4", "8") for memory in (24, 48, 80, 141)}
    assert {(model, memory) for model, memory, *_ in ROWS} == {*wanted, ("Qwen/Qwen2.5-7B", "80GB")}
    assert {len(row) for row in ROWS} == {len(COLUMNS)}


def test_the_figures_of_a_plan_are_found() -> None:
    page = (CARDS.parent / "one_card.md").read_text("utf-8")
    shown = page.partition("```text\nGB per GPU")[2].partition("```")[0]
    expected = ["18.1", "9.7", "61.0", "1 min 08 s", "31.1 s", "5.9"]
    assert figures(shown) == figures(re.sub("^", "# ", shown, flags=re.MULTILINE)) == expected


@pytest.mark.slow
@pytest.mark.timeout(900)  # a proposal is many predictions, each of which walks through all layers
@every_card
def test_its_command_writes_what_its_row_says(
    row: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_policy: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path, (_, memory, *_) = tmp_path / "card.yaml", row
    assert card_row(*row[:2], path) == row
    head = path.read_text("utf-8")
    job, card = job_of(["--config", str(path)]), card_of(memory=memory)
    assert (job.length, job.num_steps) == (LENGTH, ALL_STEPS)
    assert job.rollout.num_slots is not None
    assert CONTEXT + states(job).total + slot_size(job).of(job.rollout.num_slots) < card.memory
    assert "All figures are predicted, none measured on a GPU" in head
    assert ("In the host's memory besides: " in head) == (job.learner.gradient_checkpointing == "offload")
    capsys.readouterr()
    plan = main(["--config", str(path), "--memory", memory])
    lines = [re.sub("^# ?", "", line) for line in head.splitlines() if line.startswith("#")]
    predicted = "\n".join(lines[next(i for i, line in enumerate(lines) if line.startswith("GB per GPU")) :])
    assert plan.fits
    assert plan.text == capsys.readouterr().out.strip() == predicted
    monkeypatch.chdir(tmp_path)
    cli = train(["fit", "--config", str(path), *shrunk(read(path), tmp_path, tiny_policy)])
    assert cli.trainer.global_step == 1
