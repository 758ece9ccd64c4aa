"""``sparse-rl export``, and the launch lines of the docs."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import file_size_limit
from killed import killed_at_rename
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file
from tiny_grpo import loaded, module, quiet
from tiny_run import config, run_console, write
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparse_rl_lightning import files
from sparse_rl_lightning.callbacks import ExportPolicy, RolloutCheckpoint
from sparse_rl_lightning.callbacks.outputs.export import write_policy
from sparse_rl_lightning.checkpoints.exports import check_replaceable
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies import LoraPolicy, PretrainedPolicy

ROOT = Path(__file__).parents[2]


def test_export_writes_what_from_pretrained_reads(used_folder: Path) -> None:
    (run_config,) = used_folder.rglob("run_config.yaml")
    main(["export", "--config", str(run_config), "--ckpt_path", "last", "--folder", "out/policy"])
    model = AutoModelForCausalLM.from_pretrained("out/policy")
    state = torch.load("runs/own/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[f"policy.{name}"]), name
    assert AutoTokenizer.from_pretrained("out/policy").decode([3]) != ""
    assert {path.suffix for path in Path("out/policy").iterdir()} <= {".json", ".safetensors", ".jinja"}
    assert [path.name for path in Path("out").iterdir()] == ["policy"]


def test_export_refuses_what_it_would_spoil_or_cannot_find(used_folder: Path) -> None:
    path = write(config())
    Path("full").mkdir()
    Path("full/thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds 'thesis.txt', which no export writes"):
        main(["export", "--config", path, "--ckpt_path", "last", "--folder", "full"])
    with pytest.raises(ValueError, match="does not exist"):
        main(["export", "--config", path, "--ckpt_path", "runs/none.ckpt"])
    for checkpoint in Path("runs/own/checkpoints").glob("last*"):
        checkpoint.unlink()
    with pytest.raises(ValueError, match=r"ckpt_path=last: there is no last.ckpt") as error:
        main(["export", "--config", path])
    assert "Give the path of a checkpoint: export takes last unless ckpt_path names one." in str(error.value)


def test_an_export_that_fails_leaves_nothing_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grpo = loaded()

    def full(folder: Path, **_: Any) -> None:
        (folder / "half.safetensors").write_bytes(b"much")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(grpo, "export", full)
    with pytest.raises(OSError, match="No space left"):
        write_policy(grpo, tmp_path / "policy")
    assert not list(tmp_path.iterdir())


def test_an_earlier_export_that_stays_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network disk whose files a server has open."""
    grpo = loaded()
    write_policy(grpo, tmp_path / "policy")
    (tmp_path / "policy" / "merges.txt").touch()

    def busy(path: Path) -> None:
        if path.exists():
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(files, "remove", busy)
    with pytest.warns(UserWarning, match=r"The earlier \S*policy could not be removed: .*Remove \S*\.old-"):
        write_policy(grpo, tmp_path / "policy")
    assert (tmp_path / "policy" / "config.json").is_file()
    assert not (tmp_path / "policy" / "merges.txt").exists()


class Named(LightningModule):
    """Exports its name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def export(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"model_type": self.name}))


def test_an_export_killed_between_its_renames_loses_nothing(tmp_path: Path) -> None:
    """The next run, or command, that writes there has the earlier one again before it begins."""
    folder = tmp_path / "policy"
    write_policy(Named("first"), folder)
    killed_at_rename(1, lambda: write_policy(Named("second"), folder))
    assert not folder.exists()
    check_replaceable(folder, "folder")
    assert "first" in (folder / "config.json").read_text()
    write_policy(Named("third"), folder)
    assert "third" in (folder / "config.json").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_the_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever works there, this process first, would find it gone."""
    write_policy(Named("first"), tmp_path / "policy")
    (tmp_path / "policy" / "below").mkdir()
    for place in (tmp_path / "policy", tmp_path / "policy" / "below"):
        monkeypatch.chdir(place)
        with pytest.raises(UserError, match=r"^folder='\S*policy' is or holds the working directory"):
            check_replaceable(tmp_path / "policy", "folder")


