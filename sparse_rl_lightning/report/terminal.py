"""A run's end as text for a terminal."""

from __future__ import annotations

from sparse_rl_lightning.report.record import RunRecord
from sparse_rl_lightning.text import DASH, duration, number, percent, printable, size, table

CACHES = {"dense": "full cache", "sparse": "compressed cache"}


def facts(record: RunRecord) -> list[tuple[str, str]]:
    """What the run saved and cost, as label and value; what was not measured is left out."""
    s = record.summary()
    used, full, speed = s["kv_peak_bytes"], s["kv_full_peak_bytes"], s["tokens_per_second"]
    candidates = [
        ("KV tokens saved at the end of a sequence", percent(s["kv_saving_final"])),
        ("KV tokens saved over all decode steps", percent(s["kv_saving_integral"])),
        (f"peak KV memory, {size(used)} of a full cache's {size(full)}", percent(used / full) if full else DASH),
        ("rejected sequences", percent(s["rejection_rate"])),
        ("mismatch KL (k3), nats per token", number(s["mismatch_kl_k3"], 4)),
        ("repeated 4-grams", percent(s["repetition_rate"])),
        ("rollout speed", DASH if speed is None else f"{speed:,.0f} tokens/s"),
        (f"training, {record.steps} optimizer steps, {len(record.history)} rollouts", duration(record.seconds)),
    ]
    return [(label, value) for label, value in candidates if value != DASH]


def results(record: RunRecord) -> list[list[str]]:
    """Rows of the table of greedy results, header first; no rows where nothing was evaluated."""
    caches = [cache for cache in CACHES if cache in record.before or cache in record.after]
    rows = [[CACHES[cache], number(record.before.get(cache)), number(record.after.get(cache))] for cache in caches]
    return [[f"greedy {record.measure}, {record.num_problems} held-out problems", "before", "after"], *rows] * bool(
        rows
    )


def summary_text(record: RunRecord, sample_width: int = 60) -> str:
    """The whole table: results before and after, what was saved, and a few completions, safe for any terminal."""
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
            [s["cache"], printable(s["prompt"], 40), printable(s["completion"], sample_width), number(s["reward"], 2)]
            for s in record.samples
        ]
        parts.append(table([head, *body], "lllr"))
    return "\n\n".join(parts)
