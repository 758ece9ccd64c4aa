"""Tables of one page that quote the measured tables of others, so that a new measurement changes both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.tables import Table
from benchmarks.compressors import records
from benchmarks.compressors.pages import ACCURACY, HALF, SPEED, TAIL, by_budget
from benchmarks.rollout.modeled import Steps, modeled

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "benchmarks" / "results"
COMPARED = (
    "FullKV", "RandomEviction", "StreamingLLM", "KeyDiff", "CUR", "LagKV", "TOVA", "SnapKV", "RKV",
    "Combined SnapKV and KeyDiff",
)  # fmt: skip
TASKS = ("sums", "reductions", "countdown")
Row = dict[str, str]


def measured(page: str, heading: str = "Measured") -> list[Row]:
    """The rows of the first table below a heading, cells by the column's title; the first column's may be empty."""
    behind = re.split(rf"^#+ {re.escape(heading)}$", (FOLDER / page).read_text("utf-8"), flags=re.MULTILINE)[1]
    section = re.split(r"^#", behind, maxsplit=1, flags=re.MULTILINE)[0]
    table = re.search(r"^\|.*(?:\n\|.*)+", section, re.MULTILINE)
    if table is None:
        raise ValueError(f"there is no table below {heading} in docs/{page}.")
    titles, _, *rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in _padded(table[0])]
    return [dict(zip(titles, row, strict=True)) for row in rows]


def _padded(text: str) -> list[str]:
    """Lines whose empty cells are spelled, so that they can be split."""
    return [re.sub(r"\|\s*(?=\|)", "| – ", line) for line in text.splitlines()]


def columns(rows: Sequence[Row], head: Sequence[str], note: str = "") -> str:
    """Some columns of measured rows."""
    return Table("", head, note, rows=[tuple(row[name] for name in head) for row in rows]).untitled


def some_columns(page: str, heading: str, *head: str) -> str:
    """Some columns, or all, of a page of results."""
    rows = measured(f"../benchmarks/results/{page}.md", heading)
    return columns(rows, head or tuple(rows[0]))


def accuracy_table() -> str:
    """Right answers of a real model by cache, in brief."""
    head = ("cache", "right, %", "lost, won", "points behind", "KV saved")
    return columns(measured("measured/accuracy.md"), head)


def compressors_table() -> str:
    """Some compressors by accuracy, tail and cost at half of the length, where they differ most."""
    kept = records.read(RESULTS / "compressors.jsonl")
    table = Table("", ("compressor", *TASKS, "stories, tail", "stories, events per second"))
    for name in COMPARED:
        halves = {task: by_budget(kept[task].qualities, name, protected=False)[HALF] for task in (*TASKS, "stories")}
        accuracies = (ACCURACY.text(halves[task]) for task in TASKS)
        table.add(name, *accuracies, TAIL.text(halves["stories"]), SPEED.text(halves["stories"]))
    return table.untitled


def memory_table() -> str:
    """What the full and a compressed cache generate in the same memory, and how much that is."""
    page = "../benchmarks/results/equal-memory-cpu.md"
    (note,) = re.findall(r"^## Equal memory\n\n(.+)$", (FOLDER / page).read_text("utf-8"), re.MULTILINE)
    head = ("cache", "sequences in flight", "tokens/s", "times as fast", "sequences per hour")
    return columns(measured(page, "Equal memory"), head, note)


def gpu_larger_table() -> str:
    """Whole rollouts of larger models, for which the full cache was too large."""
    table = Table("", ("model", "cache", "tokens/s", "share of all slots' steps", "KV GB"))
    for model in ("Qwen3-1.7B", "Qwen3-4B"):
        rows = measured(f"../benchmarks/results/gpu-whole-{model.lower()}.md", f"Whole rollouts, {model}")
        for row in rows:
            if row["tokens/s"] != "–":
                table.add(model, row["cache"], row["tokens/s"], row["share of steps alone"], row["KV GB"])
    return table.untitled


def gpu_modeled_table() -> str:
    """Whole rollouts that were not timed, added up from measured steps."""
    cells = measured("../benchmarks/results/gpu-cells-1.5b.md", "Steps at given lengths")
    many = measured("../benchmarks/results/gpu-memory.md", "Equal memory: 40 GB, Qwen2.5-1.5B, length 16,384")
    return modeled(Steps.of([*cells, *({**row, "batch": row["slots"], "length": "0"} for row in many[1:])])).untitled


def gpu_cells_table() -> str:
    """Steps at given lengths on a GPU, beside the least time that memory and arithmetic need."""
    rows = measured("../benchmarks/results/gpu-cells-1.5b.md", "Steps at given lengths")
    head = ("batch", "length", "cache", "ms per step", "share of the floor", "times as fast as FullKV")
    return columns([row for row in rows if row["tokens/s"] != "–"], head)


def trainer_table() -> str:
    """Whole training steps beside TRL's, by the number of tokens."""
    head = ("trainer", "s per step", "rollout", "rescoring", "update", "times as fast as TRL")
    rows: list[tuple[str, ...]] = []
    for tokens, title in (
        ("48", "48 new tokens"), ("512", "512 new tokens"), ("1,024", "1,024 new tokens"),
        ("256 after a prompt of 1,024", "256 new tokens behind prompts of 1,024"),
    ):  # fmt: skip
        measured_rows = measured("../benchmarks/results/trainer-cpu.md", title)
        rows += [(tokens, *(row[name] for name in head)) for row in measured_rows if row["trainer"] != "plain loop"]
    return Table("", ("new tokens", *head), rows=rows).untitled
