"""Checkpoints are whole or not there, and nothing is read that someone else may have written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Barrier
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from disks import FullDisk, file_size_limit
from jsonargparse import Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from rank_runs import Terminate
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_grpo import every_step, fit, loaded, module, weights
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from sparse_rl_lightning.callbacks.sharding import ZeroSharding, _optimizer_bytes
from sparse_rl_lightning.checkpoints import DurableCheckpointIO
from sparse_rl_lightning.checkpoints.files import save_tensors, save_weights
from sparse_rl_lightning.checkpoints.manifest import changed_files, digest, read_manifest, write_manifest
from sparse_rl_lightning.checkpoints.reading import read_checkpoint
from sparse_rl_lightning.checkpoints.sharded import _in_16_bits
from sparse_rl_lightning.cli.training.checks import warn_of_earlier_run
from sparse_rl_lightning.distributed.ranks import be_patient
from sparse_rl_lightning.files import incomplete, recover, replaced, write_files
from sparse_rl_lightning.policies.sharding import ShadowPolicy, own_bytes

BIG = {"numbers": torch.arange(100_000)}
REFUSED = "could not be saved: .*File too large"


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write_files({path: lambda new: save_tensors({"step": 1}, new)}, durable=True)
    with file_size_limit(4096), pytest.raises(OSError, match="File too large"):
        write_files({path: lambda new: save_tensors(BIG, new)}, durable=True)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert not list(incomplete(path).parent.iterdir())
    write_files({path: lambda new: save_tensors(BIG, new)}, durable=True)
    assert torch.equal(torch.load(path, weights_only=True)["numbers"], BIG["numbers"])


def test_nothing_on_the_way_looks_like_a_last_checkpoint(tmp_path: Path) -> None:
    """Lightning takes the newest entry of the folder whose name has "last" in it."""
    for place in (incomplete, replaced):
        assert "last" not in place(tmp_path / "last.ckpt").relative_to(tmp_path).parts[0]


def test_ranks_recover_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks see that the checkpoint is missing before any of them brings it back."""
    path, together, rename = tmp_path / "last.ckpt", Barrier(4), Path.rename

    def wait_and_rename(own: Path, target: Path) -> Path:
        together.wait(280)
        return rename(own, target)

    monkeypatch.setattr(Path, "rename", wait_and_rename)
    replaced(path).mkdir(parents=True)
    with ThreadPoolExecutor(4) as ranks:
        list(ranks.map(recover, [path] * 4))  # raises what a rank raised
    assert path.is_dir()


def test_a_key_out_of_reach_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(tmp_path, {})
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARSE_RL_KEY_FILE", str(tmp_path / "file" / "key"))  # cannot be made, even by root
    with pytest.raises(ValueError, match=r"key cannot be read or made: .*Set SPARSE_RL_KEY_FILE"):
        read_manifest(tmp_path)


def test_manifest_finds_changes_and_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    folder = tmp_path / "last.ckpt"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).write_text(name)
    digests = {name: digest(folder / name) for name in ("a", "b")}
    assert digests["a"] == "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"  # SHA-256 of "a"
    write_manifest(folder, digests, world_size=2)
    key = tmp_path / "mine" / "sparse-rl" / "checkpoint.key"
    assert key.stat().st_mode & 0o077 == 0
    assert read_manifest(folder) == {"files": digests, "world_size": 2}
    assert changed_files(folder, digests) == []
    (folder / "b").write_text("c")
    assert changed_files(folder, digests) == ["b"]
    (folder / "b").unlink()
    assert changed_files(folder, digests) == ["b"]

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    with pytest.raises(ValueError, match="another account's signature"):
        read_manifest(folder)
    monkeypatch.setenv("SPARSE_RL_KEY_FILE", str(key))
    assert read_manifest(folder)["world_size"] == 2
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace(digests["a"], digests["b"]))
    with pytest.raises(ValueError, match="another account's signature"):
        read_manifest(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no readable manifest.json"):
        read_manifest(folder)


@pytest.mark.parametrize("name", ["last.ckpt", "elsewhere"])
def test_a_file_takes_the_name_of_an_earlier_runs_folder(name: str, tmp_path: Path) -> None:
    path, folder, plain = tmp_path / "last.ckpt", tmp_path / name, DurableCheckpointIO()
    folder.mkdir()
    (folder / "shard").write_text("of DeepSpeed")
    if folder != path:
        path.symlink_to(name)  # which leads nowhere from another folder
    with file_size_limit(4096), pytest.warns(UserWarning, match=REFUSED):
        plain.save_checkpoint(BIG, path)
    assert (path / "shard").read_text() == "of DeepSpeed"
    plain.save_checkpoint({"global_step": 7}, path)
    assert torch.load(path, weights_only=True) == {"global_step": 7}
    assert not replaced(path).exists()
    assert folder == path or (folder / "shard").exists()


def test_what_waits_for_its_removal_and_is_saved_anew_stays(tmp_path: Path) -> None:
    path, plain = tmp_path / "last.ckpt", DurableCheckpointIO()
    with file_size_limit(4096), pytest.warns(UserWarning, match="could not be saved"):
        plain.save_checkpoint(BIG, tmp_path / "other.ckpt")
    plain.remove_checkpoint(path)
    plain.save_checkpoint({"global_step": 7}, path)
    assert torch.load(path, weights_only=True) == {"global_step": 7}


def test_full_disk_costs_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    """Saves after steps 3 and 4 of 6 fail: told once, the second step's checkpoint stays until the fifth's is there."""
    grpo, kept = module(), []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            steps = [torch.load(path, weights_only=True)["global_step"] for path in sorted(tmp_path.glob("*.ckpt"))]
            kept.append((trainer.global_step, steps))

    with FullDisk(first=2, last=3) as disk, pytest.warns(UserWarning, match=f"{REFUSED}.*The run goes on") as told:
        fit(grpo, 6, [Look(), disk, every_step(tmp_path)], enable_checkpointing=True)
    assert sum("could not be saved" in str(warning.message) for warning in told) == 1
    assert kept == [(0, []), (1, [1, 1]), (2, [2, 2]), (3, [2, 2]), (4, [2, 2]), (5, [5, 5])]
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"last.ckpt", "epoch=1-step=6.ckpt"}
    other = module()
    fit(other, 6)
    assert torch.equal(weights(grpo), weights(other))


