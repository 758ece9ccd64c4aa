"""Checkpoint folders of FSDP2 in one process, which has all of every tensor (test_ranks.py has two)."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.faults import Planted
from disks import file_size_limit
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from rank_runs import strategy, train
from test_sharded import end_from_a_folder
from tiny_grpo import fit, loaded, module

from sparse_rl_lightning.checkpoints.fsdp_shards import save_parts
from sparse_rl_lightning.checkpoints.manifest import digest, read_manifest, write_manifest
from sparse_rl_lightning.checkpoints.sharded import TRAINER, WEIGHTS
from sparse_rl_lightning.cli.training.export import load_policy
from sparse_rl_lightning.distributed.fsdp2 import SparseRLFSDP2
from sparse_rl_lightning.errors import UserError

SHARDS = ["checkpoint/.metadata", "checkpoint/__0_0.distcp"]
ADAM = {"settings": {"optimizer": lambda own: torch.optim.AdamW(own, lr=0.01)}}


@pytest.fixture(autouse=True)
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run may begin a process group, and nothing of it is left."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def job(folder: Path, steps: int, **options: Any) -> dict[str, Any]:
    own = {"name": "own", "strategy": "fsdp2", "checkpoints": str(folder), "trainer": {"max_steps": steps}}
    return train(own | ADAM | options, 1, folder)


def test_a_folder_has_everything_and_training_goes_on_from_it_bitwise(tmp_path: Path) -> None:
    rest = end_from_a_folder(job, tmp_path, SHARDS, "FSDP2")
    exported = module()
    exported.configure_model()
    load_policy(exported, tmp_path / "cut" / "last.ckpt")
    assert all(torch.equal(rest["weights"][name], value) for name, value in exported.policy.named_parameters())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (SHARDS[0], r"is not as it was written: checkpoint/\.metadata\."),
        ("manifest.json", "no readable"),
        (
            "checkpoint/mp_rank_000_model_states.pt",
            "has files that were not written with it: checkpoint/mp_rank_000",
        ),
    ],
)
def test_nothing_is_unpickled_that_was_not_written_here(name: str, said: str, tmp_path: Path, folder: Path) -> None:
    job(tmp_path / "run", 1)
    last = tmp_path / "run" / "last.ckpt"
    with (last / (name if name.endswith(".pt") else SHARDS[0])).open("wb") as file:
        pickle.dump(Planted(), file)
    if name == "manifest.json":  # as Lightning's own strategy writes folders
        (last / name).unlink()
    with pytest.raises(ValueError, match=said):
        job(tmp_path / "run", 2, ckpt_path=str(last))
    assert not Path("PWNED").exists()


@pytest.mark.parametrize(
    ("name", "write", "said"),
    [
        (
            "weights.safetensors",
            lambda file: file.write_bytes(file.read_bytes()[:-1] + b"!"),
            r": weights\.safetensors",
        ),
        (
            "trainer.pt",
            lambda file: file.write_bytes(file.read_bytes()[:300]),
            r": trainer\.pt\. Resume from, or export",
        ),
        ("trainer.pt", lambda file: file.unlink(), r": trainer\.pt\."),
        ("manifest.json", lambda file: file.unlink(), r"has no readable manifest\.json\. Give a checkpoint"),
        (
            "manifest.json",
            lambda file: file.write_text('{"body": "{}", "signature": ""}'),
            r"written: trainer\.pt, weights",
        ),
    ],
)
def test_only_weights_as_they_were_written_are_exported(
    name: str, write: Callable[[Path], Any], said: str, tmp_path: Path
) -> None:
    job(tmp_path / "run", 1)
    last = tmp_path / "run" / "last.ckpt"
    write(last / name)
    exported = module()
    exported.configure_model()
    before = {name: value.clone() for name, value in exported.policy.named_parameters()}
    with pytest.raises(ValueError, match=said):
        load_policy(exported, last)
    assert all(torch.equal(before[name], value) for name, value in exported.policy.named_parameters())


@pytest.mark.parametrize("name", [TRAINER, WEIGHTS])
def test_made_up_files_with_a_manifest_of_their_own_are_a_line(name: str, tmp_path: Path) -> None:
    job(tmp_path / "run", 1)
    last = tmp_path / "run" / "last.ckpt"
    (last / name).write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(UserError, match=r"^ckpt_path='.*last\.ckpt' cannot be read: .*\. Give another checkpoint\.$"):
        load_policy(loaded(), changed(last))


def changed(folder: Path, **facts: Any) -> Path:
    """The folder, whose files or manifest were changed, signed again."""
    own = {**read_manifest(folder), **facts}
    write_manifest(folder, {name: digest(folder / name) for name in own.pop("files")}, **own)
    return folder


def test_shards_of_another_policy_are_refused(tmp_path: Path) -> None:
    job(tmp_path / "run", 1)
    last = tmp_path / "run" / "last.ckpt"
    metadata = pickle.loads((last / SHARDS[0]).read_bytes())
    name = next(name for name in metadata.state_dict_metadata if name.endswith("q_proj.weight"))
    metadata.state_dict_metadata[name].size = torch.Size([3, 3])
    (last / SHARDS[0]).write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"last.ckpt/checkpoint is of another policy: .*q_proj.weight"):
        job(tmp_path / "run", 2, ckpt_path=str(changed(last)))


def test_another_optimizer_is_refused_by_name_and_another_schedule_is_taken(tmp_path: Path) -> None:
    job(tmp_path / "run", 2)
    last = str(tmp_path / "run" / "last.ckpt")
    with pytest.raises(ValueError, match=r"this checkpoint is of torch.optim.adamw.AdamW, model.optimizer is torch"):
        job(tmp_path / "other", 3, ckpt_path=last, settings={})
    rest = job(tmp_path / "scheduled", 3, ckpt_path=last, decays=True)
    assert rest["rate"] == pytest.approx(0.01 * 0.1**3)
    assert rest["moments"][0], "the state is that of the checkpoint"


def test_an_optimizer_that_starts_anew_is_where_its_schedule_is(tmp_path: Path) -> None:
    """Weights alone are taken from another sharding, here one that is only said to be."""
    job(tmp_path / "run", 2, decays=True)
    last = changed(tmp_path / "run" / "last.ckpt", sharding="ZeRO-2")
    said = "with ZeRO-2, this run has 1 with FSDP2: the weights are taken, the optimizer"
    with pytest.warns(UserWarning, match=said):
        rest = job(tmp_path / "rest", 3, decays=True, ckpt_path=str(last))
    assert rest["rate"] == pytest.approx(0.01 * 0.1**3)
    assert rest["moments"][0] == {}


def test_what_it_cannot_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer.plugins: AsyncCheckpointIO writes files, and the checkpoints of Sp"):
        fit(module(), 1, strategy=SparseRLFSDP2(), plugins=[AsyncCheckpointIO()])
    with pytest.raises(ValueError, match=r"trainer.precision=64-true with trainer.strategy=SparseRLFSDP2: FSDP2 knows"):
        fit(module(), 1, strategy="sparse_rl_fsdp2", precision="64-true")


def test_weights_alone_cannot_be_gone_on_from(tmp_path: Path) -> None:
    fit(module(), 1, [ModelCheckpoint(tmp_path, save_weights_only=True, every_n_train_steps=1, save_last=True)],
        enable_checkpointing=True, strategy=strategy("fsdp2", 1))  # fmt: skip
    with pytest.raises(ValueError, match="or was written with save_weights_only"):
        job(tmp_path / "run", 2, ckpt_path=str(tmp_path / "last.ckpt"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_full_disk_is_told_apart_from_mistakes(tmp_path: Path) -> None:
    """Of a tensor larger than its buffer torch says that it is at an unexpected position."""
    with file_size_limit(4096):
        with pytest.raises(OSError, match=r"rank 0: \[Errno 27\] File too large"):
            save_parts({"large": torch.zeros(10_000)}, tmp_path)
    with pytest.raises(Exception, match="pickle"):
        save_parts({"no tensor": lambda: None}, tmp_path)