@pytest.mark.parametrize(
    "entry",
    [".git/HEAD", "README.md", "model.gguf", "adapter_config.json", "eval/model.safetensors", "checkpoints/last.ckpt",
     "sparse_adapter/thesis.tex", "model.safetensors/x", "index.html", "learned_score.safetensors"],
)  # fmt: skip
@pytest.mark.parametrize("content", ['{"model_type": "llama"}', None])
def test_a_folder_with_anything_else_in_it_is_not_replaced(entry: str, content: str | None, tmp_path: Path) -> None:
    """A file config.json was enough, and a repository, checkpoints, or what lay beside an export were removed."""
    folder = tmp_path / "proj"
    (folder / entry).parent.mkdir(parents=True)
    (folder / entry).write_text("mine")
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"^folder='.*proj' holds '.*', which no export writes, so it is not replaced"):
        check_replaceable(folder, "folder")
    with pytest.raises(UserError, match="which no export writes"):  # asked again before the rename
        write_policy(Named("llama"), folder)
    assert (folder / entry).read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["proj"]


@pytest.mark.parametrize("content", ['{"port": 80}', "[]", "{", None])
def test_a_folder_without_a_model_is_not_replaced(content: str | None, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"holds no model \(no config.json with a model_type\)"):
        check_replaceable(tmp_path, "folder")


def test_a_link_in_a_folder_is_of_no_export(tmp_path: Path) -> None:
    """As in the hub's own folders of downloads."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").symlink_to("/dev/null")
    with pytest.raises(UserError, match=r"holds 'model.safetensors', which no export writes"):
        check_replaceable(tmp_path, "folder")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (".", "is or holds trainer.default_root_dir"), ("run", "is or holds trainer.default_root_dir"),
        ("run/checkpoints", "is or holds a folder of checkpoints"), ("run/checkpoints/x", "in a folder of checkpoints"),
        ("run/version_0", "is or holds the log's folder"), ("run/version_0/x", "lies in the log's folder"),
        ("pol", "is or holds the folder of model.policy"), ("pol/x", "lies in the folder of model.policy"),
        ("link/x", "lies in the folder of model.policy"), ("run/policy", None), ("policy", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("adapts", [False, True])
def test_what_a_run_needs_is_not_replaced(place: str, said: str | None, adapts: bool, tmp_path: Path) -> None:
    """Nor is a folder that is empty, or not there yet, before the run has written into it."""
    (tmp_path / "pol").mkdir()
    (tmp_path / "link").symlink_to("pol")
    source: Any = PretrainedPolicy(str(tmp_path / "pol"))
    callback, grpo = ExportPolicy(tmp_path / place), module()
    grpo.policy_source = LoraPolicy(source) if adapts else source
    used: dict[str, Any] = {"callbacks": [callback, RolloutCheckpoint()], "logger": CSVLogger(tmp_path, "run")}
    trainer = quiet(default_root_dir=tmp_path / "run", enable_checkpointing=True, **used)
    if said is None:
        callback.setup(trainer, grpo, "fit")
    else:
        with pytest.raises(UserError, match=f"^ExportPolicy: folder='.*{said}"):
            callback.setup(trainer, grpo, "fit")


@pytest.mark.parametrize("name", ["/", "x" * 300, "/proc/x"])
def test_a_place_where_nothing_can_be_renamed_is_a_line(
    name: str, used_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_console(monkeypatch, "export", "--config", write(config()), "--folder", name) == 1
    assert len(capsys.readouterr().err.partition("error: ")[2].splitlines()) == 1
    assert sorted(path.name for path in used_folder.iterdir()) == ["config.yaml", "runs"]


def test_a_full_disk_ends_an_export_with_a_line(
    used_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Safetensors and tokenizers have errors of their own for it."""
    path = write(config())
    with file_size_limit(4096):
        assert run_console(monkeypatch, "export", "--config", path, "--folder", "policy") == 1
    said = capsys.readouterr().err.partition("error: ")[2].strip()
    assert said == "[Errno 27] File too large. Make room on the disk, or name another place."
    assert sorted(path.name for path in used_folder.iterdir()) == ["config.yaml", "runs"]
    assert run_console(monkeypatch, "export", "--config", path, "--folder", "policy") is None


