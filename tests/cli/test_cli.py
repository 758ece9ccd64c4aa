"""The command line as its users meet it: own classes, help, clean output, evaluation, and files that stay."""

from __future__ import annotations

import csv
import inspect
import json
import os
import pkgutil
import re
import runpy
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_run import config, contents, digits_reward, run_console, write

from sparse_rl_lightning import __version__, cli, ops
from sparse_rl_lightning.cli import doctor, main, options
from sparse_rl_lightning.cli.options import COMMANDS
from sparse_rl_lightning.cli.training import SparseRLCLI
from sparse_rl_lightning.ops.architectures import parse_architectures
from sparse_rl_lightning.ops.schemas import SCHEMAS
from sparse_rl_lightning.planning.job import PROMPT
from sparse_rl_lightning.policies.tiny import ARITHMETIC_ALPHABET
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------- a user's own classes

OWN_CLASS = """
    from sparse_rl_lightning.compressors import Compressor

    class KeyLength(Compressor):
        def score(self, layer):
            return -layer.keys.norm(dim=-1)
"""


@pytest.fixture
def own_class(folder: Path) -> str:
    """A configuration that names a class of mine.py in the working directory."""
    (folder / "mine.py").write_text(textwrap.dedent(OWN_CLASS))
    return write(config(max_steps=1), {"model.init_args.compressor.class_path": "mine.KeyLength"})


def test_the_console_script_finds_a_class_in_the_working_directory(
    own_class: str, folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "bin" / "sparse-rl"  # its own folder, not the working directory, is on the path of Python
    script.parent.mkdir()
    script.write_text("from sparse_rl_lightning.cli import console; console()")
    command, environment = [sys.executable, str(script), "fit", "--config", own_class], {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "runs/own/checkpoints/last.ckpt").is_file()
    saved = yaml.safe_load((folder / "runs/own/version_0/run_config.yaml").read_text())
    assert saved["model"]["init_args"]["compressor"]["class_path"] == "mine.KeyLength"
    assert "Warning" not in done.stderr
    assert "litlogger" not in done.stderr


def test_the_module_finds_it_too(own_class: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(sys, "argv", ["sparse_rl_lightning", "fit", "--config", own_class])
    runpy.run_module("sparse_rl_lightning", run_name="__main__")
    assert Path(sys.modules.pop("mine").__file__ or "") == folder / "mine.py"
    assert (folder / "runs/own/checkpoints/last.ckpt").is_file()


def test_an_own_class_that_is_imported_has_a_short_name(folder: Path) -> None:
    arguments = ["--model.compressor=KeyNorm", "--model.compressor.budget=14", "--trainer.max_steps=1"]
    cli = main(["fit", "--config", write(config()), *arguments])
    assert type(cli.model.generator.compressor).__name__ == "KeyNorm"
    assert (cli.model.generator.compressor.budget, cli.model.generator.compressor.buffer) == (14, 4)  # 4 from the file


# ---------------------------------------------------------------- help


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fit", "--help"], ["sparse-rl", "--num_threads", "--trainer.max_steps", "--ckpt_path"]),
        (
            ["fit", "--model", "SparseGRPO", "--model.compressor.help=SnapKV"],
            ["arXiv 2404.14469", "--compressor.budget", "Most recent tokens that are never evicted", "null for"],
        ),
        (["fit", "--model.help=SparseGRPO"], ["compressed KV cache", "--model.sampling.num_generations", "at least 2"]),
        (["fit", "--data.help=JsonlPrompts"], ["rows with an empty answer", "--data.answer_pattern"]),
    ],
)
def test_help_comes_from_the_docstrings(
    arguments: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_console(monkeypatch, *arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert [part for part in expected if part not in text] == []


# ---------------------------------------------------------------- runs and their files


@pytest.fixture
def loud() -> Iterator[list[warnings.WarningMessage]]:
    """Every warning that is shown to a user, deprecations too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def test_a_start_is_clean_and_a_second_one_warns(
    folder: Path, loud: list[warnings.WarningMessage], caplog: pytest.LogCaptureFixture
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
    assert "Each rollout: 4 prompts x 2 generations" in caplog.text
    assert "litlogger" not in caplog.text


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
    assert [f.__name__ for f in again.model.rewards.functions] == ["arithmetic_reward", "worked_steps_reward"]
    assert all(torch.equal(value, first[name]) for name, value in again.model.state_dict().items())


def test_the_saved_configuration_is_that_of_the_last_training(folder: Path) -> None:
    path = write(config(logger=False, max_steps=1))
    main(["fit", "--config", path])
    saved = Path("runs/own/run_config.yaml").read_bytes()
    main(["validate", "--config", path, "--data.num_val=2"])
    with pytest.raises(ValueError, match="another model"):
        main(["fit", "--config", path, "--ckpt_path=last", "--model.policy.hidden_size=64"])
    assert Path("runs/own/run_config.yaml").read_bytes() == saved


@pytest.mark.parametrize("subcommand", ["validate", "test"])
def test_evaluation_prints_dense_and_sparse_reward(
    subcommand: str, used_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(used_folder / "runs")
    tokenizer = character_tokenizer(ARITHMETIC_ALPHABET)
    for saved in (tokenizer, tiny_model(vocab_size=len(tokenizer), hidden_size=32, initializer_range=0.4)):
        saved.save_pretrained("policy")  # a model that notices what it has forgotten
    changes = {"model.init_args.reward_funcs": "tiny_run.digits_reward", "model.init_args.policy": "policy"}
    cli = main([subcommand, "--config", write(config(), changes)])
    name = {"validate": "val", "test": "test"}[subcommand]
    rows = cli.datamodule.val_rows()
    expected = {}
    for cache in ("dense", "sparse"):
        scored = cli.model.generator.generate(rows, cli.model.val_sampling, dense=cache == "dense")
        rewards = digits_reward(scored.completions)
        expected[f"{name}/reward_{cache}"] = sum(map(float, rewards)) / len(rows)
        expected[f"{name}/pass@1_{cache}"] = rewards.count(1.0) / len(rows)
        expected[f"{name}/length_{cache}"] = float(scored.rollout.completion_lengths.float().mean())
    assert expected[f"{name}/reward_dense"] != expected[f"{name}/reward_sparse"]
    found = {n: float(value) for n, value in cli.trainer.callback_metrics.items()}
    for cache in ("dense", "sparse"):  # the interval around the share of right answers
        low, high = (found.pop(f"{name}/pass@1_{bound}_{cache}") for bound in ("low", "high"))
        assert low <= expected[f"{name}/pass@1_{cache}"] <= high
    assert found == pytest.approx(expected)
    shown = capsys.readouterr().out
    assert [metric for metric in expected if metric not in shown] == []
    after = contents(used_folder / "runs")
    assert {path: after[path] for path in before} == before


def test_predict_writes_completions(used_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli = main(["predict", "--config", write(config()), "--ckpt_path=last", "--data.val_batch_size=3"])
    written = [json.loads(line) for line in (used_folder / "runs/own/predictions.jsonl").read_text().splitlines()]
    rows = cli.datamodule.val_rows()
    completions = cli.model.generator.generate(rows, cli.model.val_sampling).completions
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


@pytest.mark.usefixtures("folder")
def test_a_rule_of_down_sampling_by_its_name() -> None:
    path = write(config(callbacks=[], max_steps=2, logger=False, enable_checkpointing=False))
    rule = ["--model.rollout.downsampling=MaxVariance", "--model.rollout.downsampling.num_samples=5"]
    cli = main(["fit", "--config", path, *rule])
    assert cli.model.generator.sampling.num_generations == 5
    assert len(cli.model.block.rollout) == 4 * 2
    assert "downsampling/dropped/reward" in cli.trainer.callback_metrics


@pytest.mark.parametrize(("words", "count"), [(["fit", "--help"], 1), (["fti"], 5), ([], 5)])
def test_only_the_subcommand_that_is_asked_for_gets_a_parser(
    words: list[str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a tenth of a second; mistakes name all."""
    seen: list[Any] = []
    monkeypatch.setattr(SparseRLCLI, "add_arguments_to_parser", lambda self, parser: seen.append(parser))
    with pytest.raises(SystemExit):
        main(words)
    assert len(seen) == count


HEAVY = {"torch", "transformers", "lightning", "numpy", "jsonargparse", "datasets"}
PROBE = """
import json, sys
from sparse_rl_lightning.cli import console
sys.argv = ["sparse-rl", *{words!r}]
try:
    console()
except SystemExit as end:
    print(json.dumps([end.code or 0, sorted({{name.partition(".")[0] for name in sys.modules}})]))
"""


def probe(*words: str) -> tuple[int, set[str], str]:
    """Exit status of a command line in a process of its own, the packages it has imported, and what it said."""
    code = PROBE.format(words=list(words))
    wide = {**os.environ, "COLUMNS": "200"}  # no line is broken, at a hyphen neither
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=wide)
    *said, last = done.stdout.splitlines()
    status, packages = json.loads(last)
    return status, set(packages), "\n".join(said) + done.stderr


def listed(text: str) -> dict[str, str]:
    """The commands of a help text and their lines."""
    return dict(re.findall(r"^ {4}([\w-]+)\s+(\S.*)$", text, re.MULTILINE))


# ---------------------------------------------------------------- the table


def test_help_is_the_table() -> None:
    status, packages, said = probe("--help")
    assert listed(said) == {name: command.line for name, command in COMMANDS.items()}
    assert (status, HEAVY & packages) == (0, set())


def test_every_command_is_in_the_table_and_can_be_run() -> None:
    own = {name for name, command in COMMANDS.items() if command.home is None}
    bare = SparseRLCLI.__new__(SparseRLCLI)
    bare._first_word = ""
    assert own == set(bare.subcommands())
    for command in COMMANDS.values():
        assert command.home is None or callable(pkgutil.resolve_name(f"sparse_rl_lightning.cli.{command.home}"))
    functions = inspect.getmembers(options, inspect.isfunction)
    here = [name for name, function in functions if function.__module__ == options.__name__]
    parsers = {name for name in here if not name.startswith("_")}
    assert parsers == {name.replace("-", "_") for name, command in COMMANDS.items() if command.parser}


def test_subcommands_are_described_by_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lightning's first lines of ``test`` and ``predict`` end in mid-sentence."""
    for name in ("test", "predict"):
        assert run_console(monkeypatch, name, "--help") == 0
        assert COMMANDS[name].line in " ".join(capsys.readouterr().out.split())


# ---------------------------------------------------------------- what is light


@pytest.mark.parametrize(
    "words",
    [
        ["-h"], ["--version"], ["--help", "fit"], ["benchmark", "--help"], ["record", "check", "--help"],
        ["plan", "--config", "x", "--help"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_help_and_version_import_nothing_heavy(words: list[str]) -> None:
    status, packages, said = probe(*words)
    assert (status, HEAVY & packages) == (0, set()), said
    assert said.strip() == f"sparse-rl {__version__}" if words == ["--version"] else said.startswith("usage: sparse-rl")


@pytest.mark.parametrize("words", [[], ["fti", "--config", "x"], ["-c", "x", "plan"]])
def test_what_is_no_command_names_them_all(words: list[str]) -> None:
    status, packages, said = probe(*words)
    assert (status, HEAVY & packages) == (2, set())
    assert f"one of {', '.join(COMMANDS)}; got {' '.join(words)!r}." in said


def test_a_mistake_of_a_light_command_is_told_without_anything_heavy(tmp_path: Path) -> None:
    status, packages, said = probe("report", str(tmp_path / "missing"))
    assert (status, HEAVY & packages) == (1, set())
    assert said.strip().startswith("error: ")


def test_options_may_stand_before_a_subcommand(monkeypatch: pytest.MonkeyPatch) -> None:
    """``sparse-rl -c FILE fit``, as jsonargparse has it."""
    seen: list[list[str]] = []
    monkeypatch.setattr(cli, "main", lambda: seen.append(sys.argv[1:]))
    run_console(monkeypatch, "-c", "x.yaml", "fit")
    assert seen == [["-c", "x.yaml", "fit"]]


def test_the_longest_prompt_of_a_plan_is_that_of_a_proposal() -> None:
    assert options.plan(proposes=False).get_default("prompt") == PROMPT
    assert f"(default {PROMPT})" in " ".join(options.plan().format_help().split())


def test_every_op_has_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sparse-rl", "doctor"])
    cli.console()
    text = capsys.readouterr().out
    here = "native" if ops.HAS_NATIVE else "reference"
    for name in SCHEMAS:
        assert f"{name:<20} {here:<10} " in text
    assert torch.__version__ in text
    complete = ops.HAS_NATIVE and not torch.cuda.is_available()
    assert ("Nothing is missing for CPUs, and no GPU was found." in text) == complete


def diagnosis(**variables: str) -> str:
    """What doctor says under these variables."""
    command, environment = [sys.executable, "-m", "sparse_rl_lightning.cli.doctor"], os.environ | variables
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_without_kernels_the_cure_is_told() -> None:
    said = diagnosis(SPARSE_RL_NATIVE="0")
    assert f"{'append':<20} reference" in said
    assert "missing for CPU: switched off by SPARSE_RL_NATIVE=0" in said
    checkout = (doctor.PACKAGE.parent / "setup.py").exists()
    assert ("pip install --no-build-isolation -e ." in said) == checkout


def fake_smi(folder: Path, text: str, status: int = 0) -> str:
    """A PATH on which nvidia-smi answers so."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\necho '{text}'\nexit {status}\n", encoding="utf-8")
    path.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is no CPU build")
def test_a_cpu_build_of_torch_beside_a_gpu_is_told(tmp_path: Path) -> None:
    said = diagnosis(PATH=fake_smi(tmp_path, "NVIDIA L40S"))
    assert "GPU: NVIDIA L40S, which torch cannot use" in said
    assert "There is a GPU, but this torch is a CPU build: pip install --force-reinstall torch==" in said
    assert "+cpu from PyPI" not in said
    assert "Nothing is missing" not in said


def test_a_cuda_build_of_torch_that_cannot_use_a_gpu_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_smi(tmp_path, "NVIDIA L40S"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.unused_gpus() == ["NVIDIA L40S"]
    assert "torch, built for CUDA 13.0, cannot use it" in doctor.advice()[0]
    monkeypatch.setenv("PATH", fake_smi(tmp_path, ""))  # the tools without a card
    assert "CUDA 13.0" not in doctor.report().split("\n\n")[-1]


def test_gpus_are_found_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_smi(tmp_path, "NVIDIA-SMI has failed", status=9))
    assert doctor.unused_gpus(tmp_path / "nothing") == []
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    assert doctor.unused_gpus(tmp_path / "gpus") == ["an NVIDIA GPU at 0000:01:00.0"]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert doctor.unused_gpus(tmp_path / "gpus") == ["an NVIDIA GPU at 0000:01:00.0"]


def pretend_cards(monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], built: str) -> None:
    """Cards of these compute capabilities, and a library for these architectures."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(doctor, "built_architectures", lambda folder: parse_architectures(built))


@pytest.mark.parametrize("built", ["", "80;89;100+PTX"])
def test_every_gpu_is_told_with_the_code_that_it_runs(built: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cards(monkeypatch, [(8, 9), (12, 0)], built)
    lines = doctor.devices()[1:]
    if built:
        assert lines[0] == "CUDA kernels: machine code for 8.0, 8.9, 10.0, PTX of 10.0"
        assert lines[1] == "GPU 0: card 0, sm_89; runs machine code for 8.9, its own"
        assert lines[2].startswith("GPU 1: card 1, sm_120; runs the PTX of 10.0")
    else:
        assert lines[1:] == ["GPU 0: card 0, sm_89", "GPU 1: card 1, sm_120"]


def test_a_gpu_without_code_is_missing_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "MISSING", {"cpu": "", "cuda": ""})
    pretend_cards(monkeypatch, [(7, 5), (9, 0), (8, 6)], "89;90+PTX")
    assert doctor.advice() == [
        "missing for GPU 0: sm_75 HAS NO CODE here: the kernels need 8.0, so operations run on the PyTorch reference",
        "missing for GPU 2: sm_86 HAS NO CODE here: SPARSE_RL_BUILD=cuda SPARSE_RL_ARCHS=86 builds it, until then "
        "operations run on the PyTorch reference",
        "Everything works without them, slower.",
    ]
    pretend_cards(monkeypatch, [(9, 0)], "89;90+PTX")
    assert doctor.advice() == ["Nothing is missing."]
