"""What is computed at the end of fit: on the device of the training, from which Lightning has taken the module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from tiny_grpo import Rows, module

from sparse_rl_lightning.callbacks import ExportPolicy, RunSummary
from sparse_rl_lightning.modules import SparseGRPO


class Elsewhere(SingleDeviceStrategy):
    """The CPU as a device, in float32, and as the memory of the host, in float64."""

    def teardown(self) -> None:
        super().teardown()
        self.lightning_module.double()


class Watched(SparseGRPO):
    """Notes where its weights are when it is asked for texts or for its weights."""

    accelerator = "cpu"

    def configure_model(self) -> None:
        super().configure_model()
        self.seen: list[str] = getattr(self, "seen", [])
        own = self.generator.generate

        def generate(*args: Any, **options: Any) -> Any:
            self.seen.append(f"draws on {place(self)}")
            return own(*args, **options)

        self.generator.generate = generate  # type: ignore[method-assign]

    def to(self, *place: Any, **options: Any) -> Watched:
        moved: Watched = super().to(*place, **options)
        return moved.float() if self.accelerator == "cpu" else moved

    def export(self, folder: str | Path, dtype: str | None = None) -> None:
        self.seen.append(f"exports from {place(self)}")
        super().export(folder, dtype)


def place(grpo: Watched) -> str:
    weight = next(grpo.parameters())
    is_there = weight.is_cuda if grpo.accelerator == "cuda" else weight.dtype == torch.float32
    return "the device" if is_there else "the host"


def fit(folder: Path, accelerator: str, **options: Any) -> SparseGRPO:
    grpo = module(kind=Watched, **options)
    grpo.accelerator = accelerator  # type: ignore[attr-defined]
    callbacks = [RunSummary(num_problems=2, folder=folder), ExportPolicy(folder / "policy")]
    strategy: Any = Elsewhere(torch.device("cpu")) if accelerator == "cpu" else "auto"
    trainer = Trainer(
        accelerator=accelerator, devices=1, max_steps=1, logger=False, enable_checkpointing=False, strategy=strategy,
        enable_model_summary=False, enable_progress_bar=False, callbacks=callbacks, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(grpo, datamodule=Rows())
    return grpo


@pytest.mark.parametrize(
    ("accelerator", "options"),
    [("cpu", {}), pytest.param("cuda", {"cuda_graphs": "require"}, marks=pytest.mark.gpu)],
)
def test_the_last_evaluation_and_the_export_are_on_the_device(
    accelerator: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """On the first GPU the last evaluation was on the CPU."""
    grpo = fit(tmp_path, accelerator, **options)
    assert set(grpo.seen) == {"draws on the device", "exports from the device"}
    if accelerator == "cuda":
        assert place(grpo) == "the host"  # where Lightning leaves it
    record = json.loads((tmp_path / "summary.json").read_text())
    assert set(record["summary"]["after"]) == {"dense", "sparse"}
    assert (tmp_path / "policy" / "model.safetensors").is_file()