def test_weights_that_a_type_cannot_hold_are_not_exported(tmp_path: Path) -> None:
    grpo = loaded()
    next(grpo.policy.parameters()).data.view(-1)[0] = 1e6
    with pytest.raises(UserError, match=r"^export as float16: 2 weights hold NaN or infinity"):
        write_policy(grpo, tmp_path / "policy", "float16")
    assert not list(tmp_path.iterdir())
    write_policy(grpo, tmp_path / "policy", "bfloat16")


def launch_line() -> list[str]:
    """The torchrun line of the docs, for two processes on this machine."""
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    line = re.search(r"^torchrun --standalone .*$", text, re.MULTILINE)
    assert line is not None
    command = line[0].replace("configs/qwen2.5-7b.yaml", "config.yaml").replace("=4", "=2").split()
    return [sys.executable, "-m", "torch.distributed.run", *command[1:]]


@pytest.mark.slow
def test_the_torchrun_line_of_the_docs(folder: Path) -> None:
    values = config()
    values["trainer"]["callbacks"].append({"class_path": "ExportPolicy", "init_args": {"folder": "runs/policy"}})
    write(values)
    command = [*launch_line(), "--trainer.max_steps=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    last = Path("runs/own/checkpoints/last.ckpt")
    state = torch.load(last / "trainer.pt", weights_only=True)
    assert state["global_step"] == 2
    assert len(state["sparse_rl"]["other_ranks"]) == 1
    weights = load_file(last / "weights.safetensors")
    exported = AutoModelForCausalLM.from_pretrained("runs/policy").state_dict()
    assert all(torch.equal(exported[name], value) for name, value in weights.items())
    main(["export", "--config", "config.yaml", "--folder", "again"])  # of a folder of shards, in one process
    again = AutoModelForCausalLM.from_pretrained("again").state_dict()
    assert all(torch.equal(again[name], value) for name, value in exported.items())


def test_the_slurm_script_is_sound() -> None:
    """It starts one task per GPU, asks for the signal that Preemption waits for, and goes on from last.ckpt."""
    script = ROOT / "docs" / "slurm.sh"
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    text = script.read_text(encoding="utf-8")
    tasks, gpus = (re.search(rf"--{key}=(\d+)", text) for key in ("ntasks-per-node", "gpus-per-node"))
    assert tasks is not None
    assert gpus is not None
    assert tasks[1] == gpus[1]
    assert "--signal=B:USR1@" in text
    assert "--ckpt_path=last" in text


@pytest.mark.parametrize(
    ("named", "left"),
    [
        ("dirpath: {}/run", None),
        ("dirpath: {}/run", "last.ckpt"),
        ("default_root_dir: {}", ".replaced/last.ckpt"),
        ("{{default_root_dir: {}, max_steps: 4}}", "last.ckpt"),
    ],
)
def test_the_slurm_script_goes_on_from_what_is_left(left: str | None, named: str, tmp_path: Path) -> None:
    """A job that was killed between the two renames has its only checkpoint in ``.replaced``."""
    (tmp_path / "config.yaml").write_text(f"{named.format(tmp_path)}\n")
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    if left is not None:
        (tmp_path / ("run" if "dirpath" in named else "checkpoints") / left).mkdir(parents=True)
    job = {"SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "8", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "docs" / "slurm.sh"), str(tmp_path / "config.yaml")]
    done = subprocess.run(command, env=os.environ | job, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--trainer.num_nodes=2" in done.stdout
    assert done.stdout.startswith("--cpus-per-task=8 ")  # which srun does not take from the job
    assert ("--ckpt_path=last" in done.stdout) == (left is not None)


def test_a_folder_without_whole_weights_is_refused(used_folder: Path) -> None:
    Path("shards.ckpt").mkdir()
    with pytest.raises(ValueError, match=r"shards.ckpt' has no weights.safetensors: it is not whole, or of"):
        main(["export", "--config", write(config()), "--ckpt_path", "shards.ckpt"])
