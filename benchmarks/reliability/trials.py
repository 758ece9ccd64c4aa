"""The trials of the reliability benchmark: a run, a fault in it, and what must be there afterwards."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.reliability import faulty
from benchmarks.reliability.faulty import STEPS, STRETCHES, write_config
from benchmarks.reliability.forks import Event, Moment, Run, start_ranks

FIT = ("fit", "--config", "config.yaml")
RESUME = (*FIT, "--ckpt_path=last")
PREEMPT = (signal.SIGTERM, signal.SIGUSR1)
NOTICED = 5  # seconds after a rank's death until the others have stopped
INSIDE = ("rollout", "scoring", "micro-batch", "optimizer step")


class Lost(Exception):
    """Something was lost: the stretch of the run that the fault hit, and what."""


class NotHit(Exception):
    """The run came to its end, as it should, before its fault."""


@dataclass(frozen=True)
class Setting:
    """What trials draw their moments from and are compared with: a run that nothing happens to."""

    timeline: Sequence[Event]
    final: dict[str, Any]
    ranks: int = 1

    def moment(self, dice: random.Random, stretches: Sequence[str] = STRETCHES) -> Moment:
        """A time in a stretch of a random kind, anywhere in the run."""
        stretch = dice.choice(stretches)
        return self.moment_in(dice, stretch, dice.randrange(len(self._places(stretch))))

    def moment_in(self, dice: random.Random, stretch: str, index: int) -> Moment:
        """A time in a stretch."""
        number = self._places(stretch)[index]
        return Moment(stretch, index, dice.uniform(0, self.timeline[number + 1].time - self.timeline[number].time))

    def _places(self, stretch: str) -> list[int]:
        return [number for number, event in enumerate(self.timeline[:-1]) if event.stretch == stretch]

    def start(self, folder: Path, arguments: Sequence[str] = FIT) -> list[Run]:
        """One run per rank."""
        return start_ranks(folder, arguments, self.ranks) if self.ranks > 1 else [Run(folder, arguments)]

    def judge(self, folder: Path, where: str, kept: int) -> str:
        """Go on with a run if it is not at its end, from the step ``kept`` at least, and compare."""
        if final(folder) is None:
            arguments, step = resume(folder, where, kept), last_step(folder)
            runs = self.start(folder, arguments)
            end_well(runs, where, "going on ended")
            if (begun := [event.step for event in runs[0].events[1:2]]) != [step]:
                raise Lost(where, f"step {step} is on the disk, it went on after {begun}")
        self.compare(folder, where)
        return where

    def compare(self, folder: Path, where: str) -> None:
        """Whether weights and optimizer are bitwise those of the run that nothing happened to."""
        reached = final(folder)
        if reached is None:
            raise Lost(where, "it did not come to its last step")
        if differing := [name for name, value in self.final.items() if not torch.equal(reached[name], value)]:
            raise Lost(where, f"{differing} differ")


def last_step(folder: Path) -> int:
    """Optimizer steps of ``last.ckpt``, 0 if it is not there."""
    last = folder / "checkpoints" / "last.ckpt"
    return int(torch.load(last, weights_only=True)["global_step"]) if last.exists() else 0


def final(folder: Path) -> dict[str, torch.Tensor] | None:
    """The final weights and the optimizer's state, None if the run has not come to its last step."""
    if last_step(folder) != STEPS:
        return None
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    states = checkpoint["optimizer_states"][0]["state"]
    moments = {f"{key} of weight {number}": value for number, kept in states.items() for key, value in kept.items()}
    tensors: dict[str, torch.Tensor] = checkpoint["state_dict"] | moments
    return tensors


def resume(folder: Path, where: str, kept: int) -> tuple[str, ...]:
    """The arguments to go on with: a run that had not saved yet starts again, one that had must have kept it."""
    if (step := last_step(folder)) < kept:
        raise Lost(where, f"step {kept} was saved, last.ckpt " + (f"is of step {step}" if step else "is not there"))
    return RESUME if step else FIT


def saved(*runs: Run) -> int:
    """The last step that must be on the disk: its two checkpoints were begun, last.ckpt second, and the run went on."""
    begun = [Counter(event.step for event in run.events[:-1] if event.stretch == "saving") for run in runs]
    return max((step for steps in begun for step, count in steps.items() if count >= 2), default=0)


