"""What is kept of a finished run: a line of JSON, small enough to be committed, enough for every table and picture."""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common import kept
from benchmarks.common.pages import machine
from experiments.arms.curves import COMPRESSION, ROUNDING, Found
from experiments.arms.runs import Run

BINS = 24  # points of a curve
LONG_STEP = re.compile(
    r"gradient of optimizer step (\d+) is [\d,]+ times as long as usual(?:.*? ratio \D*([\d.e+-]*\d))?"
)
SPIKE = 1.0  # a gradient's norm that the quickstart's clip cuts


@dataclass(frozen=True)
class Record:
    """A finished run in numbers; the key is the folder of its study and its own."""

    key: str
    settings: str  # a hash of the command line, so that no record of other settings counts
    machine: str
    evaluations: list[dict[str, float]]  # greedy accuracies, "dense" and by budget, over the rollouts
    curves: dict[str, list[float]]  # over equal parts of the run
    p05: float  # 5th percentile of the acceptance, median of the last quarter
    k3: float  # nats per token from the dense to the compressed policy, the same
    rounding: float  # largest k3 from the sampler to its replay
    rejected: float  # share of the sequences, mean over the run
    clipped: float  # share of the tokens
    saved: float  # share of the KV tokens at the end of a sequence
    largest_ratio: float  # pi / pi_old of any token kept
    spikes: float  # share of the optimizer steps with a gradient longer than SPIKE
    minutes: float  # of training, without the evaluations
    long_steps: list[list[float]] | None = None  # that StepGuard told of: rollout and largest ratio
    code: str = ""  # of its rewards, tasks and compressors; empty in lines from before it was noted
    start: str = ""  # of the weights that it began from, likewise

    @classmethod
    def of(cls, found: Found) -> Record:
        """Read off the run's own files."""
        course, summary, evicts = found.course, found.report["summary"], found.run.arm.evicts
        splits = course["splits"]
        norms = [norm for norm in course["grad_norms"] if math.isfinite(norm)]
        curves = {
            **{name: binned(found.column(name), statistics.fmean) for name in ("rollout", "reward", "rejection_rate")},
            "length": binned(found.column("completions/mean_length"), statistics.fmean),
            "largest_ratio": binned(course["ratios"], max),
            "largest_norm": binned(course["grad_norms"], max),
        }
        return cls(
            key_of(found.run), settings_of(found.run), machine("cuda" if found.run.is_on_gpu else "cpu"),
            course["evaluations"], curves,
            p05=late_median(found.logged("acceptance/p05")) if evicts else 1.0,
            k3=late_median([row[COMPRESSION] for row in splits]) if evicts else 0.0,
            rounding=max((row[ROUNDING] for row in splits if math.isfinite(row.get(ROUNDING, math.nan))), default=0.0),
            rejected=_mean(found.column("rejection_rate")), clipped=_mean(course["clipped"]),
            saved=summary["kv_saving_final"], largest_ratio=max(course["ratios"]),
            spikes=sum(norm > SPIKE for norm in norms) / max(1, len(norms)), minutes=found.minutes,
            long_steps=long_steps(found.run), code=found.run.code, start=start_of(found.run),
        )  # fmt: skip

    def end(self, cache: str, last: int, until: float = math.inf) -> float:
        """Mean accuracy of the last evaluations until so many rollouts; the cache is ``dense`` or a budget."""
        rows = [row[cache] for row in self.evaluations if row["rollouts"] <= until]
        return statistics.fmean(rows[-last:])

    def curve(self, cache: str) -> tuple[list[float], list[float]]:
        """Rollouts and accuracies."""
        return [row["rollouts"] for row in self.evaluations], [row[cache] for row in self.evaluations]


