"""Accuracy against hours and memory: what runs on a GPU note beside what all do."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from benchmarks.common.tables import Table
from experiments.math.studies import CARD
from experiments.runner.outcomes import MISSING
from experiments.runner.records import Record, read_json
from experiments.runner.runs import Run
from experiments.runner.tables import Results
from sparse_rl_lightning.report.record import SUMMARY

STAGES = ("time/rollout", "time/rewards", "time/rescoring", "time/update")
PEAKS = ("memory/rollout_peak_bytes", "memory/update_peak_bytes")


@dataclass(frozen=True)
class Curve(Record):
    """A finished run, with what each evaluation had cost."""

    seconds: list[float] = field(default_factory=list)  # of training, until each evaluation
    peaks: list[float] = field(default_factory=list)  # bytes of the GPU, in rollouts and in the learner

    @classmethod
    def of(cls, run: Run) -> Curve:
        """Read off the run's own files."""
        record, rows = Record.of(run), read_json(run.folder / SUMMARY)["history"]
        spent = [0.0, *accumulate(sum(row.get(stage) or 0.0 for stage in STAGES) for row in rows)]
        seconds = [spent[min(int(each["rollouts"]), len(rows))] for each in record.evaluations]
        return cls(**vars(record), seconds=seconds, peaks=[max(row.get(p) or 0.0 for row in rows) for p in PEAKS])


def curves_table(results: Results) -> Table:
    """A row per arm, seed and evaluation."""
    table = Table("", ("", "seed", "rollouts", "minutes", "right", "rollouts, GiB", "learner, GiB"))
    for arm in CARD.arms:
        for seed, outcome in results.of(CARD, arm).items():
            line: Any = outcome.record
            memory = [f"{peak / 2**30:.2f}" if peak else MISSING for peak in line.peaks]
            for judged, spent in zip(line.evaluations, line.seconds, strict=True):
                right = f"{judged['dense']:.3f}"
                table.add(arm.label, str(seed), str(judged["rollouts"]), f"{spent / 60:.2f}", right, *memory)
    return table
