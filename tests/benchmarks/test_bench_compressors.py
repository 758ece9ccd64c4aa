"""The compressors' benchmark: texts go through the cache as in a rollout, the page says what was found."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.compressors import __main__ as command
from benchmarks.compressors import forced, methods, pages, quality, records
from sparse_rl_lightning import RolloutSampler, SamplingParams, compressors
from sparse_rl_lightning.budgets import Adaptive, Pyramid
from sparse_rl_lightning.calibration import gather_statistics
from sparse_rl_lightning.compressors import H2O, Compressor, FullKV, RandomEviction, SnapKV
from sparse_rl_lightning.testing import tiny_model

SIZES: dict[str, Any] = {"budget": 10, "buffer": 4, "num_sinks": 1, "window": 3}
SEEN_BY_NAME = {
    "QueryStatistics",
    "Compressor",
    "LearnedScore",
    "OldestTurns",
    "RandomAttention",
    "Smoothed",
}  # no methods of their own, those of others by their sizes, not before training, or for conversations


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(num_layers=3, initializer_range=0.3, eos_token_id=None)


@pytest.mark.parametrize(
    "compressor",
    [
        FullKV(), RandomEviction(**SIZES), H2O(**SIZES), SnapKV(**SIZES, budget_rule=Adaptive()),
        SnapKV(**SIZES, budget_rule=Pyramid(beta=2)),
    ],
    ids=["full", "random", "running state", "adaptive", "pyramid"],
)  # fmt: skip
def test_given_texts_see_what_a_rollout_sees(model: Any, compressor: Compressor) -> None:
    """A rollout's own texts, fed again, get the log-probabilities that the sampler noted."""
    params = SamplingParams(num_generations=1, max_completion_length=30, seed=3)
    rollout = RolloutSampler(model, compressor).generate([[5, 6, 7, 8], [9, 8, 7, 6], [1, 2, 3, 4]], params)
    given = forced.forced_logits(model, compressor, rollout.sequences, [4] * 3, seed=3)
    own = given.logits.log_softmax(-1).gather(-1, rollout.sequences[..., None]).squeeze(-1)
    mask = rollout.completion_mask
    assert mask[:, 4:34].all()
    torch.testing.assert_close(own[mask], rollout.sampler_logprobs[mask], atol=1e-5, rtol=0)
    # full at 14 tokens (Pyramid's last layer at 9), then every 4, up to 33 fed
    events = 0 if isinstance(compressor, FullKV) else 3 * len(range(14, 34, 4))
    if not isinstance(getattr(compressor, "budget_rule", None), Pyramid):
        assert len(given.timed.cuts) == events


def test_every_shipped_compressor_is_measured(model: Any) -> None:
    statistics = gather_statistics(model, torch.randint(2, 128, (2, 20)), torch.tensor([20, 20]))
    for prompt_length in (0, 8):
        made = methods.compressors(32, methods.SlotSizes(8, 1, 4), statistics, prompt_length)
        assert set(compressors.__all__) - SEEN_BY_NAME == {type(c).__name__ for c in made.values()}
        assert {c.protect_prompt for name, c in made.items() if name != "FullKV"} == {prompt_length > 0}
    assert list(methods.compressors(10, methods.SlotSizes(8, 1, 4), statistics, 8)) == ["FullKV"]


def test_texts_with_prompts_of_different_lengths(model: Any) -> None:
    texts = torch.randint(2, 128, (3, 24))
    both = forced.forced_logits(model, SnapKV(**SIZES, protect_prompt=True), texts, [3, 6, 4]).logits
    for row, prompt in enumerate((3, 6, 4)):
        own = forced.forced_logits(model, SnapKV(**SIZES, protect_prompt=True), texts[row : row + 1], [prompt]).logits
        assert not own[0, :prompt].any()
        torch.testing.assert_close(both[row, 6:], own[0, 6:], atol=1e-5, rtol=1e-5)


def measured(method: str, budget: int, value: float, protected: bool) -> Any:
    return quality.Quality(method, budget, value, value, value, 10 - value, 100.0, math.nan, protected)


