"""What ``experiments.turns`` runs: ``configs/tools.yaml`` with one thing changed per arm."""

from __future__ import annotations

from dataclasses import dataclass, replace

from experiments.runner.runs import CAPPED, CONFIGS, Arm, Settings, warmed
from experiments.runner.studies import Recipe, Study, Where
from sparse_rl_lightning.cli.yaml_files import read_file

BASE, REPLAYED, FULL = (f"../experiments/turns/{name}" for name in ("base", "replay", "dense"))  # as shipped ones
LONGEST = 17  # tokens of an answer of Calculator: a value and what is left to do, "1798-58-88-42*01;"
CORRECTIONS = ({"class_path": "SparsityAwareRejection", "init_args": {"threshold": 1e-4}}, CAPPED)
OF_COMPRESSOR = "compressor.init_args."
ARMS = (
    Arm("dense", FULL),
    Arm("naive", BASE),
    Arm("Sparse-RL", BASE, CORRECTIONS),
    Arm("replay", REPLAYED),
    Arm("Sparse-RL, prompt protected", BASE, CORRECTIONS, {f"{OF_COMPRESSOR}protect_prompt": True}),
    Arm(
        "Sparse-RL, newest observation protected", BASE, CORRECTIONS,
        {f"{OF_COMPRESSOR}protect_observations": 1, "rollout.turns.max_observation_length": LONGEST},
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Conversations(Study):
    """Arms that talk with a calculator, each with its seed's prompts, their order and every draw."""

    warmed_by = "warmup_tools"

    def settings(self, arm: Arm, seed: int, where: Where) -> Settings:
        """Greedy conversations are held under the cache that a run draws under; dense ones as under naive's."""
        settings = Settings(
            policy=str(warmed(where.folder, self.warmed_by)),
            folder=self.folder(where),
            budgets=(self.budget,),
            steps=self.recipe.steps * self.recipe.rollouts,
            method=read_file(CONFIGS / "tools.yaml")["model"]["init_args"]["compressor"],
            options={"data.init_args.seed": str(1 + seed)},
        )
        judged = settings.compressor(self.budget)
        judged["init_args"] |= {
            name.removeprefix(OF_COMPRESSOR): value
            for name, value in arm.options.items()
            if name.startswith(OF_COMPRESSOR)
        }
        ending = {"class_path": "experiments.turns.ending.Ending", "init_args": {"compressor": judged}}
        return replace(settings, notebook=ending)


USUAL = Conversations("RKV", 40, ARMS, Recipe(steps=2, rollouts=90), (0, 1, 2))
SMALLER = replace(USUAL, budget=34)
