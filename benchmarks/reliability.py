"""Random faults in small runs, again and again: is anything lost?

    python benchmarks/reliability.py --faults 200 --save benchmarks/results

Every trial is a run of the command line in processes of its own, with one fault at a random moment, gone on with where
it ended before its last step: with ``--ckpt_path=last``, or from the start if it had not saved yet. The processes begin
as copies of one that has imported everything; the runs that they are compared with are fresh ones, and that a copy
gives bitwise what a fresh one gives is checked first. Finished trials are kept in ``--work``: started again, the
benchmark goes on.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: this process must have one thread to be copied
os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _faulty import STEPS, STRETCHES, write_config
from _forks import Moment, Run, rank_variables, start_ranks
from _table import Table, machine, save

ROOT = Path(__file__).resolve().parents[1]
FIT = ("fit", "--config", "config.yaml")
RESUME = (*FIT, "--ckpt_path=last")
PREEMPT = (signal.SIGTERM, signal.SIGUSR1)
NOTICED = 5  # seconds after a rank's death until the others have stopped
MOMENTS = tuple(stretch for stretch in STRETCHES if stretch != "start")


@dataclass(frozen=True)
class Outcome:
    """What became of a trial; ``where`` is the stretch of the run that the fault hit, "" if none did."""

    survived: bool
    where: str
    why: str = ""


@dataclass(frozen=True)
class Setting:
    """What trials draw their moments from and are compared with: a run that nothing happens to."""

    timeline: Sequence[tuple[str, float]]
    final: dict[str, Any]

    def moment(self, dice: random.Random, stretches: Sequence[str] = STRETCHES) -> Moment:
        """A time in a stretch of a random kind, anywhere in the run."""
        stretch = dice.choice(stretches)
        places = [place for place, (name, _) in enumerate(self.timeline[:-1]) if name == stretch]
        index = dice.randrange(len(places))
        begin, after = (self.timeline[places[index] + step][1] for step in (0, 1))
        return Moment(stretch, index, dice.uniform(0, after - begin))

    def judge(self, folder: Path, where: str) -> Outcome:
        """Go on with a run if that is needed, and compare."""
        if final(folder) is None:
            run = Run(folder, resume(folder))
            if status := run.wait():
                return Outcome(False, where, f"going on ended with status {status}: {run.output[-2000:]}")
        return self.compare(folder, where)

    def compare(self, folder: Path, where: str) -> Outcome:
        """Whether weights and optimiser are bitwise those of the run that nothing happened to."""
        own = final(folder)
        if own is None:
            return Outcome(False, where, "it did not come to its last step")
        differing = [name for name, value in self.final.items() if not torch.equal(own[name], value)]
        return Outcome(not differing, where, f"{differing} differ" if differing else "")


def final(folder: Path) -> dict[str, torch.Tensor] | None:
    """The final weights and the optimiser's state, None if the run has not come to its last step."""
    last = folder / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(last, weights_only=True) if last.exists() else {"global_step": 0}
    if checkpoint["global_step"] != STEPS:
        return None
    states = checkpoint["optimizer_states"][0]["state"]
    moments = {f"{key} of weight {number}": value for number, kept in states.items() for key, value in kept.items()}
    return checkpoint["state_dict"] | moments


def resume(folder: Path) -> tuple[str, ...]:
    """The arguments to go on with: a run that had not saved yet starts again."""
    return RESUME if (folder / "checkpoints" / "last.ckpt").exists() else FIT


def killed(folder: Path, dice: random.Random, one: Setting) -> Outcome:
    """SIGKILL."""
    write_config(folder)
    return one.judge(folder, strike(Run(folder, FIT), one.moment(dice), signal.SIGKILL))


def killed_twice(folder: Path, dice: random.Random, one: Setting) -> Outcome:
    """SIGKILL, and again in the run that goes on."""
    write_config(folder)
    first = strike(Run(folder, FIT), one.moment(dice, STRETCHES[:-1]), signal.SIGKILL)
    moment = one.moment(dice, STRETCHES[:-1])
    again = strike(Run(folder, resume(folder)), Moment(moment.stretch, min(moment.index, 1), moment.delay), 9)
    return one.judge(folder, first and again)