def lines_of_a_task() -> list[Any]:
    """Texts without problems at three budgets, the smallest without room for a protected prompt."""
    rows = {"FullKV": 1.0, "RandomEviction": 0.5, "Better": 0.6, "Equal": 0.5, "Worse": 0.4}
    found = [measured(name, budget, value, False) for budget in (4, 8, 12) for name, value in rows.items()]
    better = {name: 0.55 if name == "RandomEviction" else value + 0.1 for name, value in rows.items()}
    return found + [measured(name, budget, value, True) for budget in (8, 12) for name, value in better.items()]


def test_numbers_below_random_are_marked() -> None:
    """Each beside random eviction with the prompt as open or protected as its own."""
    results = {"stories": lines_of_a_task()}
    table = pages.measure_table(results, pages.TAIL)
    assert table.header == ["", "stories, open", "stories, protected"]
    cells = {row[0]: list(row[1:]) for row in table.rows}
    assert cells["Worse"] == ["0.400↓", "0.500↓"]
    assert cells["Equal"] == ["0.500↓", "0.600"]
    assert cells["RandomEviction"] == ["0.500", "0.550"]
    less_is_better = [list(row[1:]) for row in pages.measure_table(results, pages.PERPLEXITY).rows]
    assert less_is_better[2:] == [["9.40", "9.30"], ["9.50↓", "9.40"], ["9.60↓", "9.50↓"]]
    chance = {row[0]: list(row[1:]) for row in pages.chance_table(results).rows}
    assert list(chance) == ["Better", "Equal", "Worse"]  # the best first
    assert chance["Equal"] == ["12 of 12", "0 of 8", "100"]
    assert chance["Worse"] == ["12 of 12", "8 of 8", "100"]
    assert chance["Better"] == ["0 of 12", "0 of 8", "100"]


def test_lines_of_a_file_are_what_was_measured(tmp_path: Path) -> None:
    own = records.Measured("stories", "64 texts.", "a machine", lines_of_a_task())
    records.write(tmp_path / "kept.jsonl", [own])
    assert "NaN" not in (tmp_path / "kept.jsonl").read_text()
    found = records.read(tmp_path / "kept.jsonl")["stories"]
    assert pages.chance_table({"": found.qualities}).untitled == pages.chance_table({"": own.qualities}).untitled
    assert math.isnan(found.qualities[0].accuracy)
    assert records.read(tmp_path / "none.jsonl") == {}


@pytest.mark.slow
def test_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept.jsonl"
    monkeypatch.setattr(
        sys, "argv", ["compressors", "--quick", "--threads=1", f"--kept={kept}", "--save", str(tmp_path)]
    )
    command.main()
    assert not kept.exists()  # its numbers have no meaning
    page = (tmp_path / "compressors.md").read_text()
    accuracy, tail = (line for line in page.splitlines() if line.startswith("| FullKV"))
    assert len(re.findall(r"\| [01]\.\d\d ", accuracy)) == 6  # three tasks with problems, open and protected
    assert tail.count("| 1.000 ") == 8  # and the stories
    assert f"torch {torch.__version__}" in page
    assert (tmp_path / "compressors.png").stat().st_size > 20_000


def test_page_is_written_from_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept.jsonl"
    own = [measured(name, budget, 0.5, False) for budget in (4, 8, 12) for name in ("FullKV", "RandomEviction")]
    records.write(kept, [records.Measured("stories", "64 texts.", "a machine", own)])
    monkeypatch.setattr(sys, "argv", ["compressors", "--finished", f"--kept={kept}", "--save", str(tmp_path)])
    command.main()
    page = (tmp_path / "compressors.md").read_text()
    assert "a machine" in page
    assert "| RandomEviction | 0.500 | – |" in page


def test_missing_models_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    names = {"--policy": "a", "--stories": "b", "--reductions": "c", "--countdown": "d"}
    arguments = [word for option, name in names.items() for word in (option, str(tmp_path / name))]
    monkeypatch.setattr(sys, "argv", ["compressors.py", f"--kept={tmp_path / 'kept.jsonl'}", *arguments])
    with pytest.raises(SystemExit, match="nothing to measure on"):
        command.main()
    said = capsys.readouterr().err
    assert f"sums: skipped, there is no model in {tmp_path / 'a'}; give --policy FOLDER" in said
    assert f"stories: skipped, there is no model in {tmp_path / 'b'}; give --stories FOLDER" in said
