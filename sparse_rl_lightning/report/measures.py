"""Measures: how to find, format and compare the numbers of a run, and the summary text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparse_rl_lightning.report.record import ROUNDING, RunRecord
from sparse_rl_lightning.text import duration, number, percent, printable, size, table

CACHES = {"dense": "full cache", "sparse": "compressed cache"}

Find = Callable[[RunRecord], float | None]


@dataclass(frozen=True)
class Measure:
    """A number of a run: how to find it in a record, and to format it."""

    label: str
    find: Find
    write: Callable[[float], str]
    is_headline: bool = False  # also in the terminal and at the top of a page


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _mean(key: str) -> Find:
    return lambda record: record.mean(key)


def _median(key: str) -> Find:
    return lambda record: record.median(key)


def _late(key: str) -> Find:
    return lambda record: RunRecord(history=record.history[-max(1, len(record.history) // 10) :]).mean(key)


MEASURES = (
    Measure("reward, last tenth of the rollouts", _late("reward"), number),
    Measure("completion length, last tenth, tokens", _late("completions/mean_length"), lambda v: number(v, 1)),
    Measure("rejected sequences", _mean("rejection_rate"), percent, True),
    Measure("mismatch KL (k3), median, nats per token", _median("mismatch/kl_k3"), lambda v: number(v, 4), True),
    Measure("rounding KL (k3), median, nats per token", _median(ROUNDING), lambda v: f"{v:.1e}", True),
    Measure("acceptance, 5th percentile", _mean("acceptance/p05"), number),
    Measure("KV tokens saved at the end of a sequence", _mean("kv/saving_final"), percent, True),
    Measure("KV tokens saved over all decode steps", _mean("kv/saving_integral"), percent, True),
    Measure("peak KV memory", lambda record: record.maximum("kv/peak_bytes"), size),
    Measure("repeated 4-grams", _mean("completions/repetition_rate"), percent, True),
    Measure("rollout speed, median, tokens per second", _median("time/tokens_per_second"), _count, True),
    *(Measure(f"seconds per rollout, median, {stage}", _median(f"time/{stage}"), number)
      for stage in ("rollout", "rescoring", "rewards", "update")),
    Measure("held-out problems", lambda record: record.num_problems or None, _count),
    Measure("rollouts", lambda record: len(record.history), _count),
    Measure("optimizer steps", lambda record: record.steps or None, _count),
    Measure("time of training", lambda record: record.seconds or None, duration),
)  # fmt: skip


def greedy(records: Sequence[RunRecord]) -> list[Measure]:
    """Greedy results before and after training, by cache."""
    measured = "/".join(dict.fromkeys(record.measure for record in records))

    def measure(cache: str, name: str, moment: str) -> Measure:
        return Measure(f"greedy {measured}, {name}, {moment}", lambda r: getattr(r, moment).get(cache), number)

    return [measure(cache, name, moment) for cache, name in CACHES.items() for moment in ("before", "after")]


def facts(record: RunRecord) -> list[tuple[str, str]]:
    """Savings and costs of a run, as label and value, without those not measured."""
    values = [(measure, measure.find(record)) for measure in MEASURES if measure.is_headline]
    rows = [(measure.label, measure.write(value)) for measure, value in values if value is not None]
    used, full = record.maximum("kv/peak_bytes"), record.maximum("kv/full_peak_bytes")
    if used is not None and full:
        rows.insert(0, (f"peak KV memory, {size(used)} of a full cache's {size(full)}", percent(used / full)))
    length = f"{record.steps} optimizer steps, {len(record.history)} rollouts"
    return [*rows, (f"training, {length}", duration(record.seconds))]


def results(record: RunRecord) -> list[list[str]]:
    """Rows of the table of greedy results, header first; empty if nothing was evaluated."""
    caches = [cache for cache in CACHES if cache in record.before or cache in record.after]
    rows = [[CACHES[cache], number(record.before.get(cache)), number(record.after.get(cache))] for cache in caches]
    count = record.num_problems
    # 95 % of a share of 0.5, where it is widest
    interval = f", known to ±{1.96 * 0.5 / math.sqrt(count):.2f}" if record.measure == "accuracy" and count else ""
    return [[f"greedy {record.measure}, {count} held-out problems{interval}", "before", "after"], *rows] if rows else []


def summary_text(record: RunRecord) -> str:
    """The whole table: results before and after, savings, and a few completions, safe for any terminal."""
    parts = []
    rows = results(record)
    if rows:
        parts.append(table(rows, "lrr"))
    listed = facts(record)
    width = max(len(label) for label, _ in listed)
    parts.append("\n".join(f"{label.ljust(width)}  {value}" for label, value in listed))
    if record.samples:
        head = ["cache", "prompt", "completion", "reward"]
        body = [
            [s["cache"], printable(s["prompt"], 40), printable(s["completion"], 60), number(s["reward"], 2)]
            for s in record.samples
        ]
        parts.append(table([head, *body], "lllr"))
    return "\n\n".join(parts)
