"""Studies on the task of the quickstart: shipped configurations with one thing changed."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.runner.runs import CONFIGS, Arm, Settings, warmed
from experiments.runner.studies import Recipe, Study, Where
from sparse_rl_lightning.cli.yaml_files import read_file

USUAL = Recipe(steps=2, rollouts=120)


@dataclass(frozen=True)
class Quickstart(Study):
    """Arms from one warm-up with the same prompts, judged on the same problems."""

    judged: tuple[int, ...] = ()  # budgets under which dense runs are judged, the study's own if empty
    notebook: str = ""  # the class of another one than the course

    def settings(self, arm: Arm, seed: int, where: Where) -> Settings:
        """Those of ``configs/quickstart.yaml``; other seeds see other prompts."""
        return Settings(
            policy=str(warmed(where.folder, self.warmed_by).absolute()),
            folder=self.folder(where),
            budgets=self.judged or (self.budget,),
            steps=self.recipe.steps * self.recipe.rollouts,
            method=read_file(CONFIGS / "quickstart.yaml")["model"]["init_args"]["compressor"],
            options={
                "model.init_args.steps_per_generation": str(self.recipe.steps),
                "data.init_args.seed": str(1 + seed),
            },
            notebook={"class_path": self.notebook} if self.notebook else None,
        )
