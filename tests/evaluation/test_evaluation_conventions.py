"""An evaluation judges answers by both conventions and shows the one it is asked for first."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyarrow import parquet

from sparse_rl_lightning.cli import main
from sparse_rl_lightning.modules.evaluation import Evaluation
from sparse_rl_lightning.rewards import MathReward, boxed_math_reward
from sparse_rl_lightning.rollout import Generator
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

ROOT = Path("run") / "evaluation"
WRITTEN = [r"\boxed{2}", r"\boxed{1+1=2}", "The answer is 2.", r"\boxed{3}"]


@pytest.fixture
def file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A configuration whose policy writes an answer strictly right, two leniently right, and a wrong one."""
    tokenizer = character_tokenizer(string.printable)
    tiny_model("qwen2", vocab_size=len(tokenizer), hidden_size=32).save_pretrained("policy")
    tokenizer.save_pretrained("policy")
    Path("mine.jsonl").write_text(json.dumps({"problem": "1+1?", "answer": "2"}) + "\n", encoding="utf-8")
    own: dict[str, Any] = {
        "policy": {"class_path": "PretrainedPolicy", "init_args": {"path": "policy", "dtype": "float32"}}
    }
    own["sampling"] = {"num_generations": 4, "max_completion_length": 4}
    settings = {
        "model": {"class_path": "Evaluation", "init_args": own},
        "data": {"class_path": "MathBenchmarks", "init_args": {"own": {"mine": "mine.jsonl"}, "benchmarks": ["mine"]}},
        "trainer": {
            "accelerator": "cpu", "default_root_dir": "run", "logger": False, "enable_progress_bar": False,
            "enable_checkpointing": False, "enable_model_summary": False,
        },
    }  # fmt: skip
    Path("eval.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    monkeypatch.setattr(Generator, "texts", lambda self, rollout: WRITTEN)
    return "eval.yaml"


def stored() -> dict[str, Any]:
    return json.loads((ROOT / "dense" / "mine.json").read_text(encoding="utf-8"))


def test_both_conventions_are_measured_logged_and_written(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = main(["test", "--config", file]).trainer.callback_metrics
    for where in ("mine", "mean"):
        assert float(metrics[f"test/{where}/dense"]) == 0.25
        assert float(metrics[f"test/{where}/dense/strict"]) == 0.25
        assert float(metrics[f"test/{where}/dense/lenient"]) == 0.75
    assert (stored()["accuracy"]["mean"], stored()["lenient"]["mean"]) == (0.25, 0.75)
    table = parquet.read_table(ROOT / "dense" / "mine.parquet").to_pydict()
    assert table["correct"] == [True, False, False, False]
    assert table["correct_lenient"] == [True, True, True, False]
    assert table["extracted"] == ["2", "1+1=2", "2", "3"]
    assert re.search(r"dense +25\.0 \[.*\] +75\.0 \[", capsys.readouterr().out)


def test_answers_chooses_the_headline_and_the_results_are_taken_up(file: str) -> None:
    main(["test", "--config", file])
    before = (ROOT / "dense" / "mine.json").stat().st_mtime_ns
    metrics = main(["test", "--config", file, "--model.answers=lenient"]).trainer.callback_metrics
    assert float(metrics["test/mine/dense"]) == float(metrics["test/mean/dense"]) == 0.75
    assert float(metrics["test/mine/dense/strict"]) == 0.25
    assert (ROOT / "dense" / "mine.json").stat().st_mtime_ns == before  # both were measured already
    text = (ROOT / "results.txt").read_text(encoding="utf-8")
    assert re.search(r"dense +75\.0 \[.*\] +25\.0 \[", text)


def test_an_unknown_convention_is_refused_by_name() -> None:
    for make in (lambda: Evaluation("policy", answers="loose"), lambda: MathReward(answers="loose")):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="answers must be one of strict, lenient, got answers='loose'"):
            make()


def test_rewards_are_strict_unless_they_are_asked_otherwise() -> None:
    answer = ["2"] * 4
    for reward in (MathReward(), boxed_math_reward):
        assert reward([], WRITTEN, [], answer=answer) == [1.0, 0.0, 0.0, 0.0]
    assert MathReward(answers="lenient")([], WRITTEN, [], answer=answer) == [1.0, 1.0, 1.0, 0.0]