def preempted(folder: Path, dice: random.Random, one: Setting) -> Outcome:
    """SIGTERM or SIGUSR1 to a run that saves by itself at its end only."""
    write_config(folder, every=STEPS)
    run = Run(folder, FIT)
    where = strike(run, one.moment(dice), dice.choice(PREEMPT))
    if where not in ("", "start", "end") and run.wait():
        return Outcome(False, where, f"it ended with status {run.wait()}: {run.output[-2000:]}")
    return one.judge(folder, where)


def disk_full(folder: Path, dice: random.Random, one: Setting) -> Outcome:
    """The disk is full for some steps."""
    first = dice.randrange(STEPS)
    fill_disk(folder, dice, first, dice.randint(first + 1, STEPS + 1))
    run = Run(folder, FIT)
    if status := run.wait():
        return Outcome(False, "saving", f"it ended with status {status}: {run.output[-2000:]}")
    if "could not be saved" not in run.output:
        return Outcome(False, "saving", "it says nothing")
    write_config(folder)  # there is room again
    return one.judge(folder, "saving")


def disk_full_and_killed(folder: Path, dice: random.Random, one: Setting) -> Outcome:
    """The disk is full from some step on, and then the run is killed; there is room again when it goes on."""
    first = dice.randrange(STEPS - 1)
    fill_disk(folder, dice, first, STEPS + 1)
    places = [place for place, (name, _) in enumerate(one.timeline) if name == "saving"]
    saving = dice.randrange(2 * first, len(places))
    delay = dice.uniform(0, one.timeline[places[saving] + 1][1] - one.timeline[places[saving]][1])
    where = strike(Run(folder, FIT), Moment("saving", saving, delay), signal.SIGKILL)
    write_config(folder)
    return one.judge(folder, where)


def fill_disk(folder: Path, dice: random.Random, first: int, last: int) -> None:
    """A run with no room for whole checkpoints from one step to another."""
    size = dice.choice([0, 1, 4096, 60_000, 300_000])  # of 360,000
    write_config(
        folder,
        callbacks=[{"class_path": "_faulty.FullDisk", "init_args": {"first": first, "last": last, "size": size}}],
    )


def reward_raises(folder: Path, dice: random.Random, one: Setting, kind: str = "raises") -> Outcome:
    """The reward function raises on some samples."""
    write_config(
        folder,
        {"reward_funcs": f"_faulty.{kind}", "reward_timeout": 2.0},
        callbacks=[{"class_path": "_faulty.CountFailures"}],
    )
    (folder / "salt").write_text(str(dice.random()))
    run = Run(folder, FIT)
    if status := run.wait():
        return Outcome(False, "scoring", f"it ended with status {status}: {run.output[-2000:]}")
    failed = len(lines(folder / "failed"))
    counted = sum(map(int, lines(folder / "counted")))
    if final(folder) is None or counted != failed:
        return Outcome(False, "scoring", f"{failed} samples failed, {counted} were counted")
    return Outcome(True, "scoring" if failed else "")


def reward_hangs(folder: Path, dice: random.Random, one: Setting) -> Outcome:
    """The reward function does not come back from some samples."""
    return reward_raises(folder, dice, one, "hangs")


def nan_gradient(folder: Path, dice: random.Random, one: Setting) -> Outcome:
    """One gradient is no number."""
    init_args = {"step": dice.randrange(STEPS)}
    write_config(folder, callbacks=[{"class_path": "_faulty.NanGradient", "init_args": init_args}])
    run = Run(folder, FIT)
    if status := run.wait():
        return Outcome(False, "optimiser step", f"it ended with status {status}: {run.output[-2000:]}")
    found = [*lines(folder / "moved"), *lines(folder / "counted")]
    good = found == ["False", "1 True"] and final(folder) is not None
    return Outcome(good, "optimiser step", "" if good else f"moved, skipped, finite: {found}")


