"""Strategies by name and by file: what they stand for, that they run, and what is refused in their place."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import two_ranks
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
    StrategyRegistry,
)
from test_logprobs import batch, tiny_model
from tiny_grpo import Rows, fit, module, quiet
from tiny_run import config, write
from torch import nn

from sparse_rl_lightning.advantages import group_advantages
from sparse_rl_lightning.callbacks import ImportanceReweighting
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.cli.launch import VARIABLE, follow_launcher, network_error
from sparse_rl_lightning.distributed import ranks
from sparse_rl_lightning.distributed.deepspeed import SparseRLDeepSpeed, not_deepspeed, zero_config
from sparse_rl_lightning.distributed.fsdp2 import SparseRLFSDP2
from sparse_rl_lightning.distributed.ranks import check_processes, check_strategy
from sparse_rl_lightning.fingerprints import fingerprint
from sparse_rl_lightning.logprobs import logprobs_at, sequence_logprobs, token_logprobs
from sparse_rl_lightning.records import Rollout

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


calls: list[int] = []


def gather(module: nn.Module, inputs: Any) -> None:
    calls.append(len(inputs[0]))


def sharded(head: nn.Module) -> None:
    """As ZeRO-3 leaves a module: weights with a number, hooks of DeepSpeed's."""
    calls.clear()
    for number, parameter in enumerate(head.parameters()):
        parameter.ds_id = number  # type: ignore[attr-defined]
    head.register_forward_pre_hook(gather)


@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 512])
def test_one_call_and_the_same_numbers(chunk_size: int, in_float32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "__module__", "deepspeed.runtime.zero.parameter_offload")
    sequences, mask = batch()
    ids = sequences[:, :, None].repeat(1, 1, 2)
    found = []
    for shard in (False, True):
        model = tiny_model(tied=False)
        if shard:
            sharded(model.get_output_embeddings())
        options: dict[str, Any] = {"chunk_size": chunk_size, "head_in_float32": in_float32}
        logprobs, entropy = sequence_logprobs(model, sequences, mask, **options)
        (logprobs.sum() + entropy.sum()).backward()
        asked = logprobs_at(model, sequences, ids, mask, **options)
        found.append([logprobs, entropy, asked, *(p.grad for p in model.parameters())])
    assert all(torch.equal(plain, own) for plain, own in zip(*found, strict=True))
    assert calls == [int(mask.sum())] * 2


def test_a_head_with_hooks_of_its_own_is_refused() -> None:
    head = nn.Linear(4, 9)
    sharded(head)
    with pytest.raises(ValueError, match=r"output head is a Linear with hooks .* Use --trainer.strategy=sparse_rl_d"):
        token_logprobs(head, torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))


FLAT = "FSDP1 flattens weights, .*Use --trainer.strategy=sparse_rl_fsdp2"
TWICE = "divides the loss twice where gradients are accumulated. .*Use --trainer.strategy=sparse_rl_deepspeed"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("deepspeed_stage_2", f"{TWICE}_stage_2,"),
        ("deepspeed_stage_3_offload", f"{TWICE}_stage_3_offload,"),
        ("deepspeed", rf"{TWICE}_stage_2 \(or \['sparse_rl_deepspeed_stage_1'"),
        ('{"class_path": "lightning.pytorch.strategies.DeepSpeedStrategy"}', f"{TWICE}_stage_2"),
        ("fsdp_cpu_offload", FLAT),
        ('{"class_path": "lightning.pytorch.strategies.FSDPStrategy"}', FLAT),
    ],
)
def test_lightnings_own_are_refused_with_the_name_of_ours(given: str, told: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=told):
        main(["fit", "--config", write(config()), f"--trainer.strategy={given}"])


def test_and_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is an extra")
    strategy = DeepSpeedStrategy(stage=2)
    with pytest.raises(ValueError, match="DeepSpeedStrategy is Lightning's own, which divides"):
        fit(module(), 1, strategy=strategy)
    assert "sparse_rl_deepspeed_stage_3," in not_deepspeed("trainer.strategy=deepspeed_stage_3")


@pytest.mark.parametrize(("started", "devices", "fits"), [(2, 1, False), (2, 3, False), (2, 2, True), (1, 2, True)])
def test_devices_must_fit_the_processes(started: int, devices: int, fits: bool, monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(started))
    monkeypatch.setenv("RANK", "0")
    if fits:
        check_processes(devices)
        return
    with pytest.raises(ValueError, match=rf"{started} processes were started .* and the trainer is of {devices}: each"):
        check_processes(devices)


