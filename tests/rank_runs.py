"""Runs of SparseGRPO on several processes, described by plain dictionaries, and what they leave behind.

A test calls :func:`run`; every process executes this file, trains once per job and rank zero saves the outcome.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from chatter import talk
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_grpo import Recorder, Rows, Stale, likes_a, module
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from sparse_rl_lightning import callbacks as corrections
from sparse_rl_lightning import modules
from sparse_rl_lightning.callbacks import (
    AcceptanceMonitor,
    ImportanceReweighting,
    MismatchSplit,
    RankWatch,
    RolloutCallback,
    RunSummary,
    SparsityAwareRejection,
    StepGuard,
    ZeroSharding,
)  # fmt: skip
from sparse_rl_lightning.checkpoints import sharded
from sparse_rl_lightning.data.base import in_order
from sparse_rl_lightning.distributed.deepspeed import SparseRLDeepSpeed, zero_config
from sparse_rl_lightning.distributed.fsdp2 import SparseRLFSDP2
from sparse_rl_lightning.files import incomplete
from sparse_rl_lightning.modules import SparseGRPO
from sparse_rl_lightning.policies.sharding import part_of, whole_weights
from sparse_rl_lightning.records import Rollout, ScoredRollout

Job = dict[str, Any]
PROMPTS = 4  # per rollout, on all ranks together
STEPS = 5
SETTINGS: dict[str, Any] = {  # two optimizer steps of two micro-batches per rollout; every sum over sequences in use
    "steps_per_generation": 2,
    "num_iterations": 2,
    "loss_type": "dapo",
    "denominator": "kept",
    "beta": 0.05,
    "scale_rewards": "batch",
}
TRAINER: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.02, "max_steps": STEPS}


class Recorded(SparseGRPO):
    """Draws nothing: takes the rollouts of an earlier run, by their prompts."""

    record: list[dict[str, Any]]

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.generator.roll_out = self.recorded  # type: ignore[method-assign]

    def recorded(self, rows: list[dict[str, Any]], index: int, **_: Any) -> ScoredRollout:
        known, size = self.record[index], self.generator.sampling.num_generations
        groups = torch.tensor([known["prompts"].index(row["prompt"]) for row in rows])
        members = (groups[:, None] * size + torch.arange(size)).flatten()
        return self.generator.decode(Rollout.from_state(known["rollout"])[members], rows, index, 0.0)


class Tap(Callback):
    """Whole gradients before clipping at every optimizer step, and whole weights at the end."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.moments: list[dict[str, torch.Tensor]] = []  # at the start and at the end, where torch's Adam has them

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.moments.append(moments(trainer, pl_module))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return  # DeepSpeed accumulates itself
        self.gradients.append(
            {n: gradient(p).clone() for n, p in (*pl_module.policy.named_parameters(), *own(pl_module))}
        )

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        weights = (*whole_weights(pl_module.policy), *own(pl_module))
        self.weights = {name: value.detach().clone() for name, value in weights}
        self.moments.append(moments(trainer, pl_module))


def moments(trainer: Trainer, module: Any) -> dict[str, torch.Tensor]:
    """Adam's second moments by the names of their weights, whole."""
    if not isinstance(trainer.optimizers[0], torch.optim.AdamW):
        return {}
    state = trainer.optimizers[0].state
    found = {name: state[value]["exp_avg_sq"] for name, value in module.policy.named_parameters() if value in state}
    return {n: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for n, value in found.items()}


