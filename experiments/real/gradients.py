"""Where compressed rollouts push the real model: gradients of each correction beside the full cache's.

    python -m experiments.real.gradients [--chunks 16] [--jobs 2] [--save docs/measured]

As ``experiments.gradients`` with the model and task of ``experiments.real``, at fixed weights: before training, and
after dense training in a seed of its own, under both budgets of the study, 512 samples each. What is measured is a line
in --kept and is not measured again.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks import REAL
from benchmarks.common import kept
from benchmarks.common.pages import insert, mark
from benchmarks.common.tables import Table
from experiments.gradients.__main__ import PAGE, measure, missing
from experiments.gradients.jobs import Job
from experiments.gradients.measure import FULL, Samples
from experiments.gradients.page import COMPARED, estimated, only
from experiments.gradients.snapshots import exporting
from experiments.gradients.variants import VARIANTS, Variant
from experiments.real.results import slot
from experiments.real.studies import DENSE, HALF, MAIN, METHODS, QUARTER
from experiments.real.task import Stories, story_reward
from sparse_rl_lightning.compressors import Compressor, SnapKV
from sparse_rl_lightning.learner.forward import LearnerOptions
from sparse_rl_lightning.modules import SparseGRPO
from sparse_rl_lightning.policies import LoraPolicy
from sparse_rl_lightning.records import Rows

BEFORE, AFTER = WEIGHTS = ("before training", "after dense training")
CASES = (("SnapKV", HALF), ("SnapKV", QUARTER))
SEED = 19  # of the dense training, no seed of the study


@dataclass(frozen=True)
class StorySamples(Samples):
    """Stories of the real model, in the precision of its training."""

    prompts: int = 4
    parts: int = 1
    task: str = "stories"

    variants: ClassVar[tuple[Variant, ...]] = tuple(one for one in VARIANTS if one.name in COMPARED)

    def problems(self, count: int) -> Rows:
        """So many prompts."""
        return Stories(num_train=count, seed=self.seed).train_rows()

    def compressor(self, method: str, budget: int) -> Compressor:
        """The study's."""
        assert method == "SnapKV"
        return SnapKV(budget=budget, **METHODS[method]["init_args"])

    def module(self, policy: str, compressor: Compressor) -> SparseGRPO:
        """With fresh adapters, as at the start of a run."""
        adapted, learner = LoraPolicy(policy, r=16, seed=self.seed), LearnerOptions(share_prompts=True)
        return self._module(adapted, compressor, [story_reward], 96, learner=learner)

    def precision(self) -> torch.autocast:
        """That of training."""
        return torch.autocast("cpu", torch.bfloat16)


def trained(folder: Path, policy: Path) -> Path:
    """The policy after dense training; trains it if it has not been."""
    (run,) = replace(MAIN[0], arms=(DENSE,), seeds=(SEED,), judged=()).runs(SEED, folder, policy)
    rollouts = MAIN[0].recipe.rollouts
    own = exporting(run, every_n_rollouts=rollouts)
    if not own.execute():
        sys.exit(f"error: the dense training has not ended, see {own.folder / 'log.txt'}")
    shutil.rmtree(own.checkpoint.parent, ignore_errors=True)
    return own.folder / "policies" / f"{rollouts:04d}"


def table(lines: Sequence[dict[str, Any]]) -> Table:
    """Cosine and length of every variant's gradient by policy and budget, and what the rollouts were like."""
    places = [(weights, *case) for weights in WEIGHTS for case in CASES]
    found = {place: only(lines, weights=place[0], method=place[1], budget=place[2]) for place in places}
    found = {place: own for place, own in found.items() if own}
    result = Table("", ["", *(f"{weights}, {slot(budget)}" for weights, _, budget in found)])
    for variant in COMPARED:
        own = [only(lines, variant=variant) for lines in found.values()]
        result.add(variant, *(f"{estimated(one, 'cosine')} · {estimated(one, 'length')}" for one in own))
    rows = [(only(own, variant="naive")[0], only(own, variant=FULL)[0]) for own in found.values()]
    result.add("sequences rejected · k3", *(f"{naive['rejected']:.1%} · {naive['k3']:.2g}" for naive, _ in rows))
    halves = [f"{full['noise']['value']:.2f} · {naive['noise']['value']:.2f}" for naive, full in rows]
    result.add("two halves: full cache · naive", *halves)
    return result


def main() -> None:
    """Train, measure, and print or save the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS, help="policies to measure at")
    parser.add_argument("--chunks", type=int, default=Samples.chunks, help="of 4 prompts with 8 samples each")
    parser.add_argument("--policy", type=Path, default=REAL, help="default: that of make real-model")
    kept.add_options(parser, "real_gradients", PAGE)
    parser.set_defaults(runs=parser.get_default("runs").with_name("real"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = kept.read(args.kept)
    if not args.finished:
        if not (args.policy / "config.json").is_file():
            sys.exit(f"error: there is no model in {args.policy}: make real-model, or give --policy")
        wanted = missing(args.weights, lines, CASES)
        policies = {BEFORE: args.policy}
        if AFTER in wanted:
            policies[AFTER] = trained(args.runs.absolute() / "gradients", args.policy)
        samples = StorySamples(args.chunks)
        jobs = [Job(name, str(policies[name]), samples, cases) for name, cases in wanted.items()]
        with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
            measure(jobs, pool, lines, args.kept)
    if not lines:
        sys.exit("error: nothing is measured: run without --finished")
    text = table(lines).untitled
    print(text)
    if args.save:
        insert(args.save / PAGE, text, mark("experiments.real.gradients", "real"))


if __name__ == "__main__":
    main()
