"""Who may train together: strategies, processes and ports that are refused, by name, before anything is loaded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from tiny_grpo import Rows, fit, module
from tiny_run import config, write

from sparse_rl_lightning.cli import main
from sparse_rl_lightning.cli.launch import VARIABLE, follow_launcher
from sparse_rl_lightning.distributed.deepspeed import not_deepspeed
from sparse_rl_lightning.distributed.ranks import check_processes
from sparse_rl_lightning.fingerprints import fingerprint

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("given", "use"),
    [
        ("deepspeed_stage_2", "Use --trainer.strategy=sparse_rl_deepspeed_stage_2,"),
        ("deepspeed_stage_3_offload", "Use --trainer.strategy=sparse_rl_deepspeed_stage_3_offload,"),
        ("deepspeed", r"Use --trainer.strategy=sparse_rl_deepspeed_stage_2 \(or \['sparse_rl_deepspeed_stage_1'"),
        ('{"class_path": "lightning.pytorch.strategies.DeepSpeedStrategy"}', "=sparse_rl_deepspeed_stage_2"),
    ],
)
def test_lightnings_own_deepspeed_is_refused_with_the_name_of_ours(given: str, use: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=f"divides the loss twice where gradients are accumulated. .*{use}"):
        main(["fit", "--config", write(config()), f"--trainer.strategy={given}"])


@pytest.mark.parametrize("given", ["fsdp_cpu_offload", '{"class_path": "lightning.pytorch.strategies.FSDPStrategy"}'])
def test_lightnings_own_fsdp_too(given: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"FSDP1 flattens weights, .*Use --trainer.strategy=sparse_rl_fsdp2"):
        main(["fit", "--config", write(config()), f"--trainer.strategy={given}"])


def test_and_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is an extra")
    strategy = DeepSpeedStrategy(stage=2)
    with pytest.raises(ValueError, match="DeepSpeedStrategy is Lightning's own, which divides"):
        fit(module(), 1, strategy=strategy)
    assert "sparse_rl_deepspeed_stage_3," in not_deepspeed("trainer.strategy=deepspeed_stage_3")


@pytest.mark.parametrize(("started", "devices", "fits"), [(2, 1, False), (2, 3, False), (2, 2, True), (1, 2, True)])
def test_devices_must_fit_the_processes(started: int, devices: int, fits: bool, monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(started))
    monkeypatch.setenv("RANK", "0")
    if fits:
        check_processes(devices)
        return
    with pytest.raises(ValueError, match=rf"{started} processes were started .* and the trainer is of {devices}: each"):
        check_processes(devices)


@pytest.mark.parametrize("devices", ["1", "3"])
def test_two_processes_that_do_not_know_of_each_other(devices: str, folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match="2 processes were started"):
        main(["fit", "--config", write(config()), f"--trainer.devices={devices}"])
    if devices == "1":
        with pytest.raises(ValueError, match="2 processes were started"):
            fit(module(), 1)


def test_a_variable_of_the_machine_starts_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    check_processes(1)


def test_ranks_that_have_met_may_test_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fit on several ranks, as Lightning advises; a fit of its own is refused to each still."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
        (metrics,) = trainer.validate(module(), Rows(prompts_per_rollout=4), verbose=False)
        assert "val/reward_dense" in metrics
        with pytest.raises(ValueError, match="2 processes were started"):
            fit(module(), 1)
    finally:
        torch.distributed.destroy_process_group()


def test_fingerprints_tell_apart_what_differs() -> None:
    rows: list[Any] = [
        [{"a": 1}], [{"a": 2}], [{"b": 1}], [{"a": "1"}], [[1, 2], [3]], [[1], [2, 3]], [None], [1.0], [-0.0], [0.0],
        [torch.zeros(2)], [torch.zeros(2, dtype=torch.bfloat16)], [torch.zeros(2, 1)], [torch.tensor([0.0, -0.0])],
        [torch.tensor(1)], [float("nan")], [torch.tensor([float("nan")])],
    ]  # fmt: skip
    assert len({fingerprint(values=values) for values in rows}) == len(rows)
    turned = torch.arange(6).view(2, 3).T
    assert fingerprint(values=[object(), turned]) == fingerprint(values=[object(), turned.contiguous()])


@pytest.mark.parametrize("inherited", [{"LOCAL_RANK": "0", VARIABLE: "1"}, {"LOCAL_RANK": "1"}, {}])
def test_what_a_rank_starts_by_itself_follows_nobody(inherited: dict[str, str], monkeypatch: Any) -> None:
    """Rank zero has the first environment once others were started, and every other rank the second."""
    for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", VARIABLE):
        monkeypatch.setenv(name, "")  # so that what is set here is undone
        monkeypatch.delenv(name)
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    follow_launcher()
    assert os.environ[VARIABLE] == str(os.getpid())
    assert "follow_launcher" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.slow
def test_a_port_that_is_taken_is_named_and_no_process_stays_behind(folder: Path) -> None:
    """The second rank, which Lightning starts, holds the output open: the command ends when it has gone too."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [
            sys.executable, "-m", "sparse_rl_lightning", "fit", "--config", write(config(max_steps=2)),
            "--trainer.devices=2", "--trainer.strategy=ddp",
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert f"error: The ranks cannot meet at 127.0.0.1:{port}: another program listens there." in done.stderr
    assert "Traceback" not in done.stderr
