"""Every mistake of a user is one clear line that names the key, and costs nothing that was there before."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import config, contents, run_console, write

from sparse_rl_lightning.cli.messages import explain, is_own


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
        ["RKV: budget=8 is smaller than num_sinks + window = 1 + 8", "Raise budget"],
        {f"{COMPRESSOR}.init_args.budget": 8},
    ),
    "budget zero": Mistake(["budget must be a positive number", "budget=0"], {f"{COMPRESSOR}.init_args.budget": 0}),
    "budget no number": Mistake(['"budget"', "many"], {f"{COMPRESSOR}.init_args.budget": "many"}, status=2),
    "unknown class": Mistake(
        ['"compressor"', "no class 'SnapKVV'", "Did you mean 'SnapKV'?"],
        {f"{COMPRESSOR}.class_path": "SnapKVV"},
        status=2,
    ),
    "unknown class, nothing like it": Mistake(
        ['"compressor"', "no class 'Zzyx'", "mine.Zzyx"], {f"{COMPRESSOR}.class_path": "Zzyx"}, status=2
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
    "misspelt option of the trainer": Mistake(
        ["'trainer.max_step'", "'trainer.max_steps'"], {"trainer.max_step": 4}, status=2
    ),
    "misspelt section": Mistake(["'modl'", "'model'"], {"modl": 3}, status=2),
    "value not allowed": Mistake(
        ['"loss_type"', "'dr_grpo'", "grppo"], {"model.init_args.loss_type": "grppo"}, status=2
    ),
    "missing configuration": Mistake(["nowhere.yaml"], args=["--config=nowhere.yaml"], status=2),
    "no threads": Mistake(["num_threads", "0"], args=["--num_threads=0"], status=2),
    "no such policy folder": Mistake(["'./nowhere'", "no config.json"], {"model.init_args.policy": "./nowhere"}),
    "no such policy on the hub": Mistake(["policy", "'nobody/nothing'"], {"model.init_args.policy": "nobody/nothing"}),
    "one generation": Mistake(
        ["num_generations must be at least 2", "num_generations=1"], {"model.init_args.num_generations": 1}
    ),
    "sequences that cannot be cut": Mistake(
        ["steps_per_generation=3", "data.prompts_per_rollout"], {"model.init_args.steps_per_generation": 3}
    ),
    "run folder below a file": Mistake(
        ["trainer.default_root_dir='config.yaml/run'", "cannot be written"],
        {"trainer.default_root_dir": "config.yaml/run"},
    ),
    "run folder that refuses": Mistake(
        ["trainer.default_root_dir='/proc/run'"], {"trainer.default_root_dir": "/proc/run"}
    ),
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
        ["checkpoint is of another model", "'policy.lm_head.weight'", "model.policy"],
        {"model.init_args.policy.init_args.hidden_size": 64},
        ["--ckpt_path=last"],
    ),
    "line that is not JSON": Mistake(
        ["prompts.jsonl, line 2", "not JSON"], rows='{"prompt": "1+1=", "answer": "2"}\noops\n'
    ),
    "missing column": Mistake(
        ["prompts.jsonl, line 1", "no column 'answer'", "answer_column", "'label'"],
        rows='{"prompt": "1+1=", "label": "2"}\n',
    ),
    "empty prompt": Mistake(["prompts.jsonl, line 1", "empty"], rows='{"prompt": "", "answer": "2"}\n'),
    "missing data file": Mistake(
        ["'nowhere.jsonl'", "no data file"], {"data.init_args.path": "nowhere.jsonl"}, rows="{}"
    ),
    "prompt longer than the context": Mistake(
        ["prompt 0 has 124 tokens", "max_completion_length=12", "context of 128"],
        rows="".join(json.dumps({"prompt": "1+" * 61 + "1=", "answer": "62", "solution": ""}) + "\n" for _ in range(4)),
    ),
    "column that a reward needs": Mistake(
        ["worked_steps_reward", "missing a required argument: 'solution'", "give the data the missing column"],
        rows='{"prompt": "1+1=", "answer": "2"}\n' * 4,
    ),
    "reward that is not a number": Mistake(
        ["nan_reward", "nan", "sample 3"], {"model.init_args.reward_funcs": "tiny_run.nan_reward"}
    ),
    "no GPU": Mistake(["gpu"], {"trainer.accelerator": "gpu"}),
}


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
