"""Which errors are messages to a user, and which keep their traceback; the mistakes themselves are in tests/cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentError
from tiny_run import config, contents, run_console, write

from sparse_rl_lightning.cli import main
from sparse_rl_lightning.cli.messages import ClearParser, explain
from sparse_rl_lightning.cli.yaml_files import UnusableYAML, read
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.report import RunRecord
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

COMPRESSOR = "model.init_args.compressor"
TRY = "try:\n    raise UserError('budget')\nfinally:\n    raise"


def test_a_traceback_is_there_for_those_who_ask(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(config(), {f"{COMPRESSOR}.init_args.budget": 0})
    monkeypatch.setenv("SPARSE_RL_TRACEBACK", "1")
    with pytest.raises(ValueError, match=r"^RKV: budget must be"):
        run_console(monkeypatch, "fit", "--config", path)


def test_errors_in_a_users_code_keep_their_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(config(), {"model.init_args.reward_funcs": "tiny_run.broken_reward"})
    with pytest.raises(RuntimeError, match=r"broken_reward raised ZeroDivisionError.* on sample 0"):
        run_console(monkeypatch, "fit", "--config", path)
    path = write(config(), {f"{COMPRESSOR}.class_path": "tiny_run.Careless"})
    with pytest.raises(ValueError, match="a bug of the user's"):
        run_console(monkeypatch, "fit", "--config", path)


@pytest.mark.parametrize(
    ("module", "code", "expected"),
    [
        ("sparse_rl_lightning.data", "raise UserError('budget')", True),
        ("sparse_rl_lightning.data", "int('x')", False),  # a bug of ours
        ("sparse_rl_lightning_plugin", "raise ValueError('budget')", False),
        ("mine", "raise ValueError('budget')", False),
        ("mine", "raise UserError('budget')", True),
        ("lightning.pytorch", "raise RuntimeError('teardown') from UserError('budget')", False),
        ("lightning.pytorch", f"{TRY} RuntimeError('teardown')", True),
        ("mine", f"{TRY} ValueError('teardown')", False),
    ],
)
def test_only_errors_meant_for_users_count_as_messages(
    module: str, code: str, expected: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"__name__": module, "UserError": UserError}
    monkeypatch.setattr("sparse_rl_lightning.cli.main", lambda: exec(code, names))
    if expected:
        assert run_console(monkeypatch, "fit") == 1
        assert capsys.readouterr().err == "error: budget\n"
    else:
        with pytest.raises((ValueError, RuntimeError), match=r"budget|invalid literal|teardown"):
            run_console(monkeypatch, "fit")


@pytest.mark.parametrize("command", ["fit", "test"])
def test_a_command_without_a_configuration_says_how_one_is_named(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_console(monkeypatch, command) == 2
    assert f"error: Name a configuration: sparse-rl {command} --config FILE, such as" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "kinds"), [
    ([], ["CSVLogger"]),
    (["--trainer.logger+=TensorBoardLogger"], ["CSVLogger", "TensorBoardLogger"]),
    (["--trainer.logger=TensorBoardLogger"], ["TensorBoardLogger"]),
])  # fmt: skip
def test_a_logger_that_is_added_does_not_take_the_place_of_the_first(
    given: list[str], kinds: list[str], folder: Path
) -> None:
    values = config(max_steps=1)
    values["trainer"].pop("logger", None)
    save_dir = ["--trainer.logger.save_dir=tb"] if given else []
    trainer = main(["fit", "--config", write(values), *given, *save_dir]).trainer
    assert [type(logger).__name__ for logger in trainer.loggers] == kinds
    assert bool(list(folder.glob("**/metrics.csv"))) == ("CSVLogger" in kinds)


def test_messages_of_the_parser_lose_their_noise() -> None:
    message = """Parser key "model":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'Model'>, <class 'NoneType'>]
  Errors:
    - Expected a <class 'int'>
    - Expected a <class 'NoneType'>
  Given value type: <class 'str'>
  Given value: three"""
    assert explain(message) == "Parser key \"model\":\n    - Expected a <class 'int'>\n  Given value: three"


@pytest.mark.parametrize("annotation", [int, float, int | str, list[int] | float])
def test_null_is_no_number_unless_the_type_has_it(annotation: Any) -> None:
    parser = ClearParser(exit_on_error=False)
    parser.add_argument("--given", type=annotation, default=3)
    parser.add_argument("--free", type=annotation | None, default=3)
    parser.add_argument("--text", type=str, default="x")
    found = parser.parse_object({"free": None, "text": None})
    assert (found.given, found.free, found.text) == (3, None, None)
    with pytest.raises(ArgumentError, match=r"given must be a number, got null\. Leave the key out for the default, 3"):
        parser.parse_object({"given": None})


@pytest.mark.parametrize(("text", "said"), [
    ("a: 1\nb: 2\na: 3\n", "the key 'a' is given twice, in lines 1 and 3"),
    ("c+: [1]\nc: [2]\n", "the key 'c' is given twice, in lines 1 and 2"),
    ("{a: 1, b: {c: 2, c: 3}}", "the key 'c' is given twice, in lines 1 and 1"),
    ("- x: 1\n  x: 2\n", "the key 'x' is given twice, in lines 1 and 2"),
    ("a: &a [{b: 1, b: 2}, *a]\n", "the key 'b' is given twice"),
    ("a: " + "9" * 5000, "it holds a value that cannot be read .Exceeds the limit"),
    ("a: !!timestamp x", "it holds a value that cannot be read"),
    ("a: !!bool x", "it holds a value that cannot be read"),
    ("a: 1" + ":00" * 200 + ".5", "it holds a value that cannot be read"),
    ("a: !!int x", "it holds a value that cannot be read"),
    ("a: " + "[" * 5000 + "]" * 5000, "it holds a value that cannot be read"),
])  # fmt: skip
def test_yaml_that_nobody_can_have_meant(text: str, said: str) -> None:
    with pytest.raises(UnusableYAML, match=said):
        read(text)
    with pytest.raises(UnusableYAML, match=f"^some.yaml: .*{said}"):
        read(text, path="some.yaml")


@pytest.mark.parametrize(("text", "value"), [
    ("a: 1\nb: {a: 2}\n", {"a": 1, "b": {"a": 2}}),
    ("x: &x {k: 1, l: 2}\ny: {<<: *x, k: 3}\nz: {<<: *x, k: 4}\n",
     {"x": {"k": 1, "l": 2}, "y": {"k": 3, "l": 2}, "z": {"k": 4, "l": 2}}),
    ("1: a\n'1': b\n", {1: "a", "1": "b"}),
    ("lr: 1e-4", {"lr": 1e-4}),
    ("", None),
])  # fmt: skip
def test_other_yaml_is_read_as_it_is(text: str, value: object) -> None:
    assert (read(text) or None) == value


def test_a_text_that_looks_like_doubled_keys_stays_a_text() -> None:
    parser = ClearParser(exit_on_error=False)
    parser.add_argument("--text", type=str)
    assert parser.parse_args(["--text", "Q: 1\nA: 2\nQ: 3"]).text == "Q: 1\nA: 2\nQ: 3"


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


@pytest.mark.parametrize(
    ("name", "before", "class_path"),
    [
        ("path", "HOME/", "JsonlPrompts"), ("path", "~/", "JsonlPrompts"), ("val_path", "", "JsonlPrompts"),
        ("own.mine", "", "MathBenchmarks"), ("train.path", "~/", "MathBenchmarks"),
    ],
)  # fmt: skip
def test_completions_are_not_written_over_their_prompts(
    name: str, before: str, class_path: str,
    used_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("HOME", str(used_folder))
    values: dict[str, Any] = config()
    prompts = used_folder / "runs/own/predictions.jsonl"
    prompts.write_text(json.dumps({"prompt": "1+2=", "answer": "3"}) + "\n")
    file = before.replace("HOME", str(used_folder)) + "runs/own/predictions.jsonl"
    Path("prompts.jsonl").write_text(prompts.read_text())
    jsonl = {"path": "prompts.jsonl", "prompts_per_rollout": 1}
    of_name: dict[str, dict[str, Any]] = {
        "path": jsonl | {"path": file}, "val_path": jsonl | {"val_path": file},
        "own.mine": {"own": {"mine": file}, "benchmarks": ["mine"]},
        "train.path": {"train": {"class_path": "JsonlPrompts", "init_args": jsonl | {"path": file}}},
    }  # fmt: skip
    values["data"] = {"class_path": class_path, "init_args": of_name[name]}
    content = prompts.read_bytes()
    assert run_console(monkeypatch, "predict", "--config", write(values), "--ckpt_path=last") == 1
    assert f"error: data.{name} is runs/own/predictions.jsonl, which predict writes." in capsys.readouterr().err
    assert prompts.read_bytes() == content


@pytest.mark.parametrize("text", ['{"prompt": "mine"}\n', '["completion"]\n', "mine"])
def test_completions_are_written_over_completions_only(
    text: str, used_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = used_folder / "runs/own/predictions.jsonl"
    file.write_text(text)
    arguments = ["--config", write(config()), "--ckpt_path=last"]
    assert run_console(monkeypatch, "predict", *arguments) == 1
    assert "predictions.jsonl, which predict would write, is no file of completions" in capsys.readouterr().err
    assert file.read_text() == text
    file.write_text('{"completion": "of an earlier call"}\n')
    run_console(monkeypatch, "predict", *arguments)
    assert "earlier" not in file.read_text()


@pytest.mark.parametrize("subcommand", ["fit", "validate"])
@pytest.mark.parametrize(
    ("path", "said"), [("", "ckpt_path='' names no"), ("best", "='best' names no"), ("hpc", "hpc: no")]
)
def test_words_that_name_no_checkpoint_are_refused_in_a_line(
    subcommand: str, path: str, said: str, used_folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run_console(monkeypatch, subcommand, "--config", write(config()), f"--ckpt_path={path}") == 1
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
