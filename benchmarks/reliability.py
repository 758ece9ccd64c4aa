"""Random faults in a small run, again and again: does it end with the weights of a run that nothing happened to?

    python benchmarks/reliability.py --faults 200 --save benchmarks/results/reliability-cpu.md

Every trial is a run of the command line in a process of its own, with one fault at a random moment, resumed with
``--ckpt_path=last`` where it ended before its last step. It survives if its final weights are bitwise those of the run
without faults, and is lost otherwise. The faults:

=========== ==========================================================================
kill        SIGKILL
preempt     SIGTERM or SIGUSR1
disk        the system refuses files above 4 KiB for some steps, as a full disk does
twice       SIGKILL, and again in the resumed run
=========== ==========================================================================
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import yaml

STEPS = 10
FAULTS = ("kill", "preempt", "disk", "twice")
LIMITED = """
import resource, sys
from lightning.pytorch import Callback
from sparse_rl_lightning.cli import main

class FullDisk(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        full = {first} <= trainer.global_step < {last}
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if full else resource.RLIM_INFINITY, resource.RLIM_INFINITY))

sys.modules["full_disk"] = sys.modules[__name__]
main(["fit", "--config", "config.yaml", "--trainer.callbacks+=full_disk.FullDisk"])
"""


def write_config(folder: Path) -> None:
    """A run of ten optimiser steps that takes seconds."""
    checkpoints = {
        "dirpath": str(folder / "checkpoints"), "every_n_train_steps": 1, "save_last": True,
        "enable_version_counter": False,
    }  # fmt: skip
    values = {
        "seed_everything": 7,
        "num_threads": 1,
        "model": {
            "class_path": "SparseGRPO",
            "init_args": {
                "policy": {"class_path": "TinyPolicy", "init_args": {"hidden_size": 32, "num_layers": 2}},
                "compressor": {"class_path": "RKV", "init_args": {"budget": 12, "buffer": 4, "num_sinks": 1}},
                "reward_funcs": "sparse_rl_lightning.rewards.worked_steps_reward",
                "num_generations": 2,
                "max_completion_length": 12,
                "steps_per_generation": 2,
                "num_iterations": 3,
                "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001}},
            },
        },
        "data": {
            "class_path": "ArithmeticTasks",
            "init_args": {"num_terms": 3, "num_train": 16, "num_val": 4, "prompts_per_rollout": 4},
        },
        "trainer": {
            "accelerator": "cpu", "default_root_dir": str(folder), "max_steps": STEPS, "accumulate_grad_batches": 2,
            "limit_val_batches": 0, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
            "callbacks": [{"class_path": "ModelCheckpoint", "init_args": checkpoints}],
        },
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(values))


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """The command line in a folder, or a script instead of it."""
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), root]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *(arguments or ("-m", "sparse_rl_lightning", "fit", "--config", "config.yaml"))]
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)


def interrupt(folder: Path, number: int, dice: random.Random, *arguments: str) -> None:
    """Run, and send a signal some time after the first checkpoint."""
    process, last = start(folder, *arguments), folder / "checkpoints" / "last.ckpt"
    while not last.exists() and process.poll() is None:
        time.sleep(0.002)
    time.sleep(dice.uniform(0, 0.8))
    process.send_signal(number)
    process.wait()


def survives(fault: str, folder: Path, dice: random.Random, want: dict[str, torch.Tensor]) -> bool:
    """One trial."""
    write_config(folder)
    resume = ("-m", "sparse_rl_lightning", "fit", "--config", "config.yaml", "--ckpt_path=last")
    if fault == "disk":
        first = dice.randint(1, STEPS - 3)
        (folder / "limited.py").write_text(LIMITED.format(first=first, last=dice.randint(first + 1, STEPS - 1)))
        start(folder, "limited.py").wait()
    elif fault == "preempt":
        interrupt(folder, dice.choice([signal.SIGTERM, signal.SIGUSR1]), dice)
    else:
        interrupt(folder, signal.SIGKILL, dice)
    if fault == "twice":
        process = start(folder, *resume)
        time.sleep(dice.uniform(0, 10))
        process.kill()
        process.wait()
    if weights(folder) is None:
        start(folder, *resume).wait()
    own = weights(folder)
    return own is not None and all(torch.equal(own[name], value) for name, value in want.items())


def weights(folder: Path) -> dict[str, torch.Tensor] | None:
    """The final weights, None if the run has not come to its last step."""
    last = folder / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(last, weights_only=True) if last.exists() else {"global_step": 0}
    return checkpoint["state_dict"] if checkpoint["global_step"] == STEPS else None


def main() -> None:
    """Print and save the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    dice, counts = random.Random(options.seed), Counter[tuple[str, bool]]()
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"
        whole.mkdir()
        write_config(whole)
        start(whole).wait()
        want = weights(whole)
        assert want is not None, (whole / "output.txt").read_text()
        for trial in range(options.faults):
            fault, folder = FAULTS[trial % len(FAULTS)], Path(place) / str(trial)
            folder.mkdir()
            alive = survives(fault, folder, dice, want)
            counts[fault, alive] += 1
            print(f"{trial + 1}/{options.faults} {fault}: {'survived' if alive else 'LOST'}", flush=True)
            if not alive:
                print((folder / "output.txt").read_text()[-2000:], flush=True)
    rows = [f"| {fault} | {counts[fault, True]} | {counts[fault, False]} |" for fault in FAULTS]
    lost = sum(counts[fault, False] for fault in FAULTS)
    total = f"| all | {options.faults - lost} | {lost} |"
    table = "\n".join(["| fault | survived | lost |", "|---|---|---|", *rows, total])
    print(table)
    if options.save is not None:
        options.save.write_text(f"# Random faults, one process on a CPU, seed {options.seed}\n\n{table}\n")


if __name__ == "__main__":
    main()
