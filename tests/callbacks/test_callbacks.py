"""Callbacks that show and export: files, escapes, and errors at the start."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from tiny_grpo import module, quiet
from torch import Tensor

from sparse_rl_lightning import callbacks
from sparse_rl_lightning.callbacks.outputs.completions import completion_columns
from sparse_rl_lightning.checkpoints import exports
from sparse_rl_lightning.cli.training.export import ExportingTrainer
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import write_whole
from sparse_rl_lightning.modules import GRPOLoss, SupervisedWarmup
from sparse_rl_lightning.policies import LoadedPolicy
from sparse_rl_lightning.records import Rollout, ScoredRollout
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

MASK = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0]], dtype=torch.bool)
HOSTILE = "<b>\x1b[2J\x07\ud800\u202e\n|end"


def scored_rollout(keep: Tensor | None = MASK) -> ScoredRollout:
    """One prompt with two samples."""
    rollout = Rollout(
        sequences=torch.ones(2, 4, dtype=torch.int64),
        prompt_lengths=torch.ones(2, dtype=torch.int64),
        completion_mask=MASK,
        finished=torch.ones(2, dtype=torch.bool),
        sampler_logprobs=torch.full(MASK.shape, -0.5),
        rewards=torch.tensor([1.0, math.nan]),
        advantages=torch.tensor([0.5, 0.0]),
        keep=None if keep is None else keep.clone(),
    )
    table = {"right": torch.tensor([1.0, math.nan]), "reward": torch.tensor([0.0, 0.25])}
    rows = [{"prompt": "1+1=", "answer": "2"}]
    return ScoredRollout(rollout, rows, ["2", HOSTILE], table, index=10)


def test_a_single_process_watches_no_ranks(tmp_path: Path) -> None:
    watch = callbacks.RankWatch()
    watch.setup(Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path), module(), "fit")
    assert watch._watch is None


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return quiet_trainer(tmp_path)


def quiet_trainer(folder: Path, **options: Any) -> Trainer:
    return quiet(default_root_dir=folder, **options)


# ---------------------------------------------------------------- completions


def test_completions_are_printed_without_control_characters(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    scored = scored_rollout()
    scored.rollout.keep[1] = False
    callbacks.CompletionsTable(parquet=False).on_rollout_scored(trainer, LightningModule(), scored)
    shown = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in shown)
    lines = [line.split() for line in shown.strip().splitlines()]
    assert lines[0] == ["Rollout", "10"]
    assert lines[3] == ["1+1=", "2", "1.00", "0.50"]
    assert lines[4] == ["1+1=", r"<b>\x1b[2J\x07\ud800\u202e\n|end", "–", "0.00", "yes"]


def test_a_terminal_that_cannot_spell_gets_escapes(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    scored = scored_rollout()
    scored.completions[0] = "é∑"
    callbacks.CompletionsTable(parquet=False).on_rollout_scored(trainer, LightningModule(), scored)
    assert rb"\xe9\u2211" in raw.getvalue()


def test_parquet_has_every_completion_and_survives_lone_surrogates(trainer: Trainer, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = callbacks.CompletionsTable(every_n_rollouts=5, console=False)
    table.setup(trainer, LightningModule(), "fit")
    for index in (10, 11, 15):
        scored = scored_rollout()
        scored.index = index
        table.on_rollout_scored(trainer, LightningModule(), scored)
    folder = tmp_path / "completions"
    assert sorted(p.name for p in folder.iterdir()) == ["completions_00010.parquet", "completions_00015.parquet"]
    assert parquet.read_table(folder / "completions_00010.parquet").to_pydict() == {
        "step": [0, 0],
        "prompt": ["1+1=", "1+1="],
        "completion": ["2", HOSTILE.replace("\ud800", r"\ud800")],
        "answer": ["2", "2"],
        "right": [1.0, None],
        "reward_reward": [0.0, 0.25],  # a reward function called reward
        "reward": [1.0, None],
        "advantage": [0.5, 0.0],
        "rejected": [False, False],
    }


def test_columns_of_a_bare_rollout() -> None:
    scored = scored_rollout(keep=None)
    scored.rows, scored.reward_table = [{"prompt": [{"role": "user", "content": "hi"}]}], {}
    scored.rollout.advantages = None
    columns = completion_columns(scored, step=3)
    assert list(columns) == ["step", "prompt", "completion", "reward", "rejected"]
    assert columns["prompt"] == ["user: hi"] * 2


# ---------------------------------------------------------------- folders and export


def warmup() -> SupervisedWarmup:
    tokenizer = character_tokenizer("01=")
    return SupervisedWarmup(LoadedPolicy(tiny_model(vocab_size=len(tokenizer), hidden_size=16), tokenizer))


def fit(trainer: Trainer) -> None:
    trainer.fit(warmup(), torch.utils.data.DataLoader([{"prompt": "0=", "solution": "1"}] * 4, collate_fn=list))


@pytest.mark.parametrize("kind", ["CompletionsTable", "ExportPolicy"])
def test_an_unwritable_folder_is_an_error_before_training(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    callback = getattr(callbacks, kind)(folder=tmp_path / "file" / "inside")
    module = warmup()
    with pytest.raises(ValueError, match=rf"{kind}: .*cannot be written.*Give a folder you may write to"):
        quiet_trainer(tmp_path, max_steps=1, callbacks=[callback]).fit(module, [[]])
    assert module.policy is None  # nothing had been loaded yet


def test_export_replaces_an_export_whole(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "runs" / "policy"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "merges.txt").write_text("of an earlier run")
    trainer = quiet_trainer(tmp_path, max_steps=2, callbacks=[callbacks.ExportPolicy(folder)])
    fit(trainer)
    assert [p.name for p in folder.parent.iterdir()] == ["policy"]
    assert not (folder / "merges.txt").exists()
    exported = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    trained = trainer.lightning_module.policy.state_dict()
    assert all(exported[name].equal(trained[name]) for name in trained)
    assert AutoTokenizer.from_pretrained(folder)("01")["input_ids"] == [3, 4]


def test_export_leaves_other_folders_and_trial_runs_alone(tmp_path: Path) -> None:
    fit(quiet_trainer(tmp_path, fast_dev_run=True, callbacks=[callbacks.ExportPolicy(tmp_path / "policy")]))
    with pytest.raises(ValueError, match="no export"):
        callbacks.ExportPolicy(tmp_path / "policy").setup(quiet_trainer(tmp_path), LightningModule(), "fit")
    assert not list(tmp_path.iterdir())


def test_what_an_export_s_link_leads_to_is_checked_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export is made beside it, on the disk that it leads to."""
    scratch, link = tmp_path / "scratch", tmp_path / "policy"
    link.symlink_to(scratch / "me")
    asked: list[Path] = []

    def writable(folder: Path, argument: str) -> Path:
        asked.append(folder)
        raise UserError(argument)

    with monkeypatch.context() as patch:
        patch.setattr(exports, "writable_folder", writable)
        for use in (
            lambda: callbacks.ExportPolicy(link).setup(quiet_trainer(tmp_path), Exports(), "fit"),
            command(link),
        ):
            with pytest.raises(UserError, match="folder's parent"):
                use()
    assert asked == [scratch, scratch]
    fit(quiet_trainer(tmp_path, max_steps=1, callbacks=[callbacks.ExportPolicy(link)]))
    assert link.is_symlink()
    assert (scratch / "me" / "config.json").is_file()
    assert [path.name for path in scratch.iterdir()] == ["me"]


