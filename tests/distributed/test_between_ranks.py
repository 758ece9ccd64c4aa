"""What ranks tell each other, and how one of them is left: two real ranks over gloo, or one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import two_ranks
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from sparse_rl_lightning.advantages import group_advantages
from sparse_rl_lightning.callbacks import ImportanceReweighting
from sparse_rl_lightning.distributed import ranks
from sparse_rl_lightning.distributed.fsdp2 import SparseRLFSDP2
from sparse_rl_lightning.records import Rollout

ROOT = Path(__file__).resolve().parents[2]


def trainer(folder: Path, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=folder,
        **{"devices": 2, "strategy": "ddp", **options},
    )  # fmt: skip


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
            ranks.advantages_of_rank(rewards[rank], 2, scale, own_trainer) for scale in ("batch", "group", "none")
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
    assert {path.name for path in folder.iterdir()} - {"store"} == (
        {"checkpoints"} if dirpath == "checkpoints" else set()
    )


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
