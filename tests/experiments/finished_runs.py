"""The files of a finished run in round numbers, as a process of its own would have left them."""

from __future__ import annotations

import json

from experiments.runner.records import COMPRESSION, ROUNDING
from experiments.runner.runs import CODE, NOTES, Run


def write(run: Run, end: float = 0.5, before: float = 0.2) -> None:
    """One that ends at an accuracy with the full cache and at half of it with the compressed one."""
    rows = [
        {"rollouts": 10 * place, "dense": value, **{str(budget): value / 2 for budget in run.budgets}}
        for place, value in enumerate((before, 0.3, end, end, end))
    ]
    course = {
        "evaluations": rows if run.settings.every_n_rollouts else rows[-1:],
        "splits": [{"rollouts": i, COMPRESSION: 9.0 if i < 9 else 0.5, ROUNDING: 1e-12} for i in range(12)],
        "unused": [0.0], "clipped": [0.0, 0.02], "ratios": [1.0] * 79 + [50.0],
        "grad_norms": [0.5] * 60 + [2.0] * 20, "seconds": 30.0,
    }  # fmt: skip
    history = [
        {"rollout": i, "reward": 0.1 * i, "rejection_rate": 0.1, "completions/mean_length": 90.0} for i in range(40)
    ]
    summary = {"wall_time_seconds": 150.0, "kv_saving_final": 0.25}
    for version in (2, 10):  # the run was interrupted: its logger has two files, and the second repeats some steps
        folder = run.folder / "runs" / f"version_{version}"
        folder.mkdir(parents=True)
        steps = range(12) if version == 2 else range(8, 16)
        lines = "".join(f"{step},{version * 0.09 if step % 2 else ''}\n" for step in steps)
        (folder / "metrics.csv").write_text(f"step,acceptance/p05\n{lines}", encoding="utf-8")
    (run.folder / CODE).write_text(run.code, encoding="utf-8")
    (run.folder / NOTES).write_text(json.dumps(course), encoding="utf-8")
    (run.folder / "summary.json").write_text(json.dumps({"history": history, "summary": summary}), encoding="utf-8")
