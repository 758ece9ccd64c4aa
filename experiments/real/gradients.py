"""Where compressed rollouts push the real model: gradients of each correction beside the full cache's.

    python -m experiments.real.gradients [--chunks 16] [--jobs 2] [--finished]

As ``experiments.gradients`` with the model and task of ``experiments.real``, at fixed weights: before training, and
after dense training in a seed of its own, under both budgets of the study, 512 samples each. What is measured is a line
in --kept and is not measured again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from benchmarks import REAL
from experiments.gradients.__main__ import exporting, main
from experiments.gradients.measure import Samples
from experiments.gradients.variants import VARIANTS, Variant
from experiments.real.studies import DENSE, HALF, MAIN, METHODS, QUARTER
from experiments.real.task import Stories, story_reward
from experiments.runner.execution import execute
from experiments.runner.records import Archive
from experiments.runner.studies import Where
from sparse_rl_lightning.compressors import Compressor, SnapKV
from sparse_rl_lightning.learner.forward import LearnerOptions
from sparse_rl_lightning.policies import LoraPolicy
from sparse_rl_lightning.policies.modes import WideProducts, lacks_bfloat16
from sparse_rl_lightning.records import Rows

BEFORE, AFTER = WEIGHTS = ("before training", "after dense training")
CASES = (("SnapKV", HALF), ("SnapKV", QUARTER))
COMPARED = ("naive", "rejection only", "reweighting only", "Sparse-RL", "replay")
SEED = 19  # of the dense training, no seed of the study


@dataclass(frozen=True)
class StorySamples(Samples):
    """Stories of the real model with fresh adapters, in the precision of its training."""

    prompts: int = 4
    parts: int = 1
    task: str = "stories"

    variants: ClassVar[tuple[Variant, ...]] = tuple(variant for variant in VARIANTS if variant.name in COMPARED)
    rewards: ClassVar = (story_reward,)
    longest: ClassVar[int] = 96
    learner: ClassVar = LearnerOptions(share_prompts=True)

    def problems(self, count: int) -> Rows:
        """So many prompts."""
        return Stories(num_train=count, seed=self.seed).train_rows()

    def compressor(self, method: str, budget: int) -> Compressor:
        """The study's."""
        return SnapKV(budget=budget, **METHODS[method]["init_args"])

    def policy(self, folder: str) -> LoraPolicy:
        """With the adapters of a run's start."""
        return LoraPolicy(folder, r=16, seed=self.seed)

    @contextmanager
    def precision(self) -> Iterator[None]:
        """That of training."""
        with WideProducts() if lacks_bfloat16() else nullcontext():
            with torch.autocast("cpu", torch.bfloat16):
                yield


def sources(folder: Path, names: Sequence[str], jobs: int) -> dict[str, Path]:
    """Policies by name, trained where they are not there yet."""
    if not (REAL / "config.json").is_file():
        sys.exit(f"error: there is no model in {REAL}: make real-model")
    study = replace(MAIN[0], arms=(DENSE,), seeds=(SEED,), judged=())
    run = exporting(study.runs(SEED, Where(folder, REAL))[0])
    if AFTER in names:
        execute([run], Archive(folder / "sources.jsonl"), jobs, tidy=True)
    return {BEFORE: REAL, AFTER: run.folder / "policy"}


if __name__ == "__main__":
    main(__doc__, "real_gradients", WEIGHTS, CASES, StorySamples(), sources)