def end_well(runs: Sequence[Run], where: str, what: str = "it ended", wanted: int = 0) -> None:
    """Wait for all ranks; none may end with another status than the one that is wanted."""
    status = [run.wait() for run in runs]
    if any(code != wanted for code in status):
        raise Lost(where, f"{what} with status {status}: " + "\n".join(run.output[-2000:] for run in runs))


def strike(runs: Sequence[Run], which: int, moment: Moment, number: int) -> Event:
    """Send one rank a signal at a moment, wait for the end of all, and say where it hit.

    Raises:
        NotHit: If the run came to its end before.
        Lost: If it ended otherwise, or hung, before.
    """
    run = runs[which]
    hit = run.signal(number) if run.reaches(moment) else None
    status = run.wait()
    for rank in runs:
        rank.wait()
    if hit is not None and number != signal.SIGKILL:
        return hit
    if hit is not None and status == -signal.SIGKILL:
        return run.last
    end_well(runs, run.last.stretch, "before the signal it ended")
    raise NotHit


def killed(folder: Path, dice: random.Random, setting: Setting) -> str:
    """SIGKILL."""
    write_config(folder)
    runs = setting.start(folder)
    where = strike(runs, 0, setting.moment(dice), signal.SIGKILL).stretch
    return setting.judge(folder, where, saved(*runs))


def killed_twice(folder: Path, dice: random.Random, setting: Setting) -> str:
    """SIGKILL, and again in the run that goes on."""
    write_config(folder)
    runs = setting.start(folder)
    where = strike(runs, 0, setting.moment(dice, STRETCHES[:-1]), signal.SIGKILL).stretch
    moment = setting.moment(dice, STRETCHES[:-1])
    again = setting.start(folder, resume(folder, where, saved(*runs)))
    where = strike(again, 0, Moment(moment.stretch, min(moment.index, 1), moment.delay), signal.SIGKILL).stretch
    return setting.judge(folder, where, saved(*runs, *again))


def preempted(folder: Path, dice: random.Random, setting: Setting) -> str:
    """SIGTERM or SIGUSR1 to one rank of a run that saves by itself at its end only."""
    write_config(folder, every=STEPS, ranks=setting.ranks)
    runs = setting.start(folder)
    hit = strike(runs, dice.randrange(setting.ranks), setting.moment(dice, INSIDE), dice.choice(PREEMPT))
    if hit.step >= STEPS - 1:  # its own checkpoint at the end would hide that there is none because of the signal
        setting.compare(folder, hit.stretch)
        raise NotHit
    end_well(runs, hit.stretch)
    latest = hit.step + 1 + (hit.stretch == "optimizer step")  # may come right after the run has looked for signals
    if not hit.step < (step := last_step(folder)) <= latest:
        raise Lost(hit.stretch, f"told to stop after step {hit.step}, it has saved step {step}")
    return setting.judge(folder, hit.stretch, step)


def rank_killed(folder: Path, dice: random.Random, setting: Setting) -> str:
    """SIGKILL to one of two ranks."""
    write_config(folder, ranks=2)
    runs, dead = setting.start(folder), dice.randrange(2)
    where = strike(runs, dead, setting.moment(dice, STRETCHES[1:]), signal.SIGKILL).stretch
    survivor = runs[1 - dead]
    took, names_it = (
        survivor.ended - runs[dead].ended,
        f"Rank {dead} has died. Rank {1 - dead} stops" in survivor.output,
    )
    over = where == "end" and survivor.wait() == 0
    if not over and (survivor.wait() != 75 or not names_it or took > NOTICED):
        raise Lost(where, f"the other ended with {survivor.wait()} after {took:.1f} s: {survivor.output[-2000:]}")
    return setting.judge(folder, where, saved(*runs))


def disk_full(folder: Path, dice: random.Random, setting: Setting) -> str:
    """The disk is full for some steps."""
    first = dice.randrange(STEPS)
    last = dice.randint(first + 1, STEPS + 1)
    fill_disk(folder, dice, first, last)
    runs = setting.start(folder)
    end_well(runs, "saving", wanted=0 if last < STEPS else 75)  # whose last checkpoint could not be written
    if "could not be saved" not in runs[0].output:
        raise Lost("saving", "it says nothing")
    write_config(folder)  # there is room again
    return setting.judge(folder, "saving", STEPS if last < STEPS else first)


