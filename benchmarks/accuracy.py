"""What a compressed cache costs in right answers: GSM8K under seven methods at three budgets.

    python -m benchmarks.accuracy --data FOLDER [--cells full "RKV 192"] [--jobs 2] [--save docs/measured]

The policy is Qwen2.5-Coder-0.5B-Instruct (``make math-model``), the problems are the first 256 of GSM8K's test part
(``gsm8k_test.jsonl`` in FOLDER) in the paper's prompt, answers are greedy, in float32, of at most 512 tokens, and
judged strictly. A cell is ``sparse-rl test`` under one cache in a process of one thread; what has ended is a line in
``--kept``, with a verdict for every problem, and is not run again. ``--save`` writes the page from these lines.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import pyarrow.parquet as pq
import torch
import yaml

from benchmarks import CODER, ROOT
from benchmarks.common import kept
from benchmarks.common.pages import insert, mark, processor, say
from benchmarks.common.tables import Table
from sparse_rl_lightning import __version__
from sparse_rl_lightning.files import write_whole
from sparse_rl_lightning.metrics.intervals import mean, share
from sparse_rl_lightning.text import interval, percent

PAGE = "accuracy.md"
FULL = "full"
BUDGETS = (192, 256, 128)  # in the order in which they are worth having
METHODS: dict[str, dict[str, Any]] = {
    "RKV": {},
    "SnapKV": {},
    "H2O, by age": {"class_path": "H2O", "age_normalized": True},
    "TOVA": {},
    "ExpectedAttention": {},
    "VaSE": {"window": 64},
    "RandomEviction": {},
}
"""By how a method is called: the class, if that is another, and arguments beside the common sizes."""
SIZES = {"buffer": 32, "num_sinks": 4, "window": 8}
PROTECTED = ("RKV", "SnapKV", "H2O, by age", "RandomAttention")
EIGHT_BITS = "float8_e4m3fn"
MAX_LENGTH = 512
FORMAT = "qwen"


class Line(TypedDict):
    """What is kept of a cell; texts have a character per problem, ``1`` for yes."""

    cell: str
    right: str
    lenient: str
    finished: str
    lengths: list[int]
    kv_saved: float
    minutes: float
    policy: str  # SHA-256 of its weights
    machine: str


def cells() -> dict[str, tuple[dict[str, Any] | None, dict[str, Any]]]:
    """The cache and the options of rollouts of each cell, in the order in which they are worth having."""

    def cache(method: str, budget: int, **more: Any) -> dict[str, Any]:
        arguments = {"budget": budget, **SIZES, **METHODS.get(method, {}), **more}
        return {"class_path": arguments.pop("class_path", method), "init_args": arguments}

    opened = {f"{method} {budget}": (cache(method, budget), {}) for budget in BUDGETS for method in METHODS}
    protected = {
        f"{method} 256, prompt protected": (cache(method, 256, protect_prompt=True), dict[str, Any]())
        for method in PROTECTED
    }
    stored = {"kv_dtype": EIGHT_BITS}
    in_bytes = {f"{FULL}, float8": (None, stored), "RKV 192, float8": (cache("RKV", 192), stored)}
    return {FULL: (None, {}), **opened, **protected, **in_bytes}


def configuration(cell: str, policy: Path, data: Path, folder: Path, problems: int) -> dict[str, Any]:
    """The evaluation of a cell as ``sparse-rl test`` reads it."""
    cache, rollout = cells()[cell]
    pretrained = {"path": str(policy.absolute()), "dtype": "float32"}
    return {
        "seed_everything": 0,
        "model": {
            "class_path": "Evaluation",
            "init_args": {
                "policy": {"class_path": "PretrainedPolicy", "init_args": pretrained},
                "compressors": [cache] if cache else [],
                "dense": cache is None,
                "sampling": {"num_generations": 1, "max_completion_length": MAX_LENGTH, "temperature": 0.0},
                "rollout": {"num_slots": 128, **rollout},
                "batch_size": problems,
            },
        },
        "data": {
            "class_path": "MathBenchmarks",
            "init_args": {
                "folder": str(data.absolute()), "benchmarks": ["gsm8k"], "max_rows": problems, "prompt_format": FORMAT,
            },
        },
        "trainer": {
            "accelerator": "cpu", "default_root_dir": str(folder.absolute()), "logger": False,
            "enable_checkpointing": False, "enable_model_summary": False, "enable_progress_bar": False,
        },
    }  # fmt: skip


def measured(cell: str, policy: Path, sha256: str, data: Path, runs: Path, problems: int) -> Line | None:
    """The line of a cell, evaluated in a process of its own; None with a message if that has ended early."""
    folder = runs / cell.replace(", ", "-").replace(" ", "-")
    write_whole(folder / "test.yaml", yaml.safe_dump(configuration(cell, policy, data, folder, problems)))
    command = [sys.executable, "-m", "sparse_rl_lightning", "test", "--config", str(folder / "test.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "log.txt").open("w") as log:
        if subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False).returncode:
            say(f"{cell}: stopped, see {folder / 'log.txt'}")
            return None
    (result,) = json.loads((folder / "evaluation" / "results.json").read_text())
    (file,) = (folder / "evaluation").glob("*/gsm8k.parquet")
    answers: Mapping[str, list[Any]] = pq.read_table(file).to_pydict()
    return Line(
        cell=cell, right=_flags(answers["correct"]), lenient=_flags(answers["correct_lenient"]),
        finished=_flags(answers["finished"]), lengths=answers["length"], kv_saved=result["kv_saving_final"],
        minutes=result["seconds"] / 60, policy=sha256,
        machine=f"{datetime.date.today()}, {processor()}, 1 thread, torch {torch.__version__}, {__version__}",
    )  # fmt: skip


def _flags(values: list[bool]) -> str:
    return "".join(str(int(value)) for value in values)


# ---------------------------------------------------------------- the page


def table(lines: Mapping[str, Line]) -> str:
    """The cells that have ended, each beside the full cache."""
    header = ("cache", "right, %", "lost, won", "points behind", "length", "cut off", "KV saved")
    ended = [lines[cell] for cell in cells() if cell in lines]
    shown = Table("", header, f"{len(ended)} of {len(cells())} caches, on {' and '.join(_processors(ended))}.")
    for line in ended:
        right, places = _tensor(line["right"]), torch.arange(len(line["right"]))
        shown.add(
            line["cell"], interval(*share(right, places)), *_beside(lines.get(FULL), line),
            f"{statistics.fmean(line['lengths']):.0f}", percent(line["finished"].count("0") / len(right)),
            percent(line["kv_saved"]),
        )  # fmt: skip
    return shown.untitled


def _processors(lines: Iterable[Line]) -> list[str]:
    """What they were measured on, each once."""
    return sorted({line["machine"].split(", ")[1] for line in lines})


def _tensor(flags: str) -> torch.Tensor:
    return torch.tensor([float(flag) for flag in flags])


def _beside(full: Line | None, line: Line) -> tuple[str, str]:
    """Problems lost and won against the full cache, and the points in between with their 95 % interval."""
    if full is None or line["cell"] == FULL:
        return "", ""
    before, after = _tensor(full["right"]), _tensor(line["right"])
    value, low, high = mean(100 * (before - after), torch.arange(len(before)))
    return f"{int((before > after).sum())}, {int((before < after).sum())}", f"{value:.1f} ± {(high - low) / 2:.1f}"


def main(args: list[str] | None = None) -> None:
    """Evaluate the cells that are not finished, and write the page."""
    parser = kept.parser_of(__doc__, "accuracy", PAGE)
    parser.add_argument("--data", type=Path, help="folder with gsm8k_test.jsonl")
    parser.add_argument("--policy", type=Path, default=CODER)
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--cells", nargs="+", choices=list(cells()), default=list(cells()), metavar="CELL")
    options = parser.parse_args(args)
    lines: dict[str, Line] = {row["cell"]: row for row in kept.read(options.kept)}  # type: ignore[misc]  # as written
    if any(len(line["right"]) != options.problems for line in lines.values()):
        parser.error(f"{options.kept} has lines of another number of problems: give that, or another file")
    waiting = [] if options.finished else [cell for cell in options.cells if cell not in lines]
    if waiting and options.data is None:
        parser.error("--data: the folder of gsm8k_test.jsonl is needed for what is not measured yet")
    weights = options.policy / "model.safetensors"
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest() if waiting else ""
    if waiting and any(line["policy"] != sha256 for line in lines.values()):
        parser.error(f"{options.kept} has lines of another policy than {options.policy}: give another file")
    run = partial(
        measured, policy=options.policy, sha256=sha256, data=options.data, runs=options.runs, problems=options.problems
    )
    pool = ThreadPoolExecutor(options.jobs)
    try:
        for done in as_completed([pool.submit(run, cell) for cell in waiting]):
            if line := done.result():
                lines[line["cell"]] = line
                kept.write(options.kept, [lines[cell] for cell in cells() if cell in lines])
                say(f"{line['cell']}: {line['right'].count('1')} right, {line['minutes']:.0f} min")
    finally:  # Ctrl-C too: what waits is not begun
        pool.shutdown(cancel_futures=True)
    print(table(lines))
    if options.save:
        insert(options.save / PAGE, table(lines), mark("benchmarks.accuracy"))


if __name__ == "__main__":
    main()
