"""What is kept of a finished run: a line of JSON, small enough to be committed, enough for every table and picture."""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import kept
from benchmarks.common.pages import machine
from experiments.runner.runs import NOTES, Run

BINS = 24  # points of a curve
LONG_STEP = re.compile(
    r"gradient of optimizer step (\d+) is [\d,]+ times as long as usual(?:.*? ratio \D*([\d.e+-]*\d))?"
)
SPIKE = 1.0  # a gradient's norm that the quickstart's clip cuts
COMPRESSION, ROUNDING = "mismatch_split/compression/kl_k3", "mismatch_split/rounding/kl_k3"


@dataclass(frozen=True)
class Record:
    """A finished run in numbers."""

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
    def of(cls, run: Run) -> Record:
        """Read off the run's own files."""
        course, report = (read_json(run.folder / name) for name in (NOTES, "summary.json"))
        history, summary, splits = report["history"], report["summary"], course["splits"]
        norms = [norm for norm in course["grad_norms"] if math.isfinite(norm)]
        rejected = _column(history, "rejection_rate")
        curves = {
            **{name: binned(_column(history, name), statistics.fmean) for name in ("rollout", "reward")},
            "rejection_rate": binned(rejected, statistics.fmean),
            "length": binned(_column(history, "completions/mean_length"), statistics.fmean),
            "largest_ratio": binned(course["ratios"], max),
            "largest_norm": binned(course["grad_norms"], max),
        }
        return cls(
            run.key, run.settings_hash,
            machine("cuda" if run.settings.options.get("trainer.accelerator") == "gpu" else "cpu"),
            course["evaluations"], curves,
            p05=late_median(logged(run.folder, "acceptance/p05")) if run.arm.evicts else 1.0,
            k3=late_median([row[COMPRESSION] for row in splits]) if run.arm.evicts else 0.0,
            rounding=max((row[ROUNDING] for row in splits if math.isfinite(row.get(ROUNDING, math.nan))), default=0.0),
            rejected=_mean(rejected), clipped=_mean(course["clipped"]),
            saved=summary["kv_saving_final"], largest_ratio=max(course["ratios"]),
            spikes=sum(norm > SPIKE for norm in norms) / max(1, len(norms)),
            minutes=(summary["wall_time_seconds"] - course["seconds"]) / 60,
            long_steps=long_steps(run), code=run.code, start=run.start,
        )  # fmt: skip

    def end(self, cache: str, last: int) -> float:
        """Mean accuracy of the last evaluations; the cache is ``dense`` or a budget."""
        return statistics.fmean(row[cache] for row in self.evaluations[-last:])


class Archive:
    """The lines in a file, and in those beside it of studies that are kept apart; a run that has one is not run again.

    Args:
        path: The file.
        line: What a line is: a dataclass with an ``of`` that reads it off a run's own files.
        apart: Endings of the names of the files, that of the first is empty.
    """

    def __init__(self, path: Path, line: Any = Record, apart: Iterable[str] = ("",)) -> None:
        self.line = line
        self.paths = {name: path.with_stem("_".join(filter(None, (path.stem, name)))) for name in apart}
        self.records: dict[tuple[str, str], Any] = {
            (name, row["key"]): line(**row) for name, file in self.paths.items() for row in kept.read(file)
        }
        self._admitted = set[tuple[str, str]]()

    def admit(self, runs: Sequence[Run]) -> None:
        """Let records of other code count, to show what there is, if none of these runs has one of today's.

        So no table mixes runs with one reward, task or compressor and runs with another.
        """
        if not any(map(self.of, runs)):
            self._admitted.update(map(name_of, runs))

    def of(self, run: Run) -> Any:
        """The run's line, from its own files where it has just ended; None if there is none."""
        name = name_of(run)
        record = self.records.get(name)
        if record is not None and not self._counts(name, run):
            record = None
        if record is None and run.is_finished:
            record = self.records[name] = self.line(**rounded(asdict(self.line.of(run))))
            lines = [self.records[key] for key in sorted(self.records) if key[0] == name[0]]
            kept.write(self.paths[name[0]], map(asdict, lines))
        return record

    def _counts(self, name: tuple[str, str], run: Run) -> bool:
        record = self.records[name]
        return record.settings == run.settings_hash and (name in self._admitted or record.code == run.code)

    def is_of_other_code(self, run: Run) -> bool:
        """Whether there is a record of the run with these settings, but of other code than there is now."""
        record = self.records.get(name_of(run))
        return record is not None and record.settings == run.settings_hash and record.code != run.code

    def other_starts(self, runs: Sequence[Run]) -> set[str]:
        """Weights that kept runs of the same studies began from, and these would not."""
        places = {(apart, key.partition("/")[0]) for apart, key in map(name_of, runs)}
        starts = {
            record.start for (apart, key), record in self.records.items() if (apart, key.partition("/")[0]) in places
        }
        return starts - {"", *(run.start for run in runs)}


def name_of(run: Run) -> tuple[str, str]:
    """What a run's line is found by: what it is kept apart under, and its key."""
    return run.settings.apart, run.key


def read_json(path: Path) -> Any:
    """The content of a file of JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def _column(history: Sequence[dict[str, Any]], name: str) -> list[float]:
    """One number per rollout."""
    return [math.nan if row.get(name) is None else row[name] for row in history]


def logged(folder: Path, name: str) -> list[float]:
    """What a run's logger has of a number, step by step.

    A resumed run has several files, and a later one says again what its checkpoint had not yet.
    """
    files = sorted(folder.rglob("version_*/metrics.csv"), key=lambda path: int(path.parent.name[8:]))
    rows = [row for path in files for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines())]
    values = {int(row["step"]): float(row[name]) for row in rows if row.get(name)}
    return [values[step] for step in sorted(values)]


def long_steps(run: Run) -> list[list[float]] | None:
    """Rollout and largest ratio of each step that StepGuard told of, 0 if it knew none; None without a log."""
    log = run.folder / "log.txt"
    if not log.is_file():
        return None
    steps = int(run.settings.options["model.init_args.steps_per_generation"])
    warnings = dict(LONG_STEP.findall(log.read_text(encoding="utf-8")))  # an interrupted run may tell of a step again
    return [[int(step) / steps, float(ratio or 0)] for step, ratio in warnings.items()]


def binned(values: Sequence[float], middle: Callable[[Sequence[float]], float]) -> list[float]:
    """A curve of at most BINS points, each of an equal part of the values."""
    count = min(BINS, len(values))
    edges = [round(number * len(values) / count) for number in range(count + 1)] if count else [0]
    bins = [[v for v in values[start:stop] if not math.isnan(v)] for start, stop in pairwise(edges)]
    return [middle(measured or [math.nan]) for measured in bins]


def late_median(values: Sequence[float]) -> float:
    """Median of the last quarter, which bears a k3 without bounds; NaN where nothing was measured."""
    late = values[-max(1, len(values) // 4) :]
    return statistics.median(math.inf if math.isnan(value) else value for value in late) if late else math.nan


def rounded(value: Any) -> Any:
    """The same with four digits, as lines are written."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan
