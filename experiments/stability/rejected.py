"""Who is rejected: kept and rejected sequences side by side, of the policy before training and of those after it.

    python -m experiments.stability.rejected [--jobs 2] [--save docs/measured]

Sparse-RL of `--studies again` under the tighter cache leaves a policy per seed in its last checkpoint. Each draws
512 sequences under that cache, and so does the policy that all began with. What is measured is a line in --kept, a file
of the repository, and is not measured again unless the code of its run has changed.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import ROOT
from benchmarks.common import kept
from benchmarks.common.pages import insert, mark
from benchmarks.common.tables import Table
from experiments.arms.runs import Run
from experiments.stability.outcomes import mean
from experiments.stability.studies import AGAIN, METHODS, SPARSE_RL, warmed
from experiments.stability.task import Sums, right_answer, right_steps
from sparse_rl_lightning.checkpoints.reading import read_checkpoint
from sparse_rl_lightning.compressors import SnapKV
from sparse_rl_lightning.corrections import consistency_log_ratio
from sparse_rl_lightning.modules import SparseGRPO
from sparse_rl_lightning.records import ScoredRollout
from sparse_rl_lightning.rollout import SamplingParams

PAGE = "stability.md"
STUDY = replace(AGAIN[1], arms=(SPARSE_RL,))
THRESHOLD = math.log(1e-4)  # of xi: below it a token rejects its sequence
LIMIT = 48  # tokens of a completion
BEFORE = "before training"
STEPS = 3  # of a solution, the last before the ``#``
COLUMNS = {
    "share": "{:.0%}", "tokens": "{:.1f}", "right answers": "{:.0%}", "right steps": "{:.0%}",
    "a step too many": "{:.0%}", "no answer": "{:.0%}", "rejected at a `;`": "{:.0%}",
}  # fmt: skip
"""What is told of kept and of rejected sequences; the last, of the first near-impossible token, of these alone."""


def drawn(policy: Path, checkpoint: Path | None, prompts: int = 64) -> ScoredRollout:
    """Sequences of a policy, with the weights of a checkpoint if there is one, under the tighter cache."""
    compressor = SnapKV(budget=STUDY.budget, **METHODS["SnapKV"]["init_args"])
    sampling = SamplingParams(num_generations=8, max_completion_length=LIMIT, seed=77)
    module = SparseGRPO(str(policy), compressor, [right_answer, right_steps], sampling=sampling)
    module.configure_model()
    if checkpoint is not None:
        module.load_state_dict(read_checkpoint(checkpoint)["state_dict"])
    return module.roll_out(Sums(num_train=prompts, seed=77).train_rows())


def described(scored: ScoredRollout) -> dict[str, dict[str, float]]:
    """Kept and rejected sequences in numbers: shares and means, and what the first near-impossible token is."""
    rollout, texts, (answers, steps) = scored.rollout, scored.completions, scored.reward_table.values()
    assert rollout.old_logprobs is not None
    log_ratio = consistency_log_ratio(rollout.old_logprobs, rollout.sparse_logprobs, rollout.completion_mask)
    low = [(own[mask] < THRESHOLD) for own, mask in zip(log_ratio, rollout.completion_mask, strict=True)]
    places = [int(own.int().argmax()) for own in low]  # of tokens, which are characters
    numbers = {
        "tokens": rollout.completion_mask.sum(dim=1).float(), "right answers": answers, "right steps": steps,
        "a step too many": torch.tensor([float(text.count(";") >= STEPS) for text in texts]),
        "no answer": torch.tensor([float("#" not in text) for text in texts]),
    }  # fmt: skip
    begins_a_step = [float(text[at : at + 1] == ";") for text, at in zip(texts, places, strict=True)]
    rejected = torch.stack([own.any() for own in low])
    told = {"kept": _means(numbers, ~rejected)}
    told["rejected"] = _means(numbers | {"rejected at a `;`": torch.tensor(begins_a_step)}, rejected)
    return told


def _means(numbers: Mapping[str, Tensor], chosen: Tensor) -> dict[str, float]:
    own = {name: float(value[chosen].mean()) for name, value in numbers.items()} if chosen.any() else {}
    return {"share": float(chosen.float().mean()), **own}


def measured(name: str, code: str, policy: str, checkpoint: str | None) -> dict[str, Any]:
    """A policy's line, in a process of its own."""
    torch.set_num_threads(1)
    return {"policy": name, "code": code, **described(drawn(Path(policy), Path(checkpoint) if checkpoint else None))}


def jobs(folder: Path, runs: Sequence[Run]) -> Iterator[tuple[str, str, str, str | None]]:
    """Name, code, folder of the policy that it began with, and checkpoint, of each policy that is there."""
    policy = str(warmed(folder, "warmup"))
    yield BEFORE, runs[0].code, policy, None
    ended = (run for run in runs if (run.folder / "course.json").is_file() and run.checkpoint.is_file())
    yield from ((f"seed {run.seed}", run.code, policy, str(run.checkpoint)) for run in ended)


def rejected_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """Kept and rejected sequences before training, and after it as means over the seeds."""
    table = Table("", ["", "sequences", *COLUMNS])
    groups = {BEFORE: [line for line in lines if line["policy"] == BEFORE]}
    groups[f"after training, {len(lines) - 1} seeds"] = [line for line in lines if line["policy"] != BEFORE]
    for name, own in groups.items():
        for part in ("kept", "rejected"):
            table.add(name, part, *(_cell([line[part] for line in own], *column) for column in COLUMNS.items()))
    return table


def _cell(own: Sequence[Mapping[str, float]], name: str, form: str) -> str:
    values = [one[name] for one in own if name in one]
    if len(values) < 2:
        return form.format(statistics.fmean(values)) if values else "–"
    return mean(values, 1) if name == "tokens" else mean(values, 0, percent=True)


def main() -> None:
    """Measure what is missing, and print or save the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kept.add_options(parser, "rejected", PAGE)
    parser.set_defaults(runs=ROOT / "runs" / "stability")
    args = parser.parse_args()
    lines, folder = {line["policy"]: line for line in kept.read(args.kept)}, args.runs.absolute()
    if not args.finished:
        runs = [run for seed in STUDY.seeds for run in STUDY.runs(seed, folder)]
        waiting = [job for job in jobs(folder, runs) if lines.get(job[0], {}).get("code") != job[1]]
        with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
            for done in as_completed([pool.submit(measured, *job) for job in waiting]):
                lines[done.result()["policy"]] = done.result()
                kept.write(args.kept, (lines[name] for name in sorted(lines)))
    text = rejected_table([lines[name] for name in sorted(lines)]).untitled
    print(text)
    if args.save:
        insert(args.save / PAGE, text, mark("experiments.stability.rejected", "who is rejected"))


if __name__ == "__main__":
    main()