def rank_killed(folder: Path, dice: random.Random, two: Setting) -> Outcome:
    """SIGKILL to one of two ranks."""
    write_config(folder, ranks=2)
    runs, dead = start_ranks(folder, FIT, 2), dice.randrange(2)
    where = strike(runs[dead], two.moment(dice, MOMENTS), signal.SIGKILL)
    began = time.monotonic()
    status = runs[1 - dead].wait()
    took, said = time.monotonic() - began, f"Rank {dead} has died. Rank {1 - dead} stops" in runs[1 - dead].output
    over = where in ("", "end") and status == 0
    if not over and (status != 75 or not said or took > NOTICED):
        return Outcome(
            False, where, f"the other ended with {status} after {took:.1f} s: {runs[1 - dead].output[-2000:]}"
        )
    return judge_ranks(folder, two, where)


def rank_preempted(folder: Path, dice: random.Random, two: Setting) -> Outcome:
    """SIGTERM or SIGUSR1 to one of two ranks, which save by themselves at their end only."""
    write_config(folder, every=STEPS, ranks=2)
    runs, told = start_ranks(folder, FIT, 2), dice.randrange(2)
    where = strike(runs[told], two.moment(dice, MOMENTS[:-1]), dice.choice(PREEMPT))
    if any(run.wait() for run in runs):
        said = "\n".join(run.output[-2000:] for run in runs)
        return Outcome(False, where, f"they ended with status {[run.wait() for run in runs]}: {said}")
    return judge_ranks(folder, two, where)


def judge_ranks(folder: Path, two: Setting, where: str) -> Outcome:
    """As :meth:`Setting.judge`, on two ranks."""
    if final(folder) is None:
        runs = start_ranks(folder, resume(folder), 2)
        if any(run.wait() for run in runs):
            return Outcome(False, where, "going on ended badly: " + "\n".join(run.output[-2000:] for run in runs))
    return two.compare(folder, where)


def lines(path: Path) -> list[str]:
    """Of a file, none if it is not there."""
    return path.read_text().splitlines() if path.exists() else []


def strike(run: Run, moment: Moment, number: int) -> str:
    """Send a signal at a moment, wait for the end, and say where it hit: "" if the run ended before."""
    if not run.reaches(moment):
        run.wait()
        return ""
    where = run.signal(number)
    run.wait()
    return run.last if number == signal.SIGKILL else where


@dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    name: str
    criterion: str
    trial: Callable[[Path, random.Random, Setting], Outcome]
    share: int  # of every twenty
    ranks: int = 1


SAME = "ends with bitwise the weights and optimiser of the unbroken run"
FAULTS = (
    Fault("SIGKILL", f"resumed, it {SAME}", killed, 6),
    Fault("SIGKILL, and again when resumed", f"resumed twice, it {SAME}", killed_twice, 2),
    Fault("SIGTERM or SIGUSR1", f"saves and exits with 0; resumed, it {SAME}", preempted, 2),
    Fault("disk full for some steps", f"goes on, says so, {SAME}", disk_full, 2),
    Fault("disk full, then SIGKILL", f"resumed with room, it {SAME}", disk_full_and_killed, 1),
    Fault(
        "reward function raises", "goes on to its last step, counts exactly the samples that failed", reward_raises, 1
    ),
    Fault("reward function hangs", "goes on to its last step, counts exactly the samples that failed", reward_hangs, 1),
    Fault("NaN in a gradient", "skips and counts that step, moves no weight in it, ends finite", nan_gradient, 1),
    Fault(
        "SIGKILL to one of two ranks",
        f"the other names it and stops within {NOTICED} s; resumed, both: {SAME}",
        rank_killed,
        3,
        2,
    ),
    Fault(
        "SIGTERM or SIGUSR1 to one of two ranks",
        f"both save and exit with 0; resumed, both: {SAME}",
        rank_preempted,
        1,
        2,
    ),
)
ORDER = [fault for fault in FAULTS for _ in range(fault.share)]