class Archive:
    """The records in a file, one a line; a run that has one is not run again.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = {one["key"]: Record(**one) for one in kept.read(path)}
        self._admitted = set[str]()

    def admit(self, runs: Sequence[Run]) -> None:
        """Let records of other code count, to show what there is, if none of these runs has one of today's.

        So no table mixes runs with one reward, task or compressor and runs with another.
        """
        if not any(map(self.of, runs)):
            self._admitted.update(map(key_of, runs))

    def of(self, run: Run) -> Record | None:
        """The run's record, from its own files where it has just ended."""
        known = self.records.get(key_of(run))
        if known is not None and known.settings != settings_of(run):
            known = None
        if known is not None and key_of(run) not in self._admitted and known.code != run.code:
            known = None
        if known is None and run.is_finished:
            known = self.records[key_of(run)] = rounded(Record.of(Found.read(run)))
            self._write()
        return known

    def is_of_other_code(self, run: Run) -> bool:
        """Whether there is a record of the run with these settings, but of other code than there is now."""
        known = self.records.get(key_of(run))
        return known is not None and known.settings == settings_of(run) and known.code != run.code

    def other_starts(self, runs: Sequence[Run]) -> set[str]:
        """Weights that kept runs of the same studies began from, and these would not."""
        places = {key_of(run).partition("/")[0] for run in runs}
        kept_starts = {one.start for key, one in self.records.items() if key.partition("/")[0] in places}
        return kept_starts - {"", *map(start_of, runs)}

    def _write(self) -> None:
        kept.write(self.path, (asdict(self.records[key]) for key in sorted(self.records)))


def key_of(run: Run) -> str:
    """Names of the study's folder and of the run's."""
    return f"{run.settings.folder.name}/{run.folder.name}"


def settings_of(run: Run) -> str:
    """Twelve characters that change with what a run is told, but for where it runs and what it is resumed from."""
    places = (str(ROOT), str(run.settings.folder.parent))
    words = [word for word in run.command()[1:] if not word.startswith("--ckpt_path")]
    for place in sorted(places, key=len, reverse=True):
        words = [word.replace(place, "") for word in words]
    return hashlib.sha256(kept.known_as("\n".join(words)).encode()).hexdigest()[:12]


def start_of(run: Run) -> str:
    """Twelve characters that change with the weights of the policy it starts from; empty where they are no files."""
    policy = run.settings.policy
    folder = json.loads(policy)["init_args"]["policy"] if policy.startswith("{") else policy
    return _digest_of(tuple(sorted(Path(folder).glob("*.safetensors"))))


@cache
def _digest_of(files: tuple[Path, ...]) -> str:
    weights = hashlib.sha256()
    for file in files:
        weights.update(file.read_bytes())
    return weights.hexdigest()[:12] if files else ""


def long_steps(run: Run) -> list[list[float]] | None:
    """Rollout and largest ratio of each step that StepGuard told of, 0 if it knew none; None without a log."""
    steps = int(run.settings.options["model.init_args.steps_per_generation"])
    log = run.folder / "log.txt"
    if not log.is_file():
        return None
    told = dict(LONG_STEP.findall(log.read_text(encoding="utf-8")))  # an interrupted run may tell of a step again
    return [[int(step) / steps, float(ratio or 0)] for step, ratio in told.items()]


def binned(values: Sequence[float], middle: Callable[[Sequence[float]], float]) -> list[float]:
    """A curve of at most BINS points, each of an equal part of the values."""
    count = min(BINS, len(values))
    edges = [round(place * len(values) / count) for place in range(count + 1)] if count else [0]
    parts = [values[start:stop] for start, stop in pairwise(edges)]
    return [middle([v for v in part if not math.isnan(v)] or [math.nan]) for part in parts]


def late_median(values: Sequence[float]) -> float:
    """Median of the last quarter, which bears a k3 without bounds; NaN where nothing was measured."""
    late = values[-max(1, len(values) // 4) :]
    return statistics.median(math.inf if math.isnan(value) else value for value in late) if late else math.nan


def rounded(record: Record) -> Record:
    """The same with four digits, as its line is written."""

    def four(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: four(item) for name, item in value.items()}
        if isinstance(value, list):
            return [four(item) for item in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return replace(record, **{name: four(value) for name, value in asdict(record).items()})


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return statistics.fmean(known) if known else math.nan
