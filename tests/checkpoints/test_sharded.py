"""Checkpoint folders of DeepSpeed in one process, in which every step of writing and reading is run as in many."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.faults import Planted
from disks import file_size_limit
from rank_runs import TRAINER as OPTIONS
from rank_runs import train
from safetensors.torch import load_file
from tiny_grpo import loaded
from tiny_run import contents

from sparse_rl_lightning.checkpoints import manifest
from sparse_rl_lightning.checkpoints.manifest import digest, read_manifest, write_manifest
from sparse_rl_lightning.checkpoints.sharded import ANEW, TRAINER, WEIGHTS, load_sharded
from sparse_rl_lightning.distributed.deepspeed import SparseRLDeepSpeed
from sparse_rl_lightning.errors import UserError

SHARDS = ["checkpoint/mp_rank_00_model_states.pt", "checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt"]


@pytest.fixture
def deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """DeepSpeed may begin, and nothing of it is left."""
    comm = pytest.importorskip("deepspeed.comm.comm", reason="deepspeed is an extra")
    groups = importlib.import_module("deepspeed.utils.groups")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    torch.distributed.destroy_process_group()
    comm.cdb = None
    importlib.reload(groups)


def job(folder: Path, steps: int, **options: Any) -> dict[str, Any]:
    run = {"name": "own", "strategy": "zero2", "checkpoints": str(folder), "trainer": {"max_steps": steps}}
    return train(run | options, 1, folder)


def end_from_a_folder(job: Callable[..., dict[str, Any]], folder: Path, shards: list[str], sharding: str) -> Any:
    """A run of two steps leaves all that the next two need, whatever fails between; these are as in a run of four."""
    whole, last = job(folder / "whole", 4), folder / "cut" / "last.ckpt"
    job(folder / "cut", 2)
    manifest = read_manifest(last)
    assert sorted(manifest["files"]) == sorted([*shards, TRAINER, WEIGHTS])
    assert (manifest["world_size"], manifest["sharding"]) == (1, sharding)
    assert all(digest(last / name) == known for name, known in manifest["files"].items())
    assert {path.name for path in last.iterdir()} == {"checkpoint", "manifest.json", TRAINER, WEIGHTS}
    assert torch.load(last / TRAINER, weights_only=True)["global_step"] == 2
    saved = contents(last)
    with file_size_limit(4096), pytest.warns(UserWarning, match="could not be saved: .*File too large"):
        job(folder / "cut", 3, ckpt_path=str(last))
    with pytest.warns(UserWarning, match="could not be saved: step 3: 1 weights hold NaN or infinity"):
        job(folder / "cut", 3, ckpt_path=str(last), spoil=3)
    assert contents(last) == saved
    assert not list((folder / "cut" / ".incomplete").iterdir())
    rest = job(folder / "cut", 4, ckpt_path=str(last))
    assert (rest["global_step"], len(rest["gradients"])) == (4, 2)
    assert all(torch.equal(rest["weights"][name], value) for name, value in whole["weights"].items())
    assert all(torch.equal(load_file(last / WEIGHTS)[name], value) for name, value in rest["weights"].items())
    return rest


@pytest.mark.usefixtures("deepspeed")
def test_a_folder_has_everything_and_training_goes_on_from_it_bitwise(tmp_path: Path) -> None:
    momentum = {"optimizer": lambda own: torch.optim.SGD(own, lr=0.5, momentum=0.9)}
    end_from_a_folder(partial(job, settings=momentum), tmp_path, SHARDS, "ZeRO-2")


@pytest.mark.usefixtures("deepspeed")
def test_steps_are_those_without_deepspeed_and_bad_ones_are_skipped(tmp_path: Path) -> None:
    plain = train({"name": "plain", "trainer": {"max_steps": 2}}, 1, tmp_path)
    own = job(tmp_path / "own", 2)
    for found, want in zip(own["gradients"], plain["gradients"], strict=True):
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()))
    poisoned = job(tmp_path / "poisoned", 3, poison=True)
    assert poisoned["metrics"]["skipped_steps"] == 2
    assert all(bool(value.isfinite().all()) for value in poisoned["weights"].values())
    saved = load_file(tmp_path / "own" / "last.ckpt" / WEIGHTS)
    with pytest.warns(UserWarning, match="the optimizer starts anew"):
        other = job(tmp_path / "other", 3, strategy="zero1", ckpt_path=str(tmp_path / "own" / "last.ckpt"))
    steps = torch.stack([(value - saved[name]).norm() for name, value in other["weights"].items()])
    assert 0 < float(steps.norm()) <= 0.5 * OPTIONS["gradient_clip_val"] + 1e-6, "not from the weights of the folder"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SparseRLDeepSpeed, Path]:
    """A strategy of a module without a trainer, and a folder from which it would read the module's weights."""
    pytest.importorskip("deepspeed", reason="deepspeed is an extra")
    from safetensors.torch import save_file

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    strategy, grpo, folder = SparseRLDeepSpeed(stage=2), loaded(), tmp_path / "last.ckpt"
    strategy._lightning_module = grpo
    folder.mkdir()
    save_file({name: value.detach() + 1 for name, value in grpo.policy.named_parameters()}, folder / WEIGHTS)
    torch.save({"global_step": 7}, folder / TRAINER)
    sign(folder)
    return strategy, folder


