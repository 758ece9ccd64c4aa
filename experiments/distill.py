"""The tail of the acceptance before and after DistillSparse, under one schedule and on the same held-out prompts.

    python -m experiments.distill [--jobs 2]

Every run is `configs/distill.yaml` with a schedule in place of its budget, and with what the adapter learns from
changed. Its policy is measured three times: as it was at the start, as it is at the end without its adapter, and with
it. Only the last two tell what the adapter does, because training moves the policy too. The vocabulary is small, so the
acceptance is exact. The page of the runs of before is docs/measured/sparrow.md.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from experiments.quickstart import Quickstart
from experiments.runner.command import Program, main
from experiments.runner.course import Notebook
from experiments.runner.ends import Ends, ends_table
from experiments.runner.runs import Arm
from experiments.runner.studies import Recipe
from sparse_rl_lightning.acceptance import AcceptanceTail, rollout_acceptance
from sparse_rl_lightning.rollout import SamplingParams

SCHEDULE = {"starts": [0, 32, 40], "budgets": [22, 26, 30]}
SPELLED = json.dumps({"class_path": "LengthSchedule", "init_args": SCHEDULE})
WITH, WITHOUT = "with the adapter", "without the adapter"


class Tails(Notebook):
    """The tail of the acceptance on held-out prompts, before training and after it with and without the adapter.

    Args:
        num_prompts: Held-out prompts, four samples each.
    """

    def __init__(self, num_prompts: int = 128) -> None:
        self.num_prompts = num_prompts
        self.record = {"before": {}, "after": {}, "logged": {}}

    def on_rollout_start(self, trainer: Trainer, module: LightningModule, rows: list[dict[str, Any]]) -> None:
        """Measure before the first rollout."""
        if not self.record["before"]:
            self.record["before"] = {WITH: self._tail(trainer, module, adapted=True)}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure what training came to."""
        for name, adapted in ((WITHOUT, False), (WITH, True)):
            self.record["after"][name] = self._tail(trainer, pl_module, adapted)

    @torch.no_grad()
    def _tail(self, trainer: Trainer, module: Any, adapted: bool) -> dict[str, float]:
        prompts = module.generator.encode(trainer.datamodule.val_rows()[: self.num_prompts])
        params = SamplingParams(
            num_generations=4,
            max_completion_length=module.generator.sampling.max_completion_length,
            top_logprobs=int(module.policy.config.vocab_size),
            seed=1,
        )
        with module.adapter_on() if adapted else nullcontext():
            rollout = module.generator.sampler().generate(prompts, params)
        lower, _ = rollout_acceptance(module.policy.eval(), rollout)
        tail = AcceptanceTail.of(lower, rollout.completion_mask)
        return {"5th percentile": tail.overall, "mean": tail.mean, "share > 0.999": tail.near_one}


MIXTURES = {
    "policy gradient + 0.001 KL (Sparrow)": {"adapter.kl_coef": 0.001, "adapter.policy_gradient": True},
    "KL alone": {"adapter.kl_coef": 1.0, "adapter.policy_gradient": False},
}
ARMS = [
    Arm(name, "distill", options={**adapter, "compressor.init_args.budget": SPELLED})
    for name, adapter in MIXTURES.items()
]
PROGRAM = Program(
    "distill",
    {
        "distill": [
            Quickstart("RKV", 30, ARMS, Recipe(steps=2, rollouts=240), (0,), notebook="experiments.distill.Tails")
        ]
    },
    line=Ends,
    plain=ends_table,
)

if __name__ == "__main__":
    main(PROGRAM, __doc__)
