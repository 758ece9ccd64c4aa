"""The command line as its users meet it: own classes, help, clean output, and one clear line for every mistake."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from sparse_rl_lightning import __version__
from sparse_rl_lightning.cli import console, main
from sparse_rl_lightning.cli.messages import explain, is_own
from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.types import LayerState

ROOT = Path(__file__).resolve().parents[1]


class KeyNorm(Compressor):
    """Evict the keys with the largest norm."""

    def score(self, layer: LayerState) -> Tensor:
        return -layer.keys.norm(dim=-1)


class Careless(Compressor):
    """A user's compressor with a bug."""

    def score(self, layer: LayerState) -> Tensor:
        raise ValueError("a bug of the user's")


def nan_reward(completions: list[str], **_: Any) -> list[float | None]:
    return [0.5] * 3 + [float("nan")] + [0.5] * (len(completions) - 4)


def broken_reward(completions: list[str], **_: Any) -> list[float | None]:
    return [1 / len(text) for text in ["", *completions]]


def config(**trainer: Any) -> dict[str, Any]:
    """A tiny run with two rollouts of two optimiser steps, written below runs/."""
    return {
        "num_threads": 1,
        "model": {
            "class_path": "SparseGRPO",
            "init_args": {
                "policy": {"class_path": "TinyPolicy", "init_args": {"hidden_size": 32, "num_layers": 2}},
                "compressor": {"class_path": "RKV", "init_args": {"budget": 12, "buffer": 4, "num_sinks": 1}},
                "reward_funcs": [
                    "sparse_rl_lightning.rewards.arithmetic_reward",
                    "sparse_rl_lightning.rewards.worked_steps_reward",
                ],
                "num_generations": 2,
                "max_completion_length": 12,
                "steps_per_generation": 2,
            },
        },
        "data": {
            "class_path": "ArithmeticTasks",
            "init_args": {"num_terms": 3, "num_train": 16, "num_val": 4, "prompts_per_rollout": 4},
        },
        "trainer": {
            "accelerator": "cpu",
            "default_root_dir": "runs/own",
            "max_steps": 4,
            "limit_val_batches": 0,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": "own"}},
            "callbacks": [
                {"class_path": "SparsityAwareRejection"},
                {
                    "class_path": "ModelCheckpoint",
                    "init_args": {
                        "dirpath": "runs/own/checkpoints",
                        "every_n_train_steps": 1,
                        "save_last": True,
                        "enable_version_counter": False,
                    },
                },
            ],
            **trainer,
        },
    }


def write(values: dict[str, Any], changes: dict[str, Any] | None = None) -> str:
    """Write config.yaml with some dotted keys set to other values."""
    for key, value in (changes or {}).items():
        *parents, last = key.split(".")
        place: Any = values
        for name in parents:
            place = place[int(name) if isinstance(place, list) else name]
        place[last] = value
    Path("config.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return "config.yaml"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; main's changes to the path of Python are taken back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    monkeypatch.delenv("SPARSE_RL_TRACEBACK", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory in which a run has ended."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        main(["fit", "--config", write(config())])
    return folder


@pytest.fixture
def used_folder(folder: Path, first_run: Path) -> Path:
    """A working directory of one's own with a copy of the first run."""
    shutil.copytree(first_run / "runs", folder / "runs")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_console(monkeypatch: pytest.MonkeyPatch, *args: str) -> int | None:
    """Run the console script in this process and return its exit status, None if it returns."""
    monkeypatch.setattr(sys, "argv", ["sparse-rl", *args])
    try:
        console()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return None


# ---------------------------------------------------------------- a user's own classes

KNORM = """
    from sparse_rl_lightning.compressors import Compressor

    class KNorm(Compressor):
        def score(self, layer):
            return -layer.keys.norm(dim=-1)
"""


@pytest.mark.parametrize("entry", ["console script", "module"])
def test_a_class_in_the_working_directory_is_found(entry: str, folder: Path) -> None:
    (folder / "work").mkdir()
    (folder / "work" / "mine.py").write_text(textwrap.dedent(KNORM))
    (folder / "sparse-rl").write_text("from sparse_rl_lightning.cli import console; console()")
    start = [str(folder / "sparse-rl")] if entry == "console script" else ["-m", "sparse_rl_lightning"]
    os.chdir(folder / "work")  # the fixture goes back
    path = write(config(max_steps=1), {"model.init_args.compressor.class_path": "mine.KNorm"})
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *start, "fit", "--config", path], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "work" / "runs" / "own" / "checkpoints" / "last.ckpt").is_file()
    saved = yaml.safe_load((folder / "work" / "runs" / "own" / "version_0" / "run_config.yaml").read_text())
    assert saved["model"]["init_args"]["compressor"]["class_path"] == "mine.KNorm"
    assert "Warning" not in done.stderr
    assert "litlogger" not in done.stderr


