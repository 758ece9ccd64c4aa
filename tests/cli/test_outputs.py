"""What a command writes takes the place of nothing that it has not written, unless the user says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_run import config, contents, run_console, write

from sparse_rl_lightning.report import RunRecord
from sparse_rl_lightning.testing import character_tokenizer, tiny_model


@pytest.fixture
def place(folder: Path) -> Path:
    """A policy, another one, texts, a log, a configuration, and tables of somebody's."""
    tokenizer = character_tokenizer("0123456789+=")
    for name in ("pol", "other"):
        tokenizer.save_pretrained(name)
        tiny_model(vocab_size=len(tokenizer), num_layers=1).save_pretrained(name)
    Path("t.jsonl").write_text(json.dumps({"prompt": "1+2=", "completion": "3"}) + "\n")
    Path("link").symlink_to("t.jsonl")
    Path("run").mkdir()
    Path("run/summary.json").write_text(json.dumps(RunRecord(history=[{"rollout": 0.0, "reward": 0.5}]).as_json()))
    Path("run/report.html").write_text("<!DOCTYPE html><html>of the user's</html>")
    Path("tables").mkdir()
    for name in ("table.md", "table.csv"):
        Path("tables", name).write_text("mine")
    values = yaml.safe_load((Path(__file__).parents[2] / "configs/calibrate.yaml").read_text(encoding="utf-8"))
    Path("calibrate.yaml").write_text(yaml.safe_dump(values | {"policy": "pol", "folder": "tables"}))
    write(config())
    return folder


@pytest.mark.parametrize(
    "command",
    [
        "statistics pol t.jsonl t.jsonl", "statistics pol t.jsonl link", "statistics pol t.jsonl pol/model.safetensors",
        "statistics pol t.jsonl other/model.safetensors", "report run", "report run --output run/summary.json",
        "report run --output config.yaml", "calibrate --hardware=t.jsonl", "plan --model pol --length 9 --output link",
        "calibrate --config calibrate.yaml", "benchmark SnapKV --policy pol --problems 2 --output tables",
    ],
)  # fmt: skip
def test_what_is_there_stays(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An input, as itself or through a link, a model's weights, a configuration, somebody's page or table."""
    before = contents(place)
    assert run_console(monkeypatch, *command.split()) == 1
    said = capsys.readouterr().err.partition("error: ")[2]
    assert "exists. Give another name, or --overwrite." in said or "of something else, which would be replaced" in said
    assert contents(place) == before
    assert Path("link").is_symlink()


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("statistics pol t.jsonl other/model.safetensors --overwrite", "other/model.safetensors"),
        ("report run --overwrite", "run/report.html"),
    ],
)
def test_the_user_may_say_so(command: str, file: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that file is another one; a page that was written here is replaced without being told."""
    before = contents(place)
    assert run_console(monkeypatch, *command.split()) is None
    after = contents(place)
    assert {name for name in after if before.get(name) != after[name]} == {file}
    if file.endswith(".html"):
        assert run_console(monkeypatch, *command.split()[:-1]) is None


def test_completions_are_not_written_over_their_prompts(
    used_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values: dict[str, Any] = config()
    prompts = used_folder / "runs/own/predictions.jsonl"
    prompts.write_text(json.dumps({"prompt": "1+2=", "answer": "3"}) + "\n")
    values["data"] = {"class_path": "JsonlPrompts", "init_args": {"path": str(prompts), "prompts_per_rollout": 1}}
    before = prompts.read_bytes()
    assert run_console(monkeypatch, "predict", "--config", write(values), "--ckpt_path=last") == 1
    assert "error: data.path is runs/own/predictions.jsonl, which predict writes." in capsys.readouterr().err
    assert prompts.read_bytes() == before
