"""``sparse-rl export``, and the launch lines of the docs."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from killed import killed_at_rename
from lightning.pytorch import LightningModule
from safetensors.torch import load_file
from tiny_grpo import loaded, module
from tiny_run import config, write
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparse_rl_lightning import files
from sparse_rl_lightning.callbacks.outputs.export import check_replaceable, write_policy
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.errors import UserError

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
    with pytest.raises(ValueError, match="holds no model"):
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
    grpo = module()
    grpo.configure_model()
    write_policy(grpo, tmp_path / "policy")
    (tmp_path / "policy" / "mark").touch()

    def busy(path: Path) -> None:
        if path.exists():
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(files, "remove", busy)
    with pytest.warns(UserWarning, match=r"The earlier \S*policy could not be removed: .*Remove \S*\.policy\.old-"):
        write_policy(grpo, tmp_path / "policy")
    assert (tmp_path / "policy" / "config.json").is_file()
    assert not (tmp_path / "policy" / "mark").exists()


class Named(LightningModule):
    """Exports its name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def export(self, folder: Path) -> None:
        (folder / "config.json").write_text(self.name)


def test_an_export_killed_between_its_renames_loses_nothing(tmp_path: Path) -> None:
    """The next run, or command, that writes there has the earlier one again before it begins."""
    folder = tmp_path / "policy"
    write_policy(Named("first"), folder)
    killed_at_rename(1, lambda: write_policy(Named("second"), folder))
    assert not folder.exists()
    check_replaceable(folder, "folder")
    assert (folder / "config.json").read_text() == "first"
    write_policy(Named("third"), folder)
    assert (folder / "config.json").read_text() == "third"
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_the_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever works there, this process first, would find it gone."""
    write_policy(Named("first"), tmp_path / "policy")
    (tmp_path / "policy" / "below").mkdir()
    for place in (tmp_path / "policy", tmp_path / "policy" / "below"):
        monkeypatch.chdir(place)
        with pytest.raises(UserError, match=r"^folder='\S*policy' is or holds the working directory"):
            check_replaceable(tmp_path / "policy", "folder")


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


@pytest.mark.parametrize("named", ["dirpath: {}/run", "default_root_dir: {}", "{{default_root_dir: {}, max_steps: 4}}"])
@pytest.mark.parametrize("left", [None, "last.ckpt", ".replaced/last.ckpt"])
def test_the_slurm_script_goes_on_from_what_is_left(left: str | None, named: str, tmp_path: Path) -> None:
    """A job that was killed between the two renames has its only checkpoint in ``.replaced``."""
    (tmp_path / "config.yaml").write_text(f"{named.format(tmp_path)}\n")
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    if left is not None:
        (tmp_path / ("run" if "dirpath" in named else "checkpoints") / left).mkdir(parents=True)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "8",
    }
    command = ["bash", str(ROOT / "docs" / "slurm.sh"), str(tmp_path / "config.yaml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--trainer.num_nodes=2" in done.stdout
    assert done.stdout.startswith("--cpus-per-task=8 ")  # which srun does not take from the job
    assert ("--ckpt_path=last" in done.stdout) == (left is not None)


def test_a_folder_without_whole_weights_is_refused(used_folder: Path) -> None:
    Path("shards.ckpt").mkdir()
    with pytest.raises(ValueError, match=r"shards.ckpt' has no weights.safetensors: it is not whole, or of"):
        main(["export", "--config", write(config()), "--ckpt_path", "shards.ckpt"])