def test_the_newest_checkpoint_takes_no_best_ones_place(tmp_path: Path) -> None:
    """The next best one could not be saved, and ``last`` then could: the calls are those of ModelCheckpoint."""
    io = DurableCheckpointIO(weights=False)
    best, better, best_of_all, last = (str(tmp_path / f"{name}.ckpt") for name in ("10", "20", "40", "last"))
    io.save_checkpoint({"global_step": 10}, best)
    with file_size_limit(16), pytest.warns(UserWarning, match="earlier checkpoints are kept"):
        io.save_checkpoint({"global_step": 20}, better)
    io.remove_checkpoint(best)
    io.save_checkpoint({"global_step": 30}, last)
    assert not io.is_failing
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"10.ckpt", "last.ckpt"}
    io.save_checkpoint({"global_step": 40}, best_of_all)
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"40.ckpt", "last.ckpt"}


def test_preemption_claims_no_checkpoint_that_a_full_disk_refused(tmp_path: Path) -> None:
    with FullDisk(first=2) as disk, pytest.raises(SystemExit) as end:
        with pytest.warns(UserWarning, match="SIGTERM after optimizer step 3, which could not be saved"):
            fit(module(), 6, [disk, Terminate(0), every_step(tmp_path)], enable_checkpointing=True)
    assert end.value.code == 75
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2