def test_an_own_class_that_is_imported_has_a_short_name(folder: Path) -> None:
    arguments = ["--model.compressor=KeyNorm", "--model.compressor.budget=14", "--trainer.max_steps=1"]
    cli = main(["fit", "--config", write(config()), *arguments])
    assert type(cli.model.compressor).__name__ == "KeyNorm"
    assert (cli.model.compressor.budget, cli.model.compressor.buffer) == (14, 4)  # 4 from the file


# ---------------------------------------------------------------- help


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_console(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip() == f"sparse-rl {__version__}"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fit", "--help"], ["sparse-rl", "--num_threads", "--trainer.max_steps", "--ckpt_path"]),
        (
            ["fit", "--model", "SparseGRPO", "--model.compressor.help=SnapKV"],
            ["arXiv 2404.14469", "--compressor.budget"],
        ),
        (["fit", "--model.help=SparseGRPO"], ["compressed KV cache", "--model.num_generations", "at least 2"]),
        (["fit", "--data.help=JsonlPrompts"], ["rows with an empty answer", "--data.answer_pattern"]),
    ],
)
def test_help_comes_from_the_docstrings(
    arguments: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_console(monkeypatch, *arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert [part for part in expected if part not in text] == []


# ---------------------------------------------------------------- bad input


@dataclass
class Mistake:
    """What a user does wrong, and what a message must say."""

    says: list[str]
    changes: dict[str, Any] = field(default_factory=dict)
    args: list[str] = field(default_factory=list)
    rows: str | None = None  # content of prompts.jsonl, which is then the data
    status: int = 1


COMPRESSOR = "model.init_args.compressor"
MISTAKES = {
    "budget below sinks and window": Mistake(
        ["RKV: budget=8 is smaller than num_sinks + window = 1 + 8", "Raise budget"], {f"{COMPRESSOR}.init_args.budget": 8}
    ),
    "budget zero": Mistake(["budget must be a positive number", "budget=0"], {f"{COMPRESSOR}.init_args.budget": 0}),
    "budget no number": Mistake(['"budget"', "many"], {f"{COMPRESSOR}.init_args.budget": "many"}, status=2),
    "unknown class": Mistake(
        ['"compressor"', "no class 'SnapKVV'", "Did you mean 'SnapKV'?"], {f"{COMPRESSOR}.class_path": "SnapKVV"}, status=2
    ),
    "unknown class, nothing like it": Mistake(
        ['"compressor"', "no class 'Windo'", "mine.Windo"], {f"{COMPRESSOR}.class_path": "Windo"}, status=2
    ),
    "unknown class on the command line": Mistake(
        ["no class 'rkb'", "Did you mean 'RKV'?"], args=["--model.compressor=rkb"], status=2
    ),
    "unknown module": Mistake(
        ['"compressor"', "No module named 'nowhere_else'"], {f"{COMPRESSOR}.class_path": "nowhere_else.KNorm"}, status=2
    ),
    "unknown callback": Mistake(
        ['"trainer.callbacks"', "Did you mean 'RunSummary'"], {"trainer.callbacks.0.class_path": "RunSumary"}, status=2
    ),
    "misspelt option of the model": Mistake(
        ["'num_generatons' is not accepted", "'num_generations'"], {"model.init_args.num_generatons": 4}, status=2
    ),
    "misspelt option of a compressor": Mistake(
        ['"compressor"', "'bufer' is not accepted", "'buffer'"], {f"{COMPRESSOR}.init_args.bufer": 4}, status=2
    ),
    "misspelt option of the data": Mistake(
        ['"data"', "'num_trian' is not accepted", "'num_train'"], {"data.init_args.num_trian": 4}, status=2
    ),
    "misspelt option of the trainer": Mistake(["'trainer.max_step'", "'trainer.max_steps'"], {"trainer.max_step": 4}, status=2),
    "misspelt section": Mistake(["'modl'", "'model'"], {"modl": {}}, status=2),
    "value not allowed": Mistake(
        ['"loss_type"', "'dr_grpo'", "grppo"], {"model.init_args.loss_type": "grppo"}, status=2
    ),
    "missing configuration": Mistake(["nowhere.yaml"], args=["--config=nowhere.yaml"], status=2),
    "no threads": Mistake(["num_threads", "0"], args=["--num_threads=0"], status=2),
    "no such policy folder": Mistake(["'./nowhere'", "no config.json"], {"model.init_args.policy": "./nowhere"}),
    "no such policy on the hub": Mistake(["policy", "'nobody/nothing'"], {"model.init_args.policy": "nobody/nothing"}),
    "one generation": Mistake(["num_generations must be at least 2", "num_generations=1"], {"model.init_args.num_generations": 1}),
    "sequences that cannot be cut": Mistake(
        ["steps_per_generation=3", "data.prompts_per_rollout"], {"model.init_args.steps_per_generation": 3}
    ),
    "run folder below a file": Mistake(
        ["trainer.default_root_dir='config.yaml/run'", "cannot be written"], {"trainer.default_root_dir": "config.yaml/run"}
    ),
    "run folder that refuses": Mistake(["trainer.default_root_dir='/proc/run'"], {"trainer.default_root_dir": "/proc/run"}),
    "unwritable checkpoints": Mistake(
        ["ModelCheckpoint='config.yaml'", "cannot be written"], {"trainer.callbacks.1.init_args.dirpath": "config.yaml"}
    ),
    "unwritable log": Mistake(
        ["save_dir='config.yaml/log'", "cannot be written"], {"trainer.logger.init_args.save_dir": "config.yaml/log"}
    ),
    "no last checkpoint": Mistake(
        ["ckpt_path=last", "no last.ckpt in ['elsewhere']"],
        {"trainer.callbacks.1.init_args.dirpath": "elsewhere"},
        ["--ckpt_path=last"],
    ),
    "no such checkpoint": Mistake(["ckpt_path='nowhere.ckpt' does not exist"], args=["--ckpt_path=nowhere.ckpt"]),
    "checkpoint of another model": Mistake(
        ["checkpoint is of another model", "embed_tokens", "model.policy"],
        {"model.init_args.policy.init_args.hidden_size": 64},
        ["--ckpt_path=last"],
    ),
    "line that is not JSON": Mistake(["prompts.jsonl, line 2", "not JSON"], rows='{"prompt": "1+1=", "answer": "2"}\noops\n'),
    "missing column": Mistake(
        ["prompts.jsonl, line 1", "no column 'answer'", "answer_column", "'label'"], rows='{"prompt": "1+1=", "label": "2"}\n'
    ),
    "empty prompt": Mistake(["prompts.jsonl, line 1", "empty"], rows='{"prompt": "", "answer": "2"}\n'),
    "missing data file": Mistake(["'prompts.jsonl'", "no data file"], {"data": {"class_path": "JsonlPrompts", "init_args": {"path": "prompts.jsonl"}}}),
    "prompt longer than the context": Mistake(
        ["prompt 0 has 124 tokens", "max_completion_length=12", "context of 128"],
        rows="".join(json.dumps({"prompt": "1+" * 61 + "1=", "answer": "62"}) + "\n" for _ in range(4)),
    ),
    "reward that is not a number": Mistake(
        ["nan_reward", "nan", "sample 3"], {"model.init_args.reward_funcs": "tests.test_cli.nan_reward"}
    ),
    "no GPU": Mistake(["gpu"], {"trainer.accelerator": "gpu"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_clear_line_and_loses_nothing(
    name: str, used_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = MISTAKES[name]
    if name == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is one")
    if name == "run folder that refuses" and not Path("/proc").is_dir():
        pytest.skip("needs a file system that root cannot write")
    values = config(max_steps=8)
    if mistake.rows is not None:
        Path("prompts.jsonl").write_text(mistake.rows, encoding="utf-8")
        arguments = {"path": "prompts.jsonl", "prompts_per_rollout": 1}
        values["data"] = {"class_path": "JsonlPrompts", "init_args": arguments}
    before = contents(used_folder / "runs")
    path = write(values, mistake.changes)
    first = [] if any(a.startswith("--config") for a in mistake.args) else ["--config", path]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an earlier run is overwritten, says a fresh start
        status = run_console(monkeypatch, "fit", *first, *mistake.args)
    shown = capsys.readouterr().err
    assert status == mistake.status, shown
    message = shown.partition("error: ")[2]
    assert [part for part in mistake.says if part not in message] == [], shown
    assert len(message.splitlines()) <= (1 if status == 1 and "hub" not in name else 12), shown
    assert "Traceback" not in shown
    assert "usage:" not in shown

    after = contents(used_folder / "runs")
    assert {path: after.get(path) == content for path, content in before.items() if after.get(path) != content} == {}


def test_a_traceback_is_there_for_those_who_ask(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(config(), {f"{COMPRESSOR}.init_args.budget": 0})
    monkeypatch.setenv("SPARSE_RL_TRACEBACK", "1")
    with pytest.raises(ValueError, match="^RKV: budget must be"):
        run_console(monkeypatch, "fit", "--config", path)


def test_errors_in_a_users_code_keep_their_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(config(), {"model.init_args.reward_funcs": "tests.test_cli.broken_reward"})
    with pytest.raises(RuntimeError, match=r"broken_reward raised ZeroDivisionError.* on sample 0"):
        run_console(monkeypatch, "fit", "--config", path)
    path = write(config(), {f"{COMPRESSOR}.class_path": "tests.test_cli.Careless"})
    with pytest.raises(ValueError, match="a bug of the user's"):
        run_console(monkeypatch, "fit", "--config", path)


@pytest.mark.parametrize(
    ("module", "code", "expected"),
    [
        ("sparse_rl_lightning.data", "raise ValueError('budget')", True),
        ("sparse_rl_lightning.data", "int('x')", False),  # a bug of ours
        ("sparse_rl_lightning_plugin", "raise ValueError('budget')", False),
        ("mine", "raise ValueError('budget')", False),
    ],
)
def test_only_deliberate_errors_of_the_package_count_as_messages(module: str, code: str, expected: bool) -> None:
    with pytest.raises(ValueError, match=r"budget|invalid literal") as caught:
        exec(code, {"__name__": module})
    assert is_own(caught.value) is expected


def test_messages_of_the_parser_lose_their_noise() -> None:
    message = "\n".join(
        [
            'Parser key "model":',
            "  Does not validate against any of the Union subtypes",
            "  Subtypes: [<class 'Model'>, <class 'NoneType'>]",
            "  Errors:",
            "    - Expected a <class 'int'>",
            "    - Expected a <class 'NoneType'>",
            "  Given value type: <class 'str'>",
            "  Given value: three",
        ]
    )
    assert explain(message) == "Parser key \"model\":\n    - Expected a <class 'int'>\n  Given value: three"


# ---------------------------------------------------------------- runs and their files


@pytest.fixture
def loud() -> Iterator[list[warnings.WarningMessage]]:
    """Every warning that is shown to a user, deprecations too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def test_a_start_is_clean_and_a_second_one_warns(
    folder: Path, loud: list[warnings.WarningMessage], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(config(max_steps=1))
    main(["fit", "--config", path])
    assert [str(warning.message) for warning in loud] == []
    main(["fit", "--config", path, "--ckpt_path=last", "--trainer.max_steps=2"])
    assert [str(warning.message) for warning in loud] == []
    main(["fit", "--config", path])
    (warning,) = loud
    assert str(warning.message).startswith("runs/own/checkpoints holds checkpoints of an earlier run")
    assert "--ckpt_path=last" in str(warning.message)
    shown = capsys.readouterr()
    assert "litlogger" not in shown.out + shown.err


def steps(path: Path) -> list[int]:
    with path.open(newline="") as file:
        return sorted({int(row["step"]) for row in csv.DictReader(file)})


def test_a_resumed_run_keeps_the_metrics_of_its_first_part(used_folder: Path) -> None:
    main(["fit", "--config", write(config()), "--ckpt_path=last", "--trainer.max_steps=6"])
    assert steps(used_folder / "runs/own/version_0/metrics.csv") == [0, 1, 2, 3]
    assert steps(used_folder / "runs/own/version_1/metrics.csv") == [4, 5]


def test_a_saved_configuration_repeats_the_run(used_folder: Path) -> None:
    first = torch.load("runs/own/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    again = main(["fit", "--config", "runs/own/version_0/run_config.yaml"])
    assert [f.__name__ for f in again.model.reward_funcs] == ["arithmetic_reward", "worked_steps_reward"]
    assert all(torch.equal(value, first[name]) for name, value in again.model.state_dict().items())


@pytest.mark.parametrize("subcommand", ["validate", "test"])
def test_evaluation_prints_dense_and_sparse_reward(
    subcommand: str, used_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(used_folder / "runs")
    path = write(config(), {"model.init_args.reward_funcs": "tests.test_cli.length_reward"})
    cli = main([subcommand, "--config", path, "--ckpt_path=last"])
    name = {"validate": "val", "test": "test"}[subcommand]
    rows = cli.datamodule.val_rows()
    expected = {}
    for cache in ("dense", "sparse"):
        scored = cli.model.generate(rows, cli.model.val_sampling, dense=cache == "dense")
        expected[f"{name}/reward_{cache}"] = sum(map(len, scored.completions)) / len(rows)
        expected[f"{name}/length_{cache}"] = float(scored.rollout.completion_lengths.float().mean())
    assert {n: float(value) for n, value in cli.trainer.callback_metrics.items()} == pytest.approx(expected)
    shown = capsys.readouterr().out
    assert [metric for metric in expected if metric not in shown] == []
    after = contents(used_folder / "runs")
    assert {path: after[path] for path in before} == before


def length_reward(completions: list[str], **_: Any) -> list[float | None]:
    return [float(len(text)) for text in completions]


def test_predict_writes_completions(used_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli = main(["predict", "--config", write(config()), "--ckpt_path=last", "--data.val_batch_size=3"])
    written = [json.loads(line) for line in (used_folder / "runs/own/predictions.jsonl").read_text().splitlines()]
    rows = cli.datamodule.val_rows()
    completions = cli.model.generate(rows, cli.model.val_sampling).completions
    assert written == [row | {"completion": text} for row, text in zip(rows, completions, strict=True)]
    assert "4 completions to runs/own/predictions.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize("subcommand", ["test", "predict"])
def test_what_a_warm_up_cannot_do_is_said(
    subcommand: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = config()
    values["model"] = {"class_path": "SupervisedWarmup", "init_args": {"policy": {"class_path": "TinyPolicy"}}}
    assert run_console(monkeypatch, subcommand, "--config", write(values)) == 1
    assert f"error: sparse-rl {subcommand} needs a model that generates" in capsys.readouterr().err
