"""Progress, summary and completions in real runs of SparseGRPO: what is shown, what is written, what a resume keeps."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_grpo
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from tiny_grpo import Rows, module, quiet, weights

import sparse_rl_lightning.callbacks as library
from sparse_rl_lightning.compressors import Compressor, FullKV, StreamingLLM
from sparse_rl_lightning.modules import SparseGRPO
from sparse_rl_lightning.rollout import SamplingParams
from sparse_rl_lightning.testing import tiny_model


class Prompts(Rows):
    """Sixteen training and six validation prompts."""

    def val_rows(self) -> list[dict[str, Any]]:
        return self.train_rows()[:6]


def has_answer(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
    return [float(right in text) for right, text in zip(answer, completions, strict=True)]


def fit(
    folder: Path, callbacks: list[Any], steps: int = 4, compressor: Compressor | None = None,
    data: Prompts | None = None, val_sampling: SamplingParams | None = None, **options: Any,
) -> Trainer:  # fmt: skip
    """Rollouts of 2 prompts x 4 samples, two optimizer steps each."""
    compressor = compressor or StreamingLLM(budget=8, buffer=3, num_sinks=1, window=4)
    sizes = {"lr": 0.1, "max_completion_length": 10, "steps_per_generation": 2, "val_sampling": val_sampling}
    grpo = module(has_answer, compressor, **sizes)
    source: Any = grpo.policy_source
    source.model = tiny_model(vocab_size=len(source.tokenizer), hidden_size=32, initializer_range=0.4)
    shown = any(isinstance(callback, library.RolloutProgress) for callback in callbacks)
    return tiny_grpo.fit(
        grpo, steps, [library.SparsityAwareRejection(), library.ImportanceReweighting(), *callbacks],
        data or Prompts(prompts_per_rollout=2), default_root_dir=folder, log_every_n_steps=1,
        enable_progress_bar=shown, enable_checkpointing="ckpt_path" in options, **options,
    )  # fmt: skip


def forget_times(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in history]


class Unwritten(library.RunSummary):
    """A summary that spares the test the time for pictures."""

    def _write(self, folder: Path) -> None:
        pass


# ---------------------------------------------------------------- summary


def test_summary_reports_the_run_and_leaves_it_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = library.RunSummary(num_problems=5, num_samples=2, batch_size=2)
    with_summary = fit(tmp_path, [summary, library.CompletionsTable(every_n_rollouts=1, console=False)])
    shown = capsys.readouterr().out
    random_state = torch.get_rng_state()
    torch.manual_seed(0)  # as before the first run
    other = fit(tmp_path / "other", [])
    assert weights(with_summary.lightning_module).equal(weights(other.lightning_module))
    assert torch.get_rng_state().equal(random_state)

    numbers = json.loads((tmp_path / "summary.json").read_text())
    assert numbers["summary"]["optimizer_steps"] == 4
    assert numbers["summary"]["held_out_problems"] == 5
    assert numbers["summary"]["measure"] == "accuracy"
    for moment in ("before", "after"):
        results = numbers["summary"][moment]
        assert set(results) == {"dense", "sparse"}
        assert all(5 * share == pytest.approx(round(5 * share)) for share in results.values())
    assert [row["step"] for row in numbers["history"]] == [0, 2]
    assert [s["prompt"] for s in numbers["samples"]] == [row["prompt"] for row in Prompts().val_rows()[:2]]
    assert [s["answer"] for s in numbers["samples"]] == ["0", "1"]

    grpo = with_summary.lightning_module
    assert grpo.generator.sampler().cache is None  # evaluation gave its memory back
    rows = Prompts().val_rows()[:5]
    dense, sparse = (grpo.generator.generate(rows, grpo.val_sampling, dense=d) for d in (True, False))
    assert numbers["summary"]["after"]["dense"] == pytest.approx(float(grpo.rewards(dense).mean()))
    assert [s["completion"] for s in numbers["samples"]] == sparse.completions[:2] != dense.completions[:2]

    assert "greedy accuracy, 5 held-out problems, known to ±0.44" in shown
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h1>SparseGRPO with StreamingLLM, budget 8 + 3 tokens</h1>" in html
    assert "SparsityAwareRejection, ImportanceReweighting" in html
    pytest.importorskip("matplotlib")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "completions").iterdir())) == 2


def test_a_resumed_run_keeps_evaluation_and_history(tmp_path: Path) -> None:
    whole = Unwritten(num_problems=3)
    fit(tmp_path / "whole", [whole], steps=8)
    first = Unwritten(num_problems=3)
    save = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=3, save_top_k=-1)
    fit(tmp_path / "cut", [first, save], steps=3, ckpt_path=None)
    (checkpoint,) = (tmp_path / "ckpt").glob("*.ckpt")
    state = torch.load(checkpoint, weights_only=True)["callbacks"][first.state_key]
    assert state["before"] == whole.record.before
    state["seconds"] = 1e6
    state["before"]["dense"] = first.record.before["dense"] = 0.125  # to see that it is taken, not evaluated again
    content = torch.load(checkpoint, weights_only=True)
    content["callbacks"][first.state_key] = state
    torch.save(content, checkpoint)

    resumed = Unwritten(num_problems=3)
    fit(tmp_path / "cut", [resumed], steps=8, ckpt_path=str(checkpoint))
    assert resumed.record.before["dense"] == 0.125
    assert resumed.record.after == whole.record.after
    assert forget_times(resumed.record.history) == forget_times(whole.record.history)
    assert len(whole.record.history) == 4
    assert all("empty_rollouts" in row for row in resumed.record.history)
    assert resumed.record.seconds > 1e6


def test_dense_runs_and_runs_without_held_out_problems(tmp_path: Path) -> None:
    dense = Unwritten(num_problems=2)
    fit(tmp_path, [dense], steps=1, compressor=FullKV())
    assert set(dense.record.after) == {"dense"}
    assert dense.record.title == "SparseGRPO with FullKV"
    assert {s["cache"] for s in dense.record.samples} == {"dense"}
    none = Unwritten(num_problems=0)
    fit(tmp_path, [none], steps=1)
    assert none.record.before == none.record.after == {}
    assert len(none.record.history) == 1


def test_missing_validation_rows_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prompts, "val_rows", lambda data: [])
    with pytest.warns(UserWarning, match="no validation rows"):
        fit(tmp_path, [Unwritten()], steps=1)


def test_a_trial_run_leaves_the_tables_of_another_run(tmp_path: Path) -> None:
    table, times = tmp_path / "completions" / "completions_00000.parquet", set[int]()
    for options in ({}, {"fast_dev_run": True}):
        fit(tmp_path, [library.CompletionsTable(console=False)], **options)
        times.add(table.stat().st_mtime_ns)
    assert len(times) == 1


def test_a_trial_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, [library.RunSummary(num_problems=1)], fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []
    assert "greedy" in capsys.readouterr().out


def test_an_unwritable_folder_is_an_error_before_the_first_rollout(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"RunSummary: folder=.*cannot be written"):
        fit(tmp_path, [library.RunSummary(folder=tmp_path / "file")])


# ---------------------------------------------------------------- progress


class Terminal(io.StringIO):
    """An output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_in_a_terminal_is_one_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "200")
    callback = library.RolloutProgress(refresh_seconds=0)
    trainer = fit(tmp_path, [callback])
    assert trainer.progress_bar_callback is callback
    shown = sys.stdout.getvalue()
    frames = [frame for frame in shown.split("\r") if frame.strip()]
    assert "0/4" in frames[0] or "0/?" in frames[0]
    rolling = [frame for frame in frames if frame.startswith("Rollout")]
    assert "/8, " in rolling[0]
    assert "tokens/s" in rolling[0]
    last = frames[-1]
    assert last.startswith("Trained: 100%")
    assert "4/4" in last
    order = [last.index(name) for name in ("reward ", "length ", "rejected ", "KV saved ")]
    assert order == sorted(order)
    assert "loss" not in shown
    assert shown.count("\n") == 1  # the end of the one bar


