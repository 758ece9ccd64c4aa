"""The doctor names every op, the path each takes, and the cure."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from sparse_rl_lightning import cli, ops
from sparse_rl_lightning.cli import doctor
from sparse_rl_lightning.ops.schemas import SCHEMAS


def test_every_op_has_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sparse-rl", "doctor"])
    cli.console()
    text = capsys.readouterr().out
    here = "native" if ops.HAS_NATIVE else "reference"
    for name in SCHEMAS:
        assert f"{name:<20} {here:<10} " in text
    assert torch.__version__ in text
    assert ("Nothing is missing." in text) == (ops.HAS_NATIVE and not torch.cuda.is_available())


def test_without_kernels_the_cure_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sparse_rl_lightning.cli.doctor"], capture_output=True, text=True, check=True,
        env={**os.environ, "SPARSE_RL_NATIVE": "0"},
    )  # fmt: skip
    assert f"{'append':<20} reference" in done.stdout
    assert "missing for CPU: switched off by SPARSE_RL_NATIVE=0" in done.stdout
    checkout = (doctor.PACKAGE.parent / "setup.py").exists()
    assert ("pip install --no-build-isolation -e ." in done.stdout) == checkout
