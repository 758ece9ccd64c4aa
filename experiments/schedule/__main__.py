"""A calibrated schedule against a fixed budget of the same mean cost, on the quickstart.

    python -m experiments.schedule [--seeds 0 1 2] [--steps 240] [--fixed 30] [--save docs/measured]

First ``sparse-rl calibrate --config configs/calibrate.yaml`` measures the tail of the acceptance by budget and length.
Of the schedules that it allows, one for each target, that with the highest target is taken which reads no more of the
cache than the fixed budget does, averaged over the tokens of dense completions. Then both train the quickstart's policy
with all else equal, every run a ``sparse-rl fit`` of its own: finished ones are kept, an interrupted one goes on from
its last checkpoint. ``--save`` writes the tables between their markers in sparrow.md and the picture beside them.
``--seeds`` without a number trains nothing and only says what the calibration found.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from benchmarks import ROOT
from benchmarks.common.pages import insert, machine, mark
from benchmarks.common.tables import Table
from experiments.schedule.calibrated import CHECK, Tails, calibration_table, table_rows
from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.calibration import Work, entries_read
from sparse_rl_lightning.calibration.table import Cell, choose
from sparse_rl_lightning.compressors import RKV

PAGE, PICTURE = "sparrow.md", "calibration.png"
BEGIN, FOUND = mark("experiments.schedule"), mark("experiments.schedule", "calibration")
ARMS = ("fixed", "schedule")
LAST = 20  # rollouts at the end whose mean is shown
COLLAPSED = 0.5  # of the run's best mean over LAST rollouts; a run that ends below it has collapsed


@dataclass(frozen=True)
class Plan:
    """The two budgets to compare."""

    fixed: int
    schedule: LengthSchedule
    target: float
    entries: dict[str, float]  # of the cache read per token, by arm

    def budget(self, arm: str) -> int | dict[str, Any]:
        """As a configuration has it."""
        if arm == "fixed":
            return self.fixed
        steps = {"starts": list(self.schedule.starts), "budgets": list(self.schedule.budgets)}
        return {"class_path": "LengthSchedule", "init_args": steps}


def sparse_rl(*arguments: str) -> None:
    """The command line, in a process of its own."""
    subprocess.run([sys.executable, "-m", "sparse_rl_lightning", *arguments], cwd=ROOT, check=True)


def calibrate(folder: Path) -> dict[int, list[Cell | None]]:
    """The table of the calibration, measured where it is not there yet: a cell for every budget and bin."""
    if not (folder / "table.csv").exists():
        sparse_rl("calibrate", "--config", "configs/calibrate.yaml", f"--folder={folder}")
    table: dict[int, list[Cell | None]] = {}
    for row in table_rows(folder):
        if row["budget"] != CHECK:
            numbers = {name: row[name] for name in Cell.__dataclass_fields__}
            known = {name: float(number) for name, number in numbers.items()} if all(numbers.values()) else None
            table.setdefault(int(row["budget"]), []).append(None if known is None else Cell(**known))  # type: ignore[arg-type]
    return table


def tails(folder: Path, settings: dict[str, Any]) -> str:
    """The table of what was calibrated; the same parts once more for a schedule whose budgets may fall."""
    free = folder.with_name(f"{folder.name}-free")
    if (free / "parts").exists():
        shutil.rmtree(free / "parts")
    shutil.copytree(folder / "parts", free / "parts")
    sparse_rl("calibrate", "--config", "configs/calibrate.yaml", f"--folder={free}", "--monotone=false")
    lengths = dense_lengths(folder)
    return calibration_table(
        Tails.read(folder), Tails.read(free), lambda budget: entries_per_token(budget, lengths, settings)
    ).untitled


def dense_lengths(folder: Path) -> list[tuple[int, int]]:
    """Prompt length and completion length of the dense completions of the calibration."""
    found = []
    for path in sorted((folder / "parts/dense").glob("*.safetensors")):
        part = load_file(path)
        for sequence in part["sequences"].unique():
            own = part["lengths"][part["sequences"] == sequence]
            found.append((int(own.min()), len(own)))
    return found


def entries_per_token(
    budget: int | LengthSchedule, lengths: Sequence[tuple[int, int]], settings: dict[str, Any]
) -> float:
    """Entries of the cache that a step reads, averaged over the tokens of these sequences."""
    method = RKV(**{**settings, "budget": budget})
    longest = {prompt: max(n for p, n in lengths if p == prompt) for prompt, _ in lengths}
    read = {p: entries_read(method, Work(1, p, n), 1).cumsum(0) for p, n in longest.items()}
    return sum(float(read[p][n - 1]) for p, n in lengths) / sum(n for _, n in lengths)


def plan(folder: Path, fixed: int, settings: dict[str, Any], bin_size: int) -> Plan:
    """The schedule of the highest target that costs no more than the fixed budget."""
    table, lengths = calibrate(folder), dense_lengths(folder)
    limit = entries_per_token(fixed, lengths, settings)
    targets = sorted({cell.tail for row in table.values() for cell in row if cell is not None}, reverse=True)
    for target in targets:
        schedule = choose(table, target, bin_size, monotone=True).schedule
        entries = entries_per_token(schedule, lengths, settings)
        if entries <= limit:
            return Plan(fixed, schedule, target, {"fixed": limit, "schedule": entries})
    raise ValueError(
        f"no schedule costs as little as a fixed budget of {fixed}: raise --fixed, or calibrate smaller ones."
    )


def train(arm: str, seed: int, steps: int, own: Plan, folder: Path) -> dict[str, Any]:
    """One run of the quickstart, or what it left when it was run before."""
    place = folder / f"{arm}_{seed}"
    if not (place / "summary.json").exists():
        place.mkdir(parents=True, exist_ok=True)
        config = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text(encoding="utf-8"))
        model, trainer = config["model"]["init_args"], config["trainer"]
        config["seed_everything"] = seed
        model["sampling"]["seed"] = seed
        config["data"]["init_args"]["seed"] = 1 + seed
        config["num_threads"] = 1
        model["compressor"]["init_args"]["budget"] = own.budget(arm)
        model["lr_scheduler"]["init_args"]["total_iters"] = steps
        trainer |= {"max_steps": steps, "default_root_dir": str(place)}
        trainer["callbacks"] = [c for c in trainer["callbacks"] if c["class_path"] != "CompletionsTable"]
        checkpoints = next(c for c in trainer["callbacks"] if c["class_path"] == "RolloutCheckpoint")
        checkpoints["init_args"] = {"every_n_train_steps": 20}
        (place / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        resume = ["--ckpt_path=last"] if (place / "checkpoints/last.ckpt").exists() else []
        sparse_rl("fit", "--config", str(place / "run.yaml"), *resume)
    found: dict[str, Any] = json.loads((place / "summary.json").read_text())
    return found


@dataclass(frozen=True)
class Outcome:
    """A finished run in numbers."""

    arm: str
    seed: int
    dense: float  # greedy accuracy afterwards, full cache
    sparse: float  # the same, compressed cache
    reward: float  # mean of the last rollouts
    best: float  # the best mean of as many rollouts in a row
    rejected: float
    saving: float  # of the KV tokens read

    @property
    def collapsed(self) -> bool:
        """Whether the reward fell and did not come back."""
        return self.reward < COLLAPSED * self.best

    @classmethod
    def of(cls, arm: str, seed: int, run: dict[str, Any]) -> Outcome:
        """Read off ``summary.json``."""
        summary, rewards = run["summary"], [row["reward"] for row in run["history"]]
        means = [statistics.fmean(rewards[i : i + LAST]) for i in range(max(len(rewards) - LAST, 0) + 1)]
        return cls(
            arm, seed, summary["after"]["dense"], summary["after"]["sparse"], means[-1], max(means),
            summary["rejection_rate"], summary["kv_saving_integral"],
        )  # fmt: skip


def page(own: Plan, outcomes: Sequence[Outcome], steps: int, settings: dict[str, Any]) -> str:
    """The table, and a sentence on who won."""
    steps_of = zip(own.schedule.starts, own.schedule.budgets, strict=True)
    schedule = ", ".join(f"{budget} from {start} tokens on" for start, budget in steps_of)
    note = (
        f"R-KV, buffer {settings['buffer']}: a fixed budget of {own.fixed}, which reads {own.entries['fixed']:.1f} "
        f"entries per token, against {schedule}, which reads {own.entries['schedule']:.1f} and was picked for a 5th "
        f"percentile of {own.target:.3f}. {steps} optimizer steps of the quickstart. Collapsed: the reward of the last "
        f"{LAST} rollouts is below {COLLAPSED:g} of the run's best {LAST} in a row. {machine('cpu')}."
    )
    table = Table(
        "Schedule against fixed budget",
        ["budget", "seed", "accuracy, full cache", "accuracy, compressed", "last reward", "best reward", "rejected",
         "KV reads saved", "collapsed"],
        note,
    )  # fmt: skip
    for o in outcomes:
        table.add(
            o.arm, str(o.seed), f"{o.dense:.3f}", f"{o.sparse:.3f}", f"{o.reward:.3f}", f"{o.best:.3f}",
            f"{o.rejected:.1%}", f"{o.saving:.1%}", "yes" if o.collapsed else "no",
        )  # fmt: skip
    return f"{table.untitled}\n\n{verdict(outcomes)}"


def verdict(outcomes: Sequence[Outcome]) -> str:
    """The means of both arms."""
    parts = []
    for arm in ARMS:
        own = [o for o in outcomes if o.arm == arm]
        if own:
            dense, sparse = (statistics.fmean(getattr(o, name) for o in own) for name in ("dense", "sparse"))
            parts.append(
                f"{arm}: accuracy {dense:.3f} with the full cache and {sparse:.3f} with the compressed one, "
                f"{sum(o.collapsed for o in own)} of {len(own)} runs collapsed"
            )
    return f"Means over seeds: {'; '.join(parts)}."


def configured() -> tuple[dict[str, Any], int]:
    """Settings of the method that is calibrated, and how many tokens a bin of lengths has."""
    settings = yaml.safe_load((ROOT / "configs/calibrate.yaml").read_text(encoding="utf-8"))
    return settings["compressor"]["init_args"], settings["binning"]["bin_size"]


def main() -> None:
    """Calibrate, train, and print or save the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=240, help="optimizer steps of every run")
    parser.add_argument("--fixed", type=int, default=30, help="the fixed budget, as in the quickstart")
    parser.add_argument("--folder", type=Path, default=Path("runs/schedule"))
    parser.add_argument("--calibration", type=Path, default=Path("runs/calibrate"), help="done there, or made there")
    parser.add_argument("--save", type=Path, help="folder of sparrow.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder, calibration = given.folder.absolute(), given.calibration.absolute()
    compressor, bin_size = configured()
    own = plan(calibration, given.fixed, compressor, bin_size)
    found = tails(calibration, compressor)
    print(own, found, sep="\n\n", flush=True)
    if given.save is not None:
        insert(given.save / PAGE, found, FOUND)
        shutil.copyfile(calibration / "table.png", given.save / PICTURE)
    outcomes: list[Outcome] = []
    for seed in given.seeds:
        for arm in ARMS:
            outcomes.append(Outcome.of(arm, seed, train(arm, seed, given.steps, own, folder)))
            print(outcomes[-1], flush=True)
            if given.save is not None:
                insert(given.save / PAGE, page(own, outcomes, given.steps, compressor), BEGIN)


if __name__ == "__main__":
    main()