def test_a_variable_of_the_machine_starts_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    check_processes(1)


def test_two_processes_that_do_not_know_of_each_other(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match="2 processes were started"):
        main(["fit", "--config", write(config()), "--trainer.devices=3"])
    with pytest.raises(ValueError, match="2 processes were started"):
        fit(module(), 1)


def test_ranks_that_have_met_may_test_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fit on several ranks, as Lightning advises; a fit of its own is refused to each still."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        (metrics,) = quiet().validate(module(), Rows(prompts_per_rollout=4), verbose=False)
        assert "val/reward_dense" in metrics
        with pytest.raises(ValueError, match="2 processes were started"):
            fit(module(), 1)
    finally:
        torch.distributed.destroy_process_group()


def test_fingerprints_tell_apart_what_differs() -> None:
    rows: list[Any] = [
        [{"a": 1}], [{"a": 2}], [{"b": 1}], [{"a": "1"}], [[1, 2], [3]], [[1], [2, 3]], [None], [1.0], [-0.0], [0.0],
        [torch.zeros(2)], [torch.zeros(2, dtype=torch.bfloat16)], [torch.zeros(2, 1)], [torch.tensor([0.0, -0.0])],
        [torch.tensor(1)], [float("nan")], [torch.tensor([float("nan")])],
    ]  # fmt: skip
    assert len({fingerprint(values=values) for values in rows}) == len(rows)
    turned = torch.arange(6).view(2, 3).T
    assert fingerprint(values=[object(), turned]) == fingerprint(values=[object(), turned.contiguous()])


@pytest.mark.parametrize("inherited", [{"LOCAL_RANK": "0", VARIABLE: "1"}, {"LOCAL_RANK": "1"}, {}])
def test_what_a_rank_starts_by_itself_follows_nobody(inherited: dict[str, str], monkeypatch: Any) -> None:
    """Rank zero has the first environment once others were started, and every other rank the second."""
    for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", VARIABLE):
        monkeypatch.setenv(name, "")  # so that what is set here is undone
        monkeypatch.delenv(name)
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    follow_launcher()
    assert os.environ[VARIABLE] == str(os.getpid())
    assert "follow_launcher" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.slow
