"""Strategies by name and by file: what they stand for, that they run, and what is refused in their place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy, StrategyRegistry
from tiny_grpo import fit, module
from tiny_run import config, write

from sparse_rl_lightning.distributed.deepspeed import SparseRLDeepSpeed, zero_config
from sparse_rl_lightning.distributed.fsdp2 import SparseRLFSDP2
from sparse_rl_lightning.distributed.ranks import check_strategy

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "zero_1": (1, False, False),
    "zero_2": (2, False, False),
    "zero_2_offload": (2, True, False),
    "zero_3": (3, False, False),
    "zero_3_offload": (3, True, True),
}
NAMES = {f"sparse_rl_deepspeed_{name.replace('zero', 'stage')}": settings for name, settings in FILES.items()}


def test_files_say_what_the_names_do() -> None:
    folder = ROOT / "configs" / "deepspeed"
    assert {path.stem for path in folder.iterdir()} == FILES.keys()
    for name, settings in FILES.items():
        assert json.loads((folder / f"{name}.json").read_text()) == zero_config(*settings)


def test_what_is_not_asked_for_is_not_offloaded() -> None:
    assert zero_config(3) == {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "contiguous_gradients": True, "overlap_comm": True},
    }
    for stage, offloaded, said in ((4, False, "got stage=4"), (0, False, "got stage=0"), (2, True, "needs stage=3")):
        with pytest.raises(ValueError, match=said):
            zero_config(stage, offload_parameters=offloaded)
    pytest.importorskip("deepspeed", reason="deepspeed is an extra")
    assert SparseRLDeepSpeed().config == zero_config(2)
    assert SparseRLDeepSpeed(3, offload_parameters=True).config == zero_config(3, False, True)


def test_names_of_the_command_line() -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is an extra")
    known = {name for name in StrategyRegistry.available_strategies() if name.startswith("sparse_rl_deepspeed")}
    assert known == NAMES.keys()
    for name, settings in NAMES.items():
        strategy = StrategyRegistry.get(name)
        assert isinstance(strategy, SparseRLDeepSpeed)
        assert strategy.config == zero_config(*settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "sparse_rl_fsdp2"])
def test_every_name_trains_and_saves(name: str, folder: Path) -> None:
    """One process, which shares with nobody."""
    if name in NAMES:
        pytest.importorskip("deepspeed", reason="deepspeed is an extra")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-m", "sparse_rl_lightning", "fit", "--config", write(config(max_steps=2))]
    environment = {**os.environ, "PYTHONPATH": path, "XDG_STATE_HOME": str(folder)}
    done = subprocess.run([*command, f"--trainer.strategy={name}"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    saved = folder / "runs" / "own" / "checkpoints" / "last.ckpt"
    sharding = f"ZeRO-{NAMES[name][0]}" if name in NAMES else "FSDP2"
    assert torch.load(saved / "trainer.pt", weights_only=True)["global_step"] == 2
    assert json.loads(json.loads((saved / "manifest.json").read_text())["body"])["sharding"] == sharding


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_float16_on_cpus_is_refused(precision: str) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is an extra")
    said = f"trainer.precision={precision} with trainer.strategy=SparseRLDeepSpeed.* to bf16-mixed or 32-true"
    with pytest.raises(ValueError, match=said):
        fit(module(), 1, strategy=SparseRLDeepSpeed(stage=2), precision=precision)


def test_fully_sharded_by_name() -> None:
    strategy = StrategyRegistry.get("sparse_rl_fsdp2")
    assert isinstance(strategy, SparseRLFSDP2)
    with pytest.raises(TypeError, match="has no storage_options"):
        strategy.save_checkpoint({}, "last.ckpt", storage_options={})


@pytest.mark.parametrize(
    ("strategy", "why"),
    [(FSDPStrategy(), "FSDP1 flattens weights"), (ModelParallelStrategy(), "its checkpoints are unpickled")],
    ids=["FSDP1", "FSDP2"],
)
def test_lightnings_own_are_refused(strategy: Strategy, why: str) -> None:
    said = f"trainer.strategy={type(strategy).__name__}: {why}.* Use --trainer.strategy=sparse_rl_f"
    with pytest.raises(ValueError, match=said):
        check_strategy(strategy)