def settings(work: Path, ranks: int) -> Setting:
    """A fresh run and a forked one, which must agree."""
    folders = {name: work / f"{name}-{ranks}" for name in ("fresh", "forked")}
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_config(folder, ranks=ranks)
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    fresh = [
        subprocess.Popen(
            [sys.executable, "-m", "sparse_rl_lightning", *FIT], cwd=folders["fresh"], stderr=subprocess.DEVNULL,
            env={**os.environ, **path, **variables},
        )
        for variables in (rank_variables(ranks) if ranks > 1 else [{}])
    ]  # fmt: skip
    assert not any(process.wait() for process in fresh)
    runs = start_ranks(folders["forked"], FIT, ranks) if ranks > 1 else [Run(folders["forked"], FIT)]
    assert not any(run.wait() for run in runs), runs[0].output
    want = final(folders["fresh"])
    assert want is not None
    setting = Setting([*runs[0].events, ("over", runs[0].ended)], want)
    assert setting.compare(folders["forked"], "").survived, "a forked run differs from a fresh one"
    print(f"{ranks} process(es): a forked run gives bitwise what a fresh one gives", flush=True)
    return setting


def one_trial(number: int, seed: int, work: Path, known: dict[int, Setting]) -> dict[str, Any]:
    """One fault that hit, with what became of it."""
    fault = ORDER[number % len(ORDER)]
    began = time.monotonic()
    for attempt in range(10):  # a run may end before the fault comes
        folder = work / "trial"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        outcome = fault.trial(folder, random.Random(f"{seed} {number} {attempt}"), known[fault.ranks])
        if outcome.where or not outcome.survived:
            break
    if not outcome.survived:
        shutil.copytree(folder, work / f"lost-{number}", dirs_exist_ok=True)
    facts = {"number": number, "seed": seed, "fault": fault.name, "seconds": round(time.monotonic() - began, 1)}
    return facts | asdict(outcome)


def tables(trials: list[dict[str, Any]]) -> str:
    """Survived and lost by kind, and where faults hit."""
    minutes = sum(trial["seconds"] for trial in trials) / 60
    note = f"{machine('cpu')}. Runs of {STEPS} optimiser steps; all trials took {minutes:.0f} minutes."
    table = Table("Survived and lost", ("fault", "a run survives if it", "faults", "survived", "lost"), note)
    for fault in FAULTS:
        own = [trial["survived"] for trial in trials if trial["fault"] == fault.name]
        table.add(fault.name, fault.criterion, *map(str, (len(own), sum(own), len(own) - sum(own))))
    good = sum(trial["survived"] for trial in trials)
    table.add("all", "", *map(str, (len(trials), good, len(trials) - good)))
    hit = Counter(trial["where"] for trial in trials if trial["fault"].startswith("SIG"))
    places = Table("Where signals hit", ("the run was in", "signals"))
    for stretch in STRETCHES:
        places.add(stretch, str(hit[stretch]))
    return f"{table}\n\n{places}"


def main() -> None:
    """Run what is not finished, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/reliability"), help="folder of finished trials")
    parser.add_argument("--save", type=Path, help="folder that gets reliability-cpu.md")
    options = parser.parse_args()
    os.environ["XDG_STATE_HOME"] = str(options.work.absolute() / "state")
    torch.set_num_threads(1)
    record = options.work.absolute() / f"trials-{options.seed}.jsonl"
    trials = [json.loads(line) for line in lines(record)]
    began, before, known = time.monotonic(), len(trials), {}
    if before < options.faults:
        known = {ranks: settings(options.work.absolute(), ranks) for ranks in {fault.ranks for fault in ORDER}}
    for number in range(before, options.faults):
        trial = one_trial(number, options.seed, options.work.absolute(), known)
        trials.append(trial)
        with record.open("a") as file:
            file.write(json.dumps(trial) + "\n")
        left = (time.monotonic() - began) / (len(trials) - before) * (options.faults - len(trials))
        state = "survived" if trial["survived"] else f"LOST: {trial['why']}"
        print(
            f"{len(trials)}/{options.faults} {trial['fault']} ({trial['where']}): {state}; {left / 60:.0f} min left",
            flush=True,
        )
    text = tables(trials[: options.faults])
    print(text)
    if options.save is not None:
        save(options.save, "reliability-cpu", "benchmarks/reliability.py", text)


if __name__ == "__main__":
    main()