def test_a_port_that_is_taken_is_named_and_no_process_stays_behind(folder: Path) -> None:
    """The second rank, which Lightning starts, holds the output open: the command ends when it has gone too."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [
            sys.executable, "-m", "sparse_rl_lightning", "fit", "--config", write(config(max_steps=2)),
            "--trainer.devices=2", "--trainer.strategy=ddp",
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert f"error: The ranks cannot meet at 127.0.0.1:{port}: another program listens there." in done.stderr
    assert "Traceback" not in done.stderr


def trainer(folder: Path, **options: Any) -> Trainer:
    return quiet(default_root_dir=folder, **{"devices": 2, "strategy": "ddp", "enable_checkpointing": True} | options)


def refusal(work: Any, *args: Any) -> str:
    try:
        work(*args)
    except ValueError as error:
        return str(error)
    return ""


def test_numbers_of_all_ranks(tmp_path: Path) -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.5], [4.0, 0.0, 2.0, 3.0]])

    def work(rank: int) -> Any:
        own = {"loss": torch.tensor(1.0 + rank), f"of_{rank}": 5.0 * rank}
        own_trainer = trainer(tmp_path)
        advantages = [
            ranks.advantages_of_rank(rewards[rank], 2, partial(group_advantages, scale_rewards=scale), own_trainer)
            for scale in ("batch", "group", "none")
        ]
        return ranks.gather_to_zero(rank + 7, 2), ranks.mean_over_ranks(own, 2), advantages

    first, second = two_ranks(work, tmp_path)
    assert (first[0], second[0]) == ([7, 8], [])
    assert first[1] == second[1] == {"loss": 1.5, "of_0": 0.0, "of_1": 5.0}
    for place, scale in enumerate(("batch", "group", "none")):
        together = torch.cat([first[2][place], second[2][place]])
        torch.testing.assert_close(together, group_advantages(rewards.flatten(), 2, scale))
    assert ranks.gather_to_zero(7, 1) == [7]


def test_a_mean_over_the_rollout_is_of_all_ranks(tmp_path: Path) -> None:
    """Ratios 1, 2 and 3 on one rank, 6 on the other: all are divided by 3."""

    def work(rank: int) -> list[float]:
        mask = torch.tensor([[True, True, True], [True, False, False]][rank])[None]
        ratios = torch.tensor([[1.0, 2.0, 3.0], [6.0, 50.0, 50.0]][rank])[None]
        sampler = torch.full((1, 3), -9.0)
        part = Rollout(
            mask.long(), torch.zeros(1, dtype=torch.int64), mask, mask[:, 0], sampler,
            old_logprobs=sampler + ratios.log(), keep=mask.clone(),
        )  # fmt: skip
        ImportanceReweighting(normalize="batch").correct(trainer(tmp_path), LightningModule(), part)
        assert part.weights is not None
        return part.weights[mask].tolist()  # type: ignore[no-any-return]

    first, second = two_ranks(work, tmp_path)
    assert [*first, *second] == pytest.approx([1 / 3, 2 / 3, 1, 2], rel=1e-5)


def test_facts_and_folders_must_be_the_same(tmp_path: Path) -> None:
    def work(rank: int) -> list[str]:
        own = tmp_path / f"machine{rank}"
        return [
            refusal(ranks.check_agreement, {"rows": "3", "seeds": "1"}),
            refusal(ranks.check_agreement, {"rows": "3", "seeds": str(rank)}),
            refusal(ranks.check_agreement, {"rows": "3"} | ({"seeds": "1"} if rank else {})),
            refusal(ranks.check_shared, [tmp_path / "shared"]),
            refusal(ranks.check_shared, [tmp_path / "shared", own / "checkpoints"]),
        ]

    found, of_the_other = two_ranks(work, tmp_path)
    assert found == [text.replace("machine1", "machine0") for text in of_the_other]
    same, other, missing, shared, apart = found
    assert same == shared == ""
    assert "Ranks differ in their seeds: rank 0 has 0, rank 1 has 1" in other
    assert "Ranks differ in their seeds: rank 0 has none, rank 1 has 1" in missing
    assert f"{tmp_path}/machine0/checkpoints' of ModelCheckpoint is another folder on rank 1 than on rank 0" in apart
    assert not [path for path in tmp_path.rglob(".shared-*")]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one, which the test ends."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dirpath", ["checkpoints", None])
def test_folders_that_are_named_are_looked_at(dirpath: str | None, folder: Path) -> None:
    own = trainer(folder, devices=1, strategy=SparseRLFSDP2(), callbacks=[ModelCheckpoint(dirpath)])
    facts = {"seeds": "1"}
    ranks.check_training(own, facts)
    assert facts == {"seeds": "1"}  # rows that nobody deals out are no rank's own
    made = {path.name for path in folder.iterdir()} - {"store"}
    assert made == ({"checkpoints"} if dirpath == "checkpoints" else set())


def test_remote_folders_take_no_parts(folder: Path) -> None:
    own = trainer(folder, devices=1, strategy=SparseRLFSDP2(), callbacks=[ModelCheckpoint("memory://checkpoints")])
    with pytest.raises(ValueError, match="'memory://checkpoints' of ModelCheckpoint: under SparseRLFSDP2 every rank"):
        ranks.check_training(own, {})


def test_a_group_is_ended_with_its_process(tmp_path: Path) -> None:
    """Asked for twice, as two fits do; ended before what was registered earlier looks."""
    script = f"""
import atexit, torch
from sparse_rl_lightning.distributed.ranks import end_group_at_exit
atexit.register(lambda: print("left" if torch.distributed.is_initialized() else "ended"))
end_group_at_exit()
end_group_at_exit()
store = torch.distributed.FileStore({str(tmp_path / "store")!r}, 1)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("ended\n", 0), done.stderr


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("The server socket has failed. code: -98, name: EADDRINUSE\nmore", "another program listens there"),
        ("address already in use", "another program listens there"),
        ("timed out after 5 s\nmore", "timed out after 5 s. All must be able to reach MASTER_ADDR"),
    ],
)
def test_why_ranks_cannot_meet_is_one_line(reason: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "77")
    line = network_error(torch.distributed.DistNetworkError(reason))
    assert line.startswith("The ranks cannot meet at node0:77: ")
    assert says in line
    assert "\n" not in line