def test_progress_without_a_terminal_is_a_line_now_and_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, [library.RolloutProgress(line_seconds=3600)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len(lines) == 2  # at once, and at the end
    assert re.match(r"step 0/4: rollout \d/8, [\d,]+ tokens/s$", lines[0])
    assert lines[1].startswith("step 4/4: trained; reward ")
    fit(tmp_path, [library.RolloutProgress(line_seconds=0)])
    assert len(capsys.readouterr().out.splitlines()) > 20


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


def fit_watched(folder: Path, accelerator: str, **options: Any) -> SparseGRPO:
    grpo = module(kind=Watched, **options)
    grpo.accelerator = accelerator  # type: ignore[attr-defined]
    callbacks = [library.RunSummary(num_problems=2, folder=folder), library.ExportPolicy(folder / "policy")]
    strategy: Any = Elsewhere(torch.device("cpu")) if accelerator == "cpu" else "auto"
    options = {"accelerator": accelerator, "devices": 1, "strategy": strategy, "default_root_dir": folder}
    quiet(1, callbacks=callbacks, **options).fit(grpo, datamodule=Rows())
    return grpo


@pytest.mark.parametrize(
    ("accelerator", "options"), [("cpu", {}), pytest.param("cuda", {"cuda_graphs": "require"}, marks=pytest.mark.gpu)]
)
def test_the_last_evaluation_and_the_export_are_on_the_device(
    accelerator: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """On the first GPU the last evaluation was on the CPU."""
    grpo = fit_watched(tmp_path, accelerator, **options)
    assert set(grpo.seen) == {"draws on the device", "exports from the device"}
    if accelerator == "cuda":
        assert place(grpo) == "the host"  # where Lightning leaves it
    record = json.loads((tmp_path / "summary.json").read_text())
    assert set(record["summary"]["after"]) == {"dense", "sparse"}
    assert (tmp_path / "policy" / "model.safetensors").is_file()