def sign(folder: Path) -> None:
    digests = {name: digest(folder / name) for name in (TRAINER, WEIGHTS)}
    write_manifest(folder, digests, world_size=2, sharding="ZeRO-3")


def test_weights_alone_are_read_where_nothing_is_trained(written: tuple[SparseRLDeepSpeed, Path]) -> None:
    strategy, folder = written
    want = {name: value.detach() + 1 for name, value in strategy.lightning_module.policy.named_parameters()}
    state, read_weights = load_sharded(strategy, strategy.shards, folder, with_optimizer=False)
    assert state == {"global_step": 7}
    weights = dict(strategy.lightning_module.policy.named_parameters())
    assert not any(torch.equal(value, want[name]) for name, value in weights.items())
    read_weights()
    assert all(torch.equal(value, want[name]) for name, value in weights.items())


def test_on_other_ranks_the_optimizer_starts_anew(written: tuple[SparseRLDeepSpeed, Path]) -> None:
    """The manifest is as 0.1 wrote it."""
    strategy, folder = written
    with pytest.warns(UserWarning, match=r"is of 2 rank\(s\) with ZeRO-3, this run has 1 with ZeRO-2: the weights are"):
        state, _ = load_sharded(strategy, strategy.shards, folder, with_optimizer=True)
    assert state == {"global_step": 7, ANEW: True}


def test_what_is_not_as_it_was_written_is_refused(written: tuple[SparseRLDeepSpeed, Path], folder: Path) -> None:
    strategy, own = written
    torch.save({"global_step": 7, "x": Planted()}, own / TRAINER)
    with pytest.raises(ValueError, match=r"is not as it was written: trainer\.pt\. Resume"):
        load_sharded(strategy, strategy.shards, own, with_optimizer=False)
    sign(own)
    with pytest.raises(Exception, match=r"weights_only|[Uu]npickl"):
        load_sharded(strategy, strategy.shards, own, with_optimizer=False)
    assert not Path("PWNED").exists()
    with pytest.raises(ValueError, match="is not a checkpoint of SparseRLDeepSpeed: a single file comes from one"):
        load_sharded(strategy, strategy.shards, own / TRAINER, with_optimizer=False)
    torch.save({"global_step": 7}, own / TRAINER)
    shutil.copy(own / TRAINER, own / WEIGHTS)
    (own / "manifest.json").write_text(json.dumps({"body": "{}", "signature": "0"}))
    with pytest.raises(ValueError, match="another account's signature"):
        load_sharded(strategy, strategy.shards, own, with_optimizer=False)


def test_weights_of_another_policy_are_refused(written: tuple[SparseRLDeepSpeed, Path]) -> None:
    strategy, folder = written
    strategy.lightning_module.policy.extra = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"lacks the weight 'extra': it is of another policy"):
        load_sharded(strategy, strategy.shards, folder, with_optimizer=False)[1]()


def test_weights_that_the_folder_does_not_have_are_told(written: tuple[SparseRLDeepSpeed, Path]) -> None:
    strategy, folder = written
    strategy.lightning_module.head = torch.nn.Linear(2, 1)
    with pytest.warns(UserWarning, match="has the policy alone: 2 other weights stay as they are, such as head.weight"):
        load_sharded(strategy, strategy.shards, folder, with_optimizer=False)[1]()


def test_a_new_key_leaves_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(manifest.KEY_VARIABLE, str(tmp_path / "state" / "key"))
    key = manifest._key()
    assert manifest._key() == key
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["key"]


@pytest.mark.parametrize("content", [b"", b"0123456789"])
def test_a_cut_key_signs_nothing(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody can sign with an empty one."""
    (tmp_path / "key").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(manifest.KEY_VARIABLE, "~/key")
    with pytest.raises(OSError, match="key': it has fewer than 16 bytes, so it is no key"):
        manifest.write_manifest(tmp_path, {})
    (tmp_path / manifest.NAME).write_text('{"body": "{}", "signature": ""}')
    with pytest.raises(UserError, match=r"key cannot be read or made: .* fewer than 16 bytes"):
        manifest.read_manifest(tmp_path)
    assert (tmp_path / "key").read_bytes() == content