def test_weights_beside_are_hugging_face_s(tmp_path: Path) -> None:
    grpo = module()
    fit(grpo, 2, [every_step(tmp_path)], enable_checkpointing=True)
    beside = {path.name for path in (tmp_path / "weights").glob("*.safetensors")}
    assert beside == {"last.safetensors", "epoch=0-step=2.safetensors"}, "those of removed checkpoints are gone"
    with safe_open(tmp_path / "weights" / "last.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "global_step": "2"}
    own = load_file(tmp_path / "weights" / "last.safetensors")
    want = dict(grpo.policy.named_parameters())
    assert own.keys() == want.keys()
    assert all(torch.equal(own[name], value) for name, value in want.items())


def test_tensors_without_elements_are_no_copies_of_each_other(tmp_path: Path) -> None:
    own = {"a": torch.zeros(0), "b": torch.zeros(0), "c": torch.zeros(2)}
    save_weights(own | {"tied to c": own["c"]}, tmp_path / "last.safetensors", 1)
    assert load_file(tmp_path / "last.safetensors").keys() == own.keys()


def test_a_checkpoint_io_of_the_user_s_own_stays(tmp_path: Path) -> None:
    own = DurableCheckpointIO(weights=False)
    trainer = fit(module(), 1, [every_step(tmp_path)], enable_checkpointing=True, plugins=[own])
    assert trainer.strategy.checkpoint_io is own
    assert not (tmp_path / "weights").exists()


def test_a_small_file_of_many_numbers_is_not_unpacked(tmp_path: Path) -> None:
    torch.save({"numbers": torch.zeros(100_000)}, tmp_path / "whole.ckpt")
    with ZipFile(tmp_path / "whole.ckpt") as whole, ZipFile(tmp_path / "last.ckpt", "w", ZIP_DEFLATED) as small:
        for name in whole.namelist():
            small.writestr(name, whole.read(name))
    with pytest.raises(ValueError, match=r"is not as it was written \(its contents\)"):
        read_checkpoint(tmp_path / "last.ckpt")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("manifest.json", "checkpoint folder of DeepSpeed or FSDP2, .*stage_1, .*sparse_rl_fsdp2, .* sparse-rl export"),
        ("config.json", r"model folder, not a checkpoint\. .*model.policy"),
        ("other.txt", "folder without a checkpoint"),
    ],
)
def test_folders_are_told_of_on_one_device(file: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run" / "last.ckpt"
    path.mkdir(parents=True)
    (path / file).touch()
    with pytest.raises(ValueError, match=f"ckpt_path='{path}' is a {said}"):
        fit(module(), 1, ckpt_path=str(path))


@pytest.mark.parametrize("left", ["last.ckpt", ".replaced/last.ckpt"])
def test_a_new_run_is_told_of_what_an_earlier_one_left(left: str, tmp_path: Path) -> None:
    kept = Namespace(dirpath=str(tmp_path))
    callback = Namespace(class_path="lightning.pytorch.callbacks.ModelCheckpoint", init_args=kept)
    config = Namespace(ckpt_path=None, trainer=Namespace(fast_dev_run=False, callbacks=[callback]))
    (tmp_path / left).mkdir(parents=True)
    with pytest.warns(UserWarning, match="holds checkpoints of an earlier run"):
        warn_of_earlier_run(config)


def test_a_shadow_has_the_exact_positions_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning halves them with the weights, and the module restores them after its callbacks."""
    monkeypatch.setattr("sparse_rl_lightning.callbacks.sharding.is_sharded", lambda policy: True)
    grpo = loaded()
    exact = dict(grpo.policy.named_buffers())
    grpo.policy.to(torch.bfloat16)
    ZeroSharding().on_fit_start(Trainer(), grpo)
    shadow = dict(grpo.generator.shadow.model.named_buffers())
    assert exact
    assert all(torch.equal(value, shadow[name]) for name, value in exact.items())
    restored = dict(grpo.policy.named_buffers())
    grpo.restore_rotary()  # a CUDA graph reads them where they are
    assert all(value is grpo.policy.get_buffer(name) for name, value in restored.items())


def test_a_shadow_filled_by_a_monitor_is_freed_too() -> None:
    grpo = loaded()
    grpo.generator.shadow = shadow = ShadowPolicy(grpo.policy)
    for keeps in (True, False):
        shadow.fill(1)
        ZeroSharding(keep_shadow=keeps).on_before_backward(Trainer(), grpo, torch.zeros(()))
        assert (shadow.nbytes > 0) == keeps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_stored_in_16_bits_are_known(dtype: torch.dtype, tmp_path: Path) -> None:
    """DeepSpeed has float32 copies, of which the folder for other ranks knows nothing."""
    save_weights({"a": torch.zeros(2, dtype=dtype)}, tmp_path / "weights.safetensors", 3)
    assert _in_16_bits(tmp_path / "weights.safetensors") == (dtype != torch.float32)


@pytest.mark.parametrize("own", [None, timedelta(seconds=40)])
def test_ranks_wait_for_each_other_for_hours_unless_told_otherwise(own: timedelta | None) -> None:
    strategy = DDPStrategy(**({} if own is None else {"timeout": own}))
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore(), timeout=own)
    try:
        groups = [distributed.group.WORLD, distributed.new_group([0], timeout=timedelta(minutes=10))]
        be_patient(strategy)
        waits = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
        assert waits == ([timedelta(hours=4)] * 2 if own is None else [own, timedelta(minutes=10)])
    finally:
        distributed.destroy_process_group()


def test_parts_of_tensors_are_counted() -> None:
    """As torch counts them, a rank would hold the whole."""
    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,))
        policy = torch.nn.Linear(4, 8, bias=False)
        policy.weight = torch.nn.Parameter(distribute_tensor(policy.weight.detach(), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD(policy.parameters(), momentum=0.9)
        policy.weight.grad = torch.zeros_like(policy.weight)
        optimizer.step()
        assert own_bytes(policy) == _optimizer_bytes(optimizer) == 4 * 8 * 4 // 4
    finally:
        distributed.destroy_process_group()


def test_weights_loaded_at_the_same_step_reach_the_shadow() -> None:
    grpo = loaded()
    own = next(iter(grpo.policy.parameters()))
    grpo.generator.shadow = shadow = ShadowPolicy(grpo.policy)
    copy = next(iter(shadow.model.parameters()))
    for load in (lambda: grpo.on_load_checkpoint({}), lambda: ZeroSharding().setup(Trainer(), grpo, "validate")):
        shadow.fill(3)
        with torch.no_grad():
            own += 1
        load()
        shadow.fill(3)
        assert torch.equal(copy, own)