class Exports(LightningModule):
    """The method that ExportPolicy asks for."""

    def export(self, folder: Path) -> None:
        """Nothing."""


def command(folder: Path) -> Callable[[], None]:
    """``sparse-rl export`` of a checkpoint to a folder."""
    trainer, checkpoint = ExportingTrainer(logger=False, accelerator="cpu"), folder.with_name("a.ckpt")
    checkpoint.touch()
    return lambda: trainer.export(Exports(), ckpt_path=str(checkpoint), folder=str(folder))


def test_an_export_is_not_put_in_place_of_what_cannot_be_renamed(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "disk").symlink_to("/dev/shm")
    for name, match in {"a": "cannot be written", "disk": "is a disk of its own"}.items():
        with pytest.raises(UserError, match=f"^ExportPolicy: folder=.*{match}"):
            callbacks.ExportPolicy(tmp_path / name).setup(quiet_trainer(tmp_path), Exports(), "fit")


def test_files_are_written_whole(tmp_path: Path) -> None:
    for content, written in (("x\ud800", b"x\\ud800"), (b"new", b"new")):
        write_whole(tmp_path / "a.html", content)
        assert (tmp_path / "a.html").read_bytes() == written
    assert [p.name for p in tmp_path.iterdir()] == ["a.html"]


