"""The doctor names every op, the path each takes, and the cure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparse_rl_lightning import cli, ops
from sparse_rl_lightning.cli import doctor
from sparse_rl_lightning.ops.architectures import parse_architectures
from sparse_rl_lightning.ops.schemas import SCHEMAS


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


def test_without_kernels_the_cure_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sparse_rl_lightning.cli.doctor"], capture_output=True, text=True, check=True,
        env={**os.environ, "SPARSE_RL_NATIVE": "0"},
    )  # fmt: skip
    assert f"{'append':<20} reference" in done.stdout
    assert "missing for CPU: switched off by SPARSE_RL_NATIVE=0" in done.stdout
    checkout = (doctor.PACKAGE.parent / "setup.py").exists()
    assert ("pip install --no-build-isolation -e ." in done.stdout) == checkout


def fake_smi(folder: Path, text: str, status: int = 0) -> str:
    """A PATH on which nvidia-smi answers so."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\necho '{text}'\nexit {status}\n", encoding="utf-8")
    path.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is no CPU build")
def test_a_cpu_build_of_torch_beside_a_gpu_is_told(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sparse_rl_lightning.cli.doctor"], capture_output=True, text=True, check=True,
        env={**os.environ, "PATH": fake_smi(tmp_path, "NVIDIA L40S")},
    )  # fmt: skip
    assert "GPU: NVIDIA L40S, which torch cannot use" in done.stdout
    assert "There is a GPU, but this torch is a CPU build: pip install --force-reinstall torch==" in done.stdout
    assert "+cpu from PyPI" not in done.stdout
    assert "Nothing is missing" not in done.stdout


def test_a_cuda_build_of_torch_that_cannot_use_a_gpu_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_smi(tmp_path, "NVIDIA L40S"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
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
