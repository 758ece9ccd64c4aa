"""Who is rejected: kept and rejected sequences side by side, of the policy before training and of those after it.

    python -m experiments.stability.rejected [--jobs 2] [--finished]

Sparse-RL of `--studies again` under the tighter cache leaves a policy per seed in its last checkpoint. Each draws
512 sequences under that cache, and so does the policy that all began with. What is measured is a line in --kept, a file
of the repository, and is not measured again unless the code of its run has changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import ROOT
from benchmarks.common import kept
from benchmarks.common.tables import Table
from experiments.runner.outcomes import MISSING
from experiments.runner.probes import Lines, probe
from experiments.runner.runs import NOTES, SPARSE_RL, warmed
from experiments.runner.studies import Where, planned
from experiments.stability.studies import AGAIN, METHODS
from experiments.stability.task import Sums, right_answer, right_steps
from sparse_rl_lightning.checkpoints.reading import read_checkpoint
from sparse_rl_lightning.compressors import SnapKV
from sparse_rl_lightning.corrections import consistency_log_ratio
from sparse_rl_lightning.modules import SparseGRPO
from sparse_rl_lightning.records import ScoredRollout
from sparse_rl_lightning.rollout import SamplingParams

STUDY = replace(AGAIN[1], arms=(SPARSE_RL,))
STEPS = 3  # of a solution, the last before the ``#``


def measured(policy: str, code: str, folder: Path, checkpoint: Path | None) -> Lines:
    """A policy's line, in a process of its own."""
    torch.set_num_threads(1)
    return [{"policy": policy, "code": code, **described(drawn(folder, checkpoint))}]


def drawn(folder: Path, checkpoint: Path | None) -> ScoredRollout:
    """Sequences of a policy under the tighter cache, with the weights of a checkpoint if there is one."""
    compressor = SnapKV(budget=STUDY.budget, **METHODS["SnapKV"]["init_args"])
    sampling = SamplingParams(num_generations=8, max_completion_length=48, seed=77)
    module = SparseGRPO(str(folder), compressor, [right_answer, right_steps], sampling=sampling)
    module.configure_model()
    if checkpoint is not None:
        module.load_state_dict(read_checkpoint(checkpoint)["state_dict"])
    return module.roll_out(Sums(num_train=64, seed=77).train_rows())


def described(scored: ScoredRollout) -> dict[str, dict[str, float]]:
    """Kept and rejected sequences in numbers: shares and means, and what the first near-impossible token is."""
    rollout, texts, (answers, steps) = scored.rollout, scored.completions, scored.reward_table.values()
    assert rollout.old_logprobs is not None
    log_ratio = consistency_log_ratio(rollout.old_logprobs, rollout.sparse_logprobs, rollout.completion_mask)
    # of xi: below 1e-4 a token rejects its sequence
    low = [(row[mask] < math.log(1e-4)) for row, mask in zip(log_ratio, rollout.completion_mask, strict=True)]
    places = [int(row.int().argmax()) for row in low]  # of tokens, which are characters
    numbers = {
        "tokens": rollout.completion_mask.sum(dim=1).float(), "right answers": answers, "right steps": steps,
        "a step too many": torch.tensor([float(text.count(";") >= STEPS) for text in texts]),
        "no answer": torch.tensor([float("#" not in text) for text in texts]),
    }  # fmt: skip
    begins_a_step = [float(text[at : at + 1] == ";") for text, at in zip(texts, places, strict=True)]
    rejected = torch.stack([row.any() for row in low])
    return {
        "kept": _means(numbers, ~rejected),
        "rejected": _means(numbers | {"rejected at a `;`": torch.tensor(begins_a_step)}, rejected),
    }


def _means(numbers: Mapping[str, Tensor], chosen: Tensor) -> dict[str, float]:
    means = {name: float(value[chosen].mean()) for name, value in numbers.items()} if chosen.any() else {}
    return {"share": float(chosen.float().mean()), **means}


def policies(folder: Path) -> dict[str, tuple[str, Path | None]]:
    """Code and checkpoint of the policy that all began with, and of those that are there."""
    runs = planned([STUDY], Where(folder))
    ended = [run for run in runs if (run.folder / NOTES).is_file() and run.checkpoint.is_file()]
    trained = {f"seed {run.seed}": (run.code, run.checkpoint) for run in ended}
    return {"before training": (runs[0].code, None), **trained}


def table(lines: Lines) -> Table:
    """Kept and rejected sequences of every policy."""
    heads = list(dict.fromkeys(name for line in lines for name in (*line["kept"], *line["rejected"])))
    result = Table("", ["", "sequences", *heads])
    for line in lines:
        for fate in ("kept", "rejected"):
            cells = [f"{line[fate][name]:.3g}" if name in line[fate] else MISSING for name in heads]
            result.add(line["policy"], fate, *cells)
    return result


def main() -> None:
    """Measure what is missing, and print every line."""
    parser = kept.parser_of(__doc__, "rejected")
    parser.set_defaults(runs=ROOT / "runs" / "stability")
    args = parser.parse_args()
    lines = kept.read(args.kept)
    if not args.finished:
        folder = args.runs.absolute()
        codes = {line["policy"]: line["code"] for line in lines}
        waiting = {name: policy for name, policy in policies(folder).items() if codes.get(name) != policy[0]}
        lines = [line for line in lines if line["policy"] not in waiting]
        start = warmed(folder, STUDY.warmed_by)
        jobs = [partial(measured, name, code, start, checkpoint) for name, (code, checkpoint) in waiting.items()]
        probe(jobs, lines, args.kept, args.jobs)
    print(table(lines).untitled)


if __name__ == "__main__":
    main()
