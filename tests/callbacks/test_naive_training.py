"""A run whose samples are of a compressed cache, and whose loss takes them for the full one's, says so at its start."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from lightning.pytorch import LightningModule

from sparse_rl_lightning.callbacks import (
    TIS,
    ImportanceReweighting,
    MismatchSplit,
    RunSummary,
    SparsityAwareRejection,
    StepGuard,
)
from sparse_rl_lightning.callbacks.base import RolloutCallback, warn_of_run
from sparse_rl_lightning.callbacks.corrections.naive import learns_from_less, naive_warning
from sparse_rl_lightning.callbacks.outputs.run_facts import describe
from sparse_rl_lightning.compressors import FullKV, SnapKV
from sparse_rl_lightning.modules import ReplayGRPO, SparseGRPO
from sparse_rl_lightning.retrievers import Centroid
from tests.tiny_grpo import fit, module


class Own(RolloutCallback):
    """A correction that the library does not know."""

    def correct(self, trainer: Any, module: Any, part: Any) -> None:
        part.weights = None


class Repeats(RolloutCallback):
    """Warns of every rollout in the same words."""

    def on_rollout_drawn(self, trainer: Any, module: Any, scored: Any) -> None:
        warn_of_run(trainer, "the same words")


def warned(callbacks: list[Any], **options: Any) -> str:
    """What the start of a run says of naive training."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        fit(module(**options), 1, callbacks)
    said = [str(one.message) for one in record if "naive training" in str(one.message)]
    assert len(said) <= 1
    return "".join(said)


NAIVE: dict[str, dict[str, Any]] = {
    "RKV": {},
    "SnapKV": {"compressor": SnapKV(budget=8, buffer=3, num_sinks=1, window=2)},
    "pages": {"compressor": FullKV(), "retriever": Centroid(budget=8, page_size=2, num_dense_layers=0)},
    "replayed for nothing": {"kind": ReplayGRPO, "replay_objective": "dense"},
    "nothing is rejected": {"kind": ReplayGRPO, "replay_objective": "rejected"},
}
ACCOUNTED: dict[str, dict[str, Any]] = {
    "full cache": {"compressor": FullKV()},
    "replay": {"kind": ReplayGRPO, "replay_objective": "sparse"},
    "mixed": {"kind": ReplayGRPO, "replay_objective": "mixed"},
}


@pytest.mark.parametrize("name", NAIVE)
def test_naive_training_is_named_with_its_cures(name: str) -> None:
    said = warned([StepGuard(), MismatchSplit()] if name == "RKV" else [], **NAIVE[name])
    for cure in ("ImportanceReweighting", "ReplayGRPO", "docs/choosing.md"):
        assert (cure in said) == (name != "pages" or "GRPO" not in cure)
    assert ("ReplayGRPO with replay_objective: sparse" in said) == (name != "pages")
    assert said.startswith({"SnapKV": "SnapKV evicts", "pages": "Centroid reads a part of the cache"}.get(name, ""))
    assert warned([SparsityAwareRejection()], **NAIVE[name]) == ""


@pytest.mark.parametrize("name", ACCOUNTED)
def test_what_accounts_for_the_cache_is_not_warned_of(name: str) -> None:
    assert warned([], **ACCOUNTED[name]) == ""


@pytest.mark.parametrize("correction", [TIS(), ImportanceReweighting(clip_max=1.5), Own()])
def test_any_correction_counts(correction: RolloutCallback) -> None:
    assert warned([correction]) == ""


class CorrectsItself(SparseGRPO):
    """Its loss compares with the sampler, as far as the library can know."""

    corrects = True


class Edits(RolloutCallback):
    """Corrects in another hook."""

    corrects = True


@pytest.mark.parametrize(("kind", "callbacks"), [(CorrectsItself, []), (SparseGRPO, [Edits()])])
def test_what_says_that_it_corrects_is_believed_by_log_and_report(kind: Any, callbacks: list[Any]) -> None:
    grpo = module(kind=kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*naive training")
        fit(grpo, 1, callbacks)
    assert describe(grpo)["corrections"] == (type(callbacks[0]) if callbacks else kind).__name__
    assert learns_from_less(grpo) == bool(callbacks)  # whose weights tell


def test_other_modules_may_have_the_guard() -> None:
    assert naive_warning(LightningModule()) == ""


def test_record_of_a_run_has_it_once(tmp_path: Any) -> None:
    summary = RunSummary(num_problems=0, folder=tmp_path)
    path = tmp_path / "a.ckpt"
    fit(module(), 1, [summary]).save_checkpoint(path)
    again = RunSummary(num_problems=0, folder=tmp_path)
    fit(module(), 3, [again, Repeats()], ckpt_path=path)
    assert ["naive" in one["text"] for one in again.record.warnings] == [True, False, False]
    assert [one["rollout"] for one in again.record.warnings] == [0, 1, 2], "what is said of two rollouts is kept twice"