def disk_full_and_killed(folder: Path, dice: random.Random, setting: Setting) -> str:
    """The disk is full from some step on, and then the run is killed; there is room again when it goes on."""
    first = dice.randrange(STEPS - 1)
    fill_disk(folder, dice, first, STEPS + 1)
    moment = setting.moment_in(dice, "saving", dice.randrange(2 * first, 2 * STEPS))
    where = strike(setting.start(folder), 0, moment, signal.SIGKILL).stretch
    write_config(folder)
    return setting.judge(folder, where, first)


def fill_disk(folder: Path, dice: random.Random, first: int, last: int) -> None:
    """A run with no room for whole checkpoints from one step to another."""
    size = dice.choice([0, 1, 4096, 60_000, 300_000])  # of 360,000
    write_config(
        folder,
        callbacks=[faulty.spelled("FullDisk", first=first, last=last, size=size)],
    )


def reward_raises(folder: Path, dice: random.Random, setting: Setting, failure: str = "raises") -> str:
    """The reward function raises on some samples."""
    write_config(
        folder,
        {"reward_funcs": f"{faulty.__name__}.{failure}", "rollout": {"reward_timeout": 2.0}},
        callbacks=[faulty.spelled("CountFailures")],
    )
    (folder / "salt").write_text(str(dice.random()))
    end_well(setting.start(folder), "scoring")
    failed = len(lines(folder / "failed"))
    counted = sum(map(int, lines(folder / "counted")))
    if final(folder) is None or counted != failed:
        raise Lost("scoring", f"{failed} samples failed, {counted} were counted")
    if not failed:
        raise NotHit
    return "scoring"


def reward_hangs(folder: Path, dice: random.Random, setting: Setting) -> str:
    """The reward function does not come back from some samples."""
    return reward_raises(folder, dice, setting, "hangs")


def nan_gradient(folder: Path, dice: random.Random, setting: Setting) -> str:
    """One gradient is no number."""
    write_config(folder, callbacks=[faulty.spelled("NanGradient", step=dice.randrange(STEPS))])
    end_well(setting.start(folder), "optimizer step")
    outcome = [*lines(folder / "moved"), *lines(folder / "counted")]
    if outcome != ["False", "1 True"] or final(folder) is None:
        raise Lost("optimizer step", f"moved, skipped, finite: {outcome}")
    return "optimizer step"


def lines(path: Path) -> list[str]:
    """Of a file, none if it is not there."""
    return path.read_text().splitlines() if path.exists() else []


@dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    name: str
    criterion: str
    trial: Callable[[Path, random.Random, Setting], str]
    share: int  # of every twenty
    ranks: int = 1


SAME = "ends with bitwise the weights and optimizer of the unbroken run"
KEPT = "has every checkpoint that it had finished"
STOPS = "with 0 after the step it was in, with its checkpoint"
COUNTS = "goes on to its last step, counts exactly the samples that failed"
NAMES = f"the other names it and stops within {NOTICED} s; both: {KEPT}"
FAULTS = (
    Fault("SIGKILL", f"{KEPT}; resumed, it {SAME}", killed, 6),
    Fault("SIGKILL, and again when resumed", f"{KEPT}; resumed twice, it {SAME}", killed_twice, 2),
    Fault("SIGTERM or SIGUSR1", f"exits {STOPS}; resumed from it, it {SAME}", preempted, 2),
    Fault("disk full for some steps", f"goes on, says so, with 75 if the last save failed; {SAME}", disk_full, 2),
    Fault("disk full, then SIGKILL", f"{KEPT}; resumed with room, it {SAME}", disk_full_and_killed, 1),
    Fault("reward function raises", COUNTS, reward_raises, 1),
    Fault("reward function hangs", COUNTS, reward_hangs, 1),
    Fault("NaN in a gradient", "skips and counts that step, moves no weight in it, ends finite", nan_gradient, 1),
    Fault("SIGKILL to one of two ranks", f"{NAMES}; resumed, both: {SAME}", rank_killed, 3, 2),
    Fault("SIGTERM or SIGUSR1 to one of two ranks", f"both exit {STOPS}; resumed from it: {SAME}", preempted, 1, 2),
)
ORDER = [fault for fault in FAULTS for _ in range(fault.share)]
