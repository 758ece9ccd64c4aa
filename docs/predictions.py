"""What memory the shipped recipes and the configurations by card should take: predictions of ``sparse-rl plan``."""

from __future__ import annotations

import json
import re
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from benchmarks.common.tables import Table
from sparse_rl_lightning.cli.plan import job_of, main
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.planning import Card, Plan, card_of, make_plan
from sparse_rl_lightning.planning.blueprint import empty_model
from sparse_rl_lightning.planning.memory import slot_size
from sparse_rl_lightning.planning.plan import gigabytes

CONFIGS = Path(__file__).parents[1] / "configs"
RECIPES = (
    "llama-3.2-1b-instruct", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b",
    "sparrow/qwen3-1.7b", "sparrow/qwen3-4b", "sparrow/qwen3-8b", "sparrow/qwen3-14b",
)  # fmt: skip
AGAIN = {
    False: "", "selective": ", selective checkpointing", True: ", checkpointing",
    "offload": ", offloaded checkpointing",
}  # fmt: skip
CARDS = Path(__file__).with_name("cards.yaml")
LENGTH = 16384  # of sequences, in configurations by card
COLUMNS = (
    "model", "card", "trains", "budget", "slots", "cache GB", "full cache", "learner", "peak GB", "rollout", "learning",
    "hours",
)  # fmt: skip
LARGE, SMALL = card_of("h200-141gb"), card_of("h100-80gb")


@cache
def plan_of(name: str, card: Card = LARGE) -> Plan:
    """The plan of a shipped configuration."""
    return make_plan(job_of(["--config", str(CONFIGS / f"{name}.yaml")]), card)


def recipe_tables() -> str:
    """Memory of all recipes, as Markdown."""
    header = (
        "configuration", "GPUs", "parameters", "weights, gradients, optimizer", "reference", "copies", "slots",
        "their cache", "with a full cache", "learner", "peak", "of 141 GB", "with `beta: 0`, of 80 GB",
    )  # fmt: skip
    return Table("", header, rows=[memory_row(plan_of(name), name) for name in RECIPES]).untitled


def memory_row(plan: Plan, name: str) -> tuple[str, ...]:
    """Gigabytes (1e9 bytes) per GPU."""
    job, shard = plan.job, plan.job.sharding
    count = sum(parameter.numel() for parameter in empty_model(job.blueprint, job.dtype).parameters())
    full = slot_size(replace(job, compressor=FullKV(), retriever=None)).of(plan.slots)
    parts = plan.of("weights") + plan.of("gradients") + plan.of("optimizer"), plan.of("reference"), plan.of("copies")
    smaller = plan.peak - 1.05 * plan.of("reference")
    return (
        f"`{name}.yaml`", f"{shard.ranks}, stage {shard.stage}" if shard.stage else "1", f"{count / 1e9:.2f} B",
        *map(gigabytes, parts), str(plan.slots), gigabytes(plan.of("cache")), gigabytes(full),
        gigabytes(plan.of("activations")), gigabytes(plan.peak), f"{plan.peak / LARGE.memory:.0%}",
        f"{smaller / SMALL.memory:.0%}",
    )  # fmt: skip


def one_card_file() -> str:
    """The file for one card, as it is shipped."""
    return f"```yaml\n{(CONFIGS / 'one_card.yaml').read_text('utf-8')}```"


def cards_table() -> str:
    """The configurations by card, as they were predicted last."""
    return Table("", COLUMNS, rows=[tuple(row) for row in kept_cards()]).untitled


def kept_cards() -> list[list[str]]:
    """The rows of the table, model and memory first."""
    rows: list[list[str]] = yaml.safe_load(CARDS.read_text("utf-8"))
    return rows


def figures(plan: str) -> list[str]:
    """Peak, the cache and a full one in GB, the time of a rollout and of learning from it, and hours, by a plan."""
    patterns = (
        r"Fits: ([\d.]+) GB", r"The cache of .* takes ([\d.]+) GB, a full cache would take ([\d.]+) GB",
        r".* tokens: rollout (.*), rescoring .*, learner (.*);$", r".* ([\d.]+) hours for all",
    )  # fmt: skip
    values: list[str] = []
    for pattern in patterns:
        match = re.search(rf"^(?:# )?{pattern}", plan, re.MULTILINE)
        assert match, pattern
        values += match.groups()
    return values


def card_row(model: str, memory: str, path: Path) -> list[str]:
    """Have a configuration written for a model and a card, and return what it sets and what is predicted of it."""
    with redirect_stdout(StringIO()):
        main(["--model", model, "--memory", memory, "--length", str(LENGTH), "--output", str(path)])
    job = job_of(["--config", str(path)])
    peak, *caches, rollout, learning, hours = figures(path.read_text("utf-8"))
    trains, bits = "all weights" if job.blueprint.adapters is None else "adapters", job.blueprint.quantization
    again, rows = AGAIN[job.learner.gradient_checkpointing], job.micro_batch.rows
    return [
        model, memory, f"{trains} on {bits}" if bits else trains, str(job.compressor.schedule.plain),
        str(job.rollout.num_slots), *caches, f"{rows} at a time{again}", peak, rollout, learning, hours,
    ]  # fmt: skip


if __name__ == "__main__":  # predict all again: a quarter of an hour
    with TemporaryDirectory() as folder:
        rows = [card_row(*row[:2], Path(folder) / f"{number}.yaml") for number, row in enumerate(kept_cards())]
    head = "".join(line for line in CARDS.read_text("utf-8").splitlines(keepends=True) if line.startswith("#"))
    CARDS.write_text(head + "".join(f"- {json.dumps(row)}\n" for row in rows), "utf-8")