NAN, INF = float("nan"), float("inf")
COUNTS = ("every_n_rollouts", "top_k", "bin_size", "num_bins", "ceiling_every_n_rollouts")
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: callbacks.SparsityAwareRejection(low=2.0, high=1.0), r"low=2\.0, high=1\.0"),
    (lambda: callbacks.SparsityAwareRejection(threshold=None), "threshold, low and high are all null"),
    (lambda: callbacks.SparsityAwareRejection(level="geometric"), "give low or high"),
    (lambda: callbacks.SparsityAwareRejection(threshold=None, low=0.0), "are all null or no bound"),
    (lambda: callbacks.SparsityAwareRejection(threshold=None, high=math.inf), "are all null or no bound"),
    (lambda: callbacks.SparsityAwareRejection(threshold="0.1"), "threshold must be a finite number, or null"),
    (lambda: callbacks.SparsityAwareRejection(low="0.5"), "low must be a finite number"),
    (lambda: callbacks.SparsityAwareRejection(low=0.5, level="bad"), "level must be one of token, sequence, geometric"),
    (lambda: callbacks.ScoreCentering(2.5), "top must be a whole number"),
    (lambda: callbacks.CIS(threshold=-1.0), "threshold must be at least 0"),
    (lambda: callbacks.CIS(floor=-1.0), "floor must be at least 0"),
    (lambda: GRPOLoss(off_policy_delta=-1.0), r"loss\.off_policy_delta must be at least 0"),
    (lambda: GRPOLoss(off_policy_reference="dense"), r"loss\.off_policy_reference must be"),  # type: ignore[arg-type]
    (lambda: module(reward_timeout=NAN), "reward_timeout must be"),
    (lambda: module(reward_timeout=INF), "reward_timeout must be"),
    (lambda: callbacks.CompletionsTable(width=3), "width=3"),
    (lambda: callbacks.RolloutProgress(line_seconds=-1), "line_seconds=-1"),
    *[
        (lambda name=name: callbacks.AcceptanceMonitor(**{name: 0}), f"{name} must be at least 1, got {name}=0")
        for name in COUNTS
    ],
    (lambda: callbacks.AcceptanceMonitor().on_fit_start(None, warmup()), "SupervisedWarmup does not roll out"),
    (lambda: callbacks.MismatchSplit(every_n_rollouts=0), "every_n_rollouts must be at least 1, got"),
    (lambda: callbacks.MismatchSplit(tolerance=0.0), "tolerance must be above 0, got"),
    (lambda: callbacks.StepGuard(max_staleness_ratio=0.5), "StepGuard: max_staleness_ratio must be at least 1"),
    (lambda: callbacks.StepGuard(spike_factor=0.5), "StepGuard: spike_factor must be at least 1"),
    (lambda: callbacks.TailGuard(True), "mode must be one of off, warn, raise, stop, got mode=True"),  # type: ignore[arg-type]
    (lambda: callbacks.TailGuard("loud"), "mode='loud'"),  # type: ignore[arg-type]
    (lambda: callbacks.TailGuard(target=1.5), "target=1.5"),
    (lambda: callbacks.TailGuard(max_raises=-1), "max_raises=-1"),
    (lambda: callbacks.TailGuard(max_rejection_rate=0.0), "max_rejection_rate=0.0"),
    (lambda: callbacks.TailGuard(length_drop=1.2), "length_drop=1.2"),
    (lambda: callbacks.TailGuard(min_tokens=0), "min_tokens=0"),
    (lambda: callbacks.TailGuard(window=0), "window=0"),
    (lambda: callbacks.TailGuard(patience=0), "patience=0"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_an_option_out_of_range_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
