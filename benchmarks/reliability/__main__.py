"""Random faults in small runs, again and again: is anything lost?

    python -m benchmarks.reliability --faults 200 --save benchmarks/results

Every trial is a run of the command line in processes of its own, with one fault at a random moment, gone on with where
it ended before its last step: with ``--ckpt_path=last``, or from the start if it had not saved yet, which it says
itself. A run that comes to its end before its fault is no trial: another is drawn. The processes begin as copies of one
that has imported everything; the runs that they are compared with are fresh ones, and that a copy gives bitwise what a
fresh one gives is checked first. Finished trials are kept in ``--work``: started again, the benchmark goes on.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # before torch: this process must have one thread to be copied
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.common import options
from benchmarks.common.pages import machine, save
from benchmarks.common.tables import Table
from benchmarks.reliability.faulty import STEPS, STRETCHES, write_config
from benchmarks.reliability.forks import Event, rank_variables
from benchmarks.reliability.trials import FAULTS, FIT, ORDER, Fault, Lost, NotHit, Setting, end_well, final, lines

ATTEMPTS = 100  # runs that may end before their fault, one after the other


def settings(work: Path, ranks: int) -> Setting:
    """A fresh run and a forked one, which must agree."""
    folders = {name: work / f"{name}-{ranks}" for name in ("fresh", "forked")}
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_config(folder, ranks=ranks)
    path = {"PYTHONPATH": str(ROOT)}
    fresh = [
        subprocess.Popen(
            [sys.executable, "-m", "sparse_rl_lightning", *FIT], cwd=folders["fresh"], stderr=subprocess.DEVNULL,
            env={**os.environ, **path, **variables},
        )
        for variables in (rank_variables(ranks) if ranks > 1 else [{}])
    ]  # fmt: skip
    assert not any(process.wait() for process in fresh)
    want = final(folders["fresh"])
    assert want is not None
    setting = Setting([], want, ranks)
    runs = setting.start(folders["forked"])
    end_well(runs, "")
    setting.compare(folders["forked"], "")
    timeline = [*runs[0].events, Event("over", runs[0].ended, STEPS)]
    assert [event.step for event in timeline if event.stretch == "saving"] == [n // 2 + 1 for n in range(2 * STEPS)]
    print(f"{ranks} process(es): a forked run gives bitwise what a fresh one gives", flush=True)
    return Setting(timeline, want, ranks)


def one_trial(number: int, fault: Fault, seed: int, work: Path, setting: Setting) -> dict[str, Any]:
    """One fault that hit, with what became of it, and how many runs ended before theirs.

    Raises:
        RuntimeError: If no fault hits.
    """
    began = time.monotonic()
    for missed in range(ATTEMPTS):
        folder = work / "trial"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            where, why, survived = fault.trial(folder, random.Random(f"{seed} {number} {missed}"), setting), "", True
        except NotHit:
            continue
        except Lost as lost:
            (where, why), survived = lost.args, False
            shutil.copytree(folder, work / f"lost-{number}", dirs_exist_ok=True)
        facts = {"number": number, "seed": seed, "fault": fault.name, "seconds": round(time.monotonic() - began, 1)}
        return facts | {"survived": survived, "where": where, "why": why, "missed": missed}
    raise RuntimeError(f"{fault.name}: {ATTEMPTS} runs came to their end before it.")


def tables(trials: list[dict[str, Any]]) -> str:
    """Survived and lost by kind, and where faults hit."""
    minutes = sum(trial["seconds"] for trial in trials) / 60
    note = f"{machine('cpu')}. Runs of {STEPS} optimizer steps; all trials took {minutes:.0f} minutes."
    note += " Not hit: runs whose fault came too late to matter, which do not count as trials."
    table = Table("Survived and lost", ("fault", "a run survives if it", "faults", "survived", "lost", "not hit"), note)
    kinds = [(fault.name, fault.criterion, [t for t in trials if t["fault"] == fault.name]) for fault in FAULTS]
    for name, criterion, trials_of in [*kinds, ("all", "", trials)]:
        good = sum(trial["survived"] for trial in trials_of)
        counts = (len(trials_of), good, len(trials_of) - good, sum(trial["missed"] for trial in trials_of))
        table.add(name, criterion, *map(str, counts))
    hit = Counter(trial["where"] for trial in trials if trial["fault"].startswith("SIG"))
    places = Table("Where signals hit", ("the run was in", "signals"))
    for stretch in STRETCHES:
        places.add(stretch, str(hit[stretch]))
    return f"{table}\n\n{places}"


def main() -> None:
    """Run what is not finished, and print or save the tables."""
    parser = options.parser(__doc__, "reliability-cpu.md")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/reliability"), help="folder of finished trials")
    args = options.parsed(parser)
    os.environ["XDG_STATE_HOME"] = str(args.work.absolute() / "state")
    torch.set_num_threads(1)
    record = args.work.absolute() / f"trials-{args.seed}.jsonl"
    trials = [json.loads(line) for line in lines(record)]
    began, before, unbroken = time.monotonic(), len(trials), {}
    if before < args.faults:
        unbroken = {ranks: settings(args.work.absolute(), ranks) for ranks in {fault.ranks for fault in ORDER}}
    for number in range(before, args.faults):
        fault = ORDER[number % len(ORDER)]
        trial = one_trial(number, fault, args.seed, args.work.absolute(), unbroken[fault.ranks])
        trials.append(trial)
        with record.open("a") as file:
            file.write(json.dumps(trial) + "\n")
        left = (time.monotonic() - began) / (len(trials) - before) * (args.faults - len(trials))
        state = "survived" if trial["survived"] else f"LOST: {trial['why']}"
        print(
            f"{len(trials)}/{args.faults} {trial['fault']} ({trial['where']}): {state}; {left / 60:.0f} min left",
            flush=True,
        )
    text = tables(trials[: args.faults])
    print(text)
    save(args.save, "reliability-cpu", "benchmarks.reliability", text)


if __name__ == "__main__":
    main()