def own(module: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """What a module learns besides its policy."""
    network = getattr(module, "network", None)
    return [] if network is None else [(f"network.{name}", value) for name, value in network.named_parameters()]


class Sampled(Recorder):
    """Keeps rollouts before anything is added to them."""

    def on_rollout_drawn(self, trainer: Trainer, module: Any, scored: ScoredRollout) -> None:
        rows = [row["prompt"] for row in scored.rows]
        self.scored.append({"prompts": rows, "rollout": scored.rollout.state()})  # type: ignore[arg-type]

    def on_rollout_scored(self, trainer: Trainer, module: Any, scored: ScoredRollout) -> None:
        pass


class Terminate(Callback):
    """The scheduler's signal, to one rank in the third micro-batch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)


class Kill(Callback):
    """Power fails on one rank, in the second micro-batch of the fourth optimizer step."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and batch_idx == 7:
            os.kill(os.getpid(), signal.SIGKILL)


class OwnParts(Callback):
    """From the third optimizer step on, this rank's part of a checkpoint is written where the others do not see it."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= 2:
            (self.folder / sharded.TAG).mkdir(parents=True, exist_ok=True)
            sharded.incomplete = lambda path: self.folder

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        sharded.incomplete = incomplete


class FullDisk(Callback):
    """From the third optimizer step on, one rank can write no files above 4 KiB."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and trainer.global_step >= 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Spoil(Callback):
    """NaN in what this rank has of a weight, behind an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            part_of(next(pl_module.policy.parameters())).detach().view(-1)[0] = torch.nan


class Uneven(RolloutCallback):
    """Completions of 2 tokens on one rank and of 12 on the others, by turns; the short ones lose all their tokens."""

    def __init__(self, rejects: bool) -> None:
        self.rejects = rejects

    def on_rollout_start(self, trainer: Trainer, module: Any, rows: list[dict[str, Any]]) -> None:
        length = 2 if self.is_short(trainer, module.num_rollouts) else 12
        module.generator.sampling = replace(
            module.generator.sampling, min_completion_length=length, max_completion_length=length
        )

    def correct(self, trainer: Trainer, module: Any, part: Rollout) -> None:
        if self.rejects and self.is_short(trainer, module.num_rollouts):
            assert part.keep is not None
            part.keep.zero_()

    def is_short(self, trainer: Trainer, index: int) -> bool:
        return index % trainer.world_size == trainer.global_rank


class OwnFolder(Callback):
    """A checkpoint folder that is another one on this rank, as on a machine without the others' file system."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        assert isinstance(trainer.checkpoint_callback, ModelCheckpoint)
        trainer.checkpoint_callback.dirpath = self.folder


class Poison(RolloutCallback):
    """Spoils one sequence of the first rollout on the last rank only."""

    def correct(self, trainer: Trainer, module: Any, part: Rollout) -> None:
        assert module.policy.config  # there is none in the trial, which would refuse it
        if module.num_rollouts == 0 and trainer.global_rank == trainer.world_size - 1:
            assert part.weights is not None
            part.weights[0] *= float("nan")


class LongSteps(Stale):
    """Stale on one rank from the third rollout on, when a guard has seen steps enough to tell of it."""

    def __init__(self, rank: int) -> None:
        super().__init__(first=2, rank=rank)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        (guard,) = (callback for callback in trainer.callbacks if isinstance(callback, StepGuard))
        assert guard.watch is not None
        guard.watch.least = 3


class Told(RolloutCallback):
    """Keeps what was warned of."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def on_run_warning(self, trainer: Trainer, text: str) -> None:
        self.warnings.append(text)


def counted(completions: list[str], **_: Any) -> list[float | None]:
    """A reward whose counter has another name on every rank."""
    return likes_a([], completions)


counted.take_counters = lambda: {f"of_rank_{os.environ['RANK']}": 1.0}  # type: ignore[attr-defined]


def gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if isinstance(parameter.grad, DTensor):
        return parameter.grad.full_tensor()
    if parameter.grad is not None and not hasattr(parameter, "_hp_mapping") and not hasattr(parameter, "ds_id"):
        return parameter.grad
    from deepspeed.utils import safe_get_full_grad

    return safe_get_full_grad(parameter)


def strategy(name: str, world_size: int) -> Any:
    if name.startswith("zero"):
        config = zero_config(
            int(name[4]), offload_optimizer=name.endswith("offload"), offload_parameters=name == "zero3-offload"
        )
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # all of a tiny model is small
        return SparseRLDeepSpeed(config=config)
    if name == "fsdp2":
        return SparseRLFSDP2()
    return name if world_size > 1 else "auto"


def asked(job: Job) -> list[Any]:
    """The callbacks of a job."""
    callbacks: list[Any] = [RankWatch()]
    if job.get("corrected", True):
        weights = ImportanceReweighting(clip_max=1.5, normalize="batch")
        callbacks = [SparsityAwareRejection(threshold=0.5), weights, *callbacks]
    if job.get("candidates"):
        callbacks.append(getattr(corrections, job["candidates"])(top=12))
    if job.get("poison"):
        callbacks.append(Poison())
    if job.get("uneven"):
        callbacks += [Uneven(**job["uneven"]), AcceptanceMonitor(1), MismatchSplit(1)]
    faults = {
        "terminate": Terminate, "kill": Kill, "full_disk": FullDisk, "own_folder": OwnFolder, "own_parts": OwnParts,
        "long_steps": LongSteps, "spoil": Spoil,
    }  # fmt: skip
    for name, kind in faults.items():
        if name in job:
            callbacks.append(kind(job[name]))
    if "sharding" in job:
        callbacks.append(ZeroSharding(**job["sharding"]))
    if job.get("summary"):
        callbacks.append(RunSummary(num_problems=8))
    if job.get("checkpoints"):
        every, folder = job.get("every", 1), job["checkpoints"]
        callbacks.append(
            ModelCheckpoint(folder, every_n_train_steps=every, save_last=True, enable_version_counter=False)
        )
    return callbacks


def rows_of(job: Job, world_size: int) -> Rows:
    data = Rows(prompts_per_rollout=PROMPTS // world_size, val_batch_size=2)
    data.train_rows = lambda: Rows.train_rows(data)[: job.get("rows")]  # type: ignore[method-assign]
    data.val_rows = lambda: Rows.train_rows(data)[: job.get("val_rows", 4)]  # type: ignore[method-assign]
    return data


def loaders(job: Job, data: Rows) -> dict[str, Any]:
    """The rows as ``fit`` is given them: by a data module, or by loaders that Lightning deals out itself."""
    if not job.get("own_loaders"):
        return {"datamodule": data}
    rows = DataLoader(data.train_rows(), data.prompts_per_rollout, collate_fn=list, drop_last=True)  # type: ignore[arg-type]  # a list
    return {"train_dataloaders": rows, "val_dataloaders": in_order(data.val_rows(), data.val_batch_size)}


def train(job: Job, world_size: int, out: Path) -> dict[str, Any]:
    """Train one job in this process; all ranks call it."""
    if int(os.environ.get("RANK", "0")) == world_size - 1:
        job = job | job.get("last_rank", {})
    options = {**SETTINGS, **job.get("settings", {}), **job.get("learner", {})}
    reward = counted if job.get("uneven") else likes_a
    kind = Recorded if job.get("record") else getattr(modules, job.get("module", "SparseGRPO"))
    if job.get("talks"):
        options = {**options, **talk()}
        reward = options.pop("reward")
    if job.get("adam"):
        options["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
    if job.get("decays"):  # to a tenth in every step, from the rate before
        options["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    grpo = module(reward, kind=kind, lr=job.get("lr", 0.5), **options)
    with torch.no_grad():
        next(grpo.policy_source.load()[0].parameters()).mul_(job.get("scale", 1.0))  # as a file that is another one
    if isinstance(grpo, Recorded):
        grpo.record = torch.load(job["record"], weights_only=True)
    data = rows_of(job, world_size)
    tap, sampled, told = Tap(), Sampled(), Told()
    torch.manual_seed(11)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy(job.get("strategy", "ddp"), world_size), logger=False,
        enable_checkpointing=bool(job.get("checkpoints")), enable_progress_bar=False, enable_model_summary=False,
        callbacks=[sampled, *asked(job), tap, told], default_root_dir=out,
        **{**TRAINER, "limit_val_batches": 0, **job.get("trainer", {})},
    )  # fmt: skip
    ckpt_path = job.get("ckpt_path")
    status, refused = None, ""
    try:
        trainer.fit(grpo, **loaders(job, data), ckpt_path=ckpt_path)
    except SystemExit as end:
        status = end.code
    except ValueError as error:
        if "last_rank" not in job:
            raise
        refused = str(error)
    return {
        "status": status,
        "refused": refused,
        "shadow": 0 if grpo.generator.shadow is None else grpo.generator.shadow.nbytes,
        "gradients": tap.gradients,
        "weights": tap.weights,
        "moments": tap.moments,
        "rate": trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else 0.0,
        "sampled": sampled.scored,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "before": next((c.record.before for c in trainer.callbacks if isinstance(c, RunSummary)), {}),  # type: ignore[attr-defined]
        "warnings": told.warnings,
        "global_step": trainer.global_step,
        "num_rollouts": grpo.num_rollouts,
    }


def warmed_up(job: Job, world_size: int, out: Path) -> dict[str, Any]:
    """What a warm-up validates its policy with, after a fit whose rows were others."""
    rows = [{"prompt": "0123", "solution": text} for text in ("a", "cd", "efa", "0123456", "789abcdef")]
    warmup = modules.SupervisedWarmup(module().policy_source)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy("ddp", world_size), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, default_root_dir=out, **job["trainer"],
    )  # fmt: skip
    trainer.fit(warmup, in_order([rows[0]] * 4, 2), in_order(rows[:2], 2))
    return {"metrics": trainer.validate(warmup, in_order(rows, 2), verbose=False)[0]}


def outcome_of(job: Job, world_size: int, out: Path) -> dict[str, Any]:
    return (warmed_up if job.get("warms_up") else train)(job, world_size, out)


def run(jobs: list[Job], folder: Path, world_size: int, timeout: float = 240) -> dict[str, dict[str, Any]]:
    """Start the processes, wait for all, and return rank zero's outcomes by the jobs' names."""
    statuses, texts = statuses_of(jobs, folder, world_size, timeout)
    assert not any(statuses), "\n\n".join(text[-3000:] for text in texts)
    return {job["name"]: torch.load(folder / f"{job['name']}.pt", weights_only=True) for job in jobs}


def statuses_of(jobs: list[Job], folder: Path, world_size: int, timeout: float = 240) -> tuple[list[int], list[str]]:
    """Start the processes, wait for all, and return each one's status and output; one that was ended here has -9."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    processes = start([sys.executable, __file__, str(folder)], folder, world_size)
    try:
        for process in processes:
            process.wait(timeout)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
    return [process.wait() for process in processes], [
        (folder / f"rank{rank}.txt").read_text() for rank in range(world_size)
    ]


def start(command: list[str], folder: Path, world_size: int) -> list[subprocess.Popen[bytes]]:
    """One process per rank, told who it is as Lightning expects it from a launcher outside."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    tests = Path(__file__).parent
    processes = []
    for rank in range(world_size):
        environment = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world_size),
            "RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "XDG_STATE_HOME": str(folder / "state"),
            "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]),
        }  # fmt: skip
        with (folder / f"rank{rank}.txt").open("w") as output:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
            )
    return processes


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    given = dict(os.environ)
    for job in json.loads((folder / "jobs.json").read_text()):
        os.environ.update(given)  # Lightning forgets who it is at the end of a fit
        outcome = outcome_of(job, int(given["WORLD_SIZE"]), folder)
        if given["RANK"] == "0":
            torch.save(outcome, folder / f"{job['name']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
