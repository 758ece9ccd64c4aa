"""Checkpoint folders of DeepSpeed in one process, in which every step of writing and reading is run as in many."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import file_size_limit
from rank_runs import train
from safetensors.torch import load_file
from tiny_grpo import module

from sparse_rl_lightning.checkpoints.manifest import digest, read_manifest, write_manifest
from sparse_rl_lightning.checkpoints.sharded import TRAINER, WEIGHTS, load_sharded
from sparse_rl_lightning.distributed.deepspeed import SparseRLDeepSpeed

SHARDS = ["checkpoint/mp_rank_00_model_states.pt", "checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt"]


@pytest.fixture
def deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """DeepSpeed may begin, and nothing of it is left."""
    comm = pytest.importorskip("deepspeed.comm.comm", reason="deepspeed is an extra")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    torch.distributed.destroy_process_group()
    comm.cdb = None


def job(folder: Path, steps: int, **options: Any) -> dict[str, Any]:
    return train(
        {"name": "own", "strategy": "zero2", "checkpoints": str(folder), "trainer": {"max_steps": steps}, **options},
        1, folder,
    )  # fmt: skip


@pytest.mark.usefixtures("deepspeed")
def test_a_folder_has_everything_and_training_goes_on_from_it_bitwise(tmp_path: Path) -> None:
    whole = job(tmp_path / "whole", 4)
    job(tmp_path / "cut", 2)
    last = tmp_path / "cut" / "last.ckpt"
    assert sorted(read_manifest(last)["files"]) == sorted([*SHARDS, TRAINER, WEIGHTS])
    assert (read_manifest(last)["world_size"], read_manifest(last)["stage"]) == (1, 2)
    for name, known in read_manifest(last)["files"].items():
        assert digest(last / name) == known
    assert {path.name for path in last.iterdir()} == {"checkpoint", "manifest.json", TRAINER, WEIGHTS}
    assert torch.load(last / TRAINER, weights_only=True)["global_step"] == 2
    saved = {path: path.read_bytes() for path in last.rglob("*") if path.is_file()}
    with pytest.warns(UserWarning, match="could not be saved: .*File too large"):
        full(tmp_path / "cut")
    assert {path: path.read_bytes() for path in last.rglob("*") if path.is_file()} == saved
    assert not list((tmp_path / "cut" / ".incomplete").iterdir())
    rest = job(tmp_path / "cut", 4, ckpt_path=str(last))
    assert rest["global_step"] == 4
    assert len(rest["gradients"]) == 2
    for name, value in whole["weights"].items():
        assert torch.equal(rest["weights"][name], value)
    assert all(torch.equal(load_file(last / WEIGHTS)[name], value) for name, value in rest["weights"].items())


def full(folder: Path) -> None:
    with file_size_limit(4096):
        job(folder, 3, ckpt_path=str(folder / "last.ckpt"))


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SparseRLDeepSpeed, Path]:
    """A strategy of a module without a trainer, and a folder from which it would read the module's weights."""
    pytest.importorskip("deepspeed", reason="deepspeed is an extra")
    from safetensors.torch import save_file

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    strategy, grpo, folder = SparseRLDeepSpeed(stage=2), module(), tmp_path / "last.ckpt"
    grpo.configure_model()
    strategy._lightning_module = grpo
    folder.mkdir()
    save_file({name: value.detach() + 1 for name, value in grpo.policy.named_parameters()}, folder / WEIGHTS)
    torch.save({"global_step": 7}, folder / TRAINER)
    sign(folder)
    return strategy, folder


def sign(folder: Path) -> None:
    write_manifest(folder, {name: digest(folder / name) for name in (TRAINER, WEIGHTS)}, world_size=2, stage=3)


def test_weights_alone_are_read_where_nothing_is_trained(written: tuple[SparseRLDeepSpeed, Path]) -> None:
    strategy, folder = written
    want = {name: value.detach() + 1 for name, value in strategy.lightning_module.policy.named_parameters()}
    assert load_sharded(strategy, folder, with_optimizer=False) == {"global_step": 7}
    for name, value in strategy.lightning_module.policy.named_parameters():
        assert torch.equal(value, want[name])


def test_on_other_ranks_the_optimizer_starts_anew(written: tuple[SparseRLDeepSpeed, Path]) -> None:
    with pytest.warns(UserWarning, match=r"is of 2 rank\(s\) with ZeRO-3, this run has 1 with ZeRO-2: the weights are"):
        load_sharded(*written, with_optimizer=True)


class Planted:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("PWNED"),)


def test_what_is_not_as_it_was_written_is_refused(written: tuple[SparseRLDeepSpeed, Path], folder: Path) -> None:
    strategy, own = written
    torch.save({"global_step": 7, "x": Planted()}, own / TRAINER)
    with pytest.raises(ValueError, match=r"is not as it was written: trainer\.pt\. Resume"):
        load_sharded(strategy, own, with_optimizer=False)
    sign(own)
    with pytest.raises(Exception, match=r"weights_only|[Uu]npickl"):
        load_sharded(strategy, own, with_optimizer=False)
    assert not Path("PWNED").exists()
    with pytest.raises(ValueError, match="is no checkpoint of SparseRLDeepSpeed: a single file comes from one device"):
        load_sharded(strategy, own / TRAINER, with_optimizer=False)
    torch.save({"global_step": 7}, own / TRAINER)
    shutil.copy(own / TRAINER, own / WEIGHTS)
    (own / "manifest.json").write_text(json.dumps({"body": "{}", "signature": "0"}))
    with pytest.raises(ValueError, match="another account's signature"):
        load_sharded(strategy, own, with_optimizer=False)


def test_weights_of_another_policy_are_refused(written: tuple[SparseRLDeepSpeed, Path]) -> None:
    strategy, folder = written
    strategy.lightning_module.policy.extra = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"lacks the weight 'extra': it is of another policy"):
        load_sharded(strategy, folder, with_optimizer=False)
