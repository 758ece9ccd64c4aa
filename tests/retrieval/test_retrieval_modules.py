"""Retrieval as a setting of the training modules, from Python and from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tiny_grpo import Recorder, fit, module
from tiny_run import config

from sparse_rl_lightning.callbacks import MismatchSplit
from sparse_rl_lightning.callbacks.outputs.run_facts import default_title, describe
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.modules import ReplayGRPO
from sparse_rl_lightning.retrievers import Centroid, Quest


def test_rollouts_of_a_fit_read_pages() -> None:
    retriever, recorder = Quest(6, page_size=2, num_dense_layers=1), Recorder()
    grpo = module(compressor=FullKV(), retriever=retriever)
    trainer = fit(grpo, steps=2, callbacks=[recorder], limit_val_batches=1, check_val_every_n_epoch=1)
    rollout = recorder.scored[0].rollout
    assert rollout.kv.read_share < 1
    assert rollout.kv.saving_final == 0
    assert trainer.callback_metrics["kv/read_share"] == pytest.approx(recorder.scored[-1].rollout.kv.read_share)
    assert trainer.callback_metrics["mismatch/kl_k3"] > 0
    assert grpo.generator.sampler().retriever is retriever
    assert grpo.generator.sampler(dense=True).retriever is None
    assert grpo.generator.is_sparse
    assert default_title(grpo) == "SparseGRPO with FullKV, Quest reading 6 tokens"
    assert describe(grpo)["retriever"].startswith("Quest(budget=6, page_size=2")


def test_partial_rollouts_go_on_with_their_pages() -> None:
    grpo = module(retriever=Centroid(8, page_size=2, num_dense_layers=0), num_slots=8, partial_rollout_steps=6)
    fit(grpo, steps=3)
    assert grpo.num_rollouts == 3


def test_replay_refuses_a_retriever_by_name() -> None:
    with pytest.raises(ValueError, match=r"ReplayGRPO replays evictions, and Quest evicts nothing.*SparseGRPO"):
        module(kind=ReplayGRPO, retriever=Quest(6, page_size=2))


def test_the_split_of_the_mismatch_refuses_a_retriever() -> None:
    with pytest.raises(ValueError, match="MismatchSplit replays evictions"):
        fit(module(retriever=Quest(6, page_size=2, num_dense_layers=1)), steps=1, callbacks=[MismatchSplit()])


def test_a_configuration_names_a_retriever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = config()
    schedule = {"class_path": "LengthSchedule", "init_args": {"starts": [0, 16], "budgets": [12, 16]}}
    arguments = {"budget": schedule, "page_size": 4, "num_dense_layers": 1, "group_reduction": "max"}
    settings["model"]["init_args"]["retriever"] = {"class_path": "Centroid", "init_args": arguments}
    settings["model"]["init_args"]["compressor"] = {"class_path": "FullKV"}
    Path("run.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    grpo = main(["fit", "--config", "run.yaml"]).model
    assert isinstance(grpo.generator.retriever, Centroid)
    assert (grpo.generator.retriever.group_reduction, grpo.generator.retriever.schedule.at(20)) == ("max", 16)
    Path("run.yaml").write_text(yaml.safe_dump(settings).replace("Centroid", "Centroids"), encoding="utf-8")
    with pytest.raises((ValueError, SystemExit)):
        main(["fit", "--config", "run.yaml"])
