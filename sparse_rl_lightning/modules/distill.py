"""DistillSparse: a low-rank adapter that only the sparse policy wears learns to make up for what the cache forgot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.block import BlockPlan
from sparse_rl_lightning.learner.loss import Items
from sparse_rl_lightning.modules.generation import Rows
from sparse_rl_lightning.modules.sparse_grpo import SparseGRPO
from sparse_rl_lightning.policies.lora import add_adapter, check_adapter, without_adapters
from sparse_rl_lightning.policies.modes import eval_mode
from sparse_rl_lightning.ranges import check_number
from sparse_rl_lightning.records import LossOutput, Rollout, ScoredRollout


@dataclass(frozen=True)
class SparseAdapter:
    """The adapter of the sparse policy and what it learns from.

    Args:
        r: Rank.
        lora_alpha: The adapter's output is multiplied by lora_alpha / r.
        target_modules: Names of the linear layers that get one, ``all-linear`` for all but the output head.
        lr: Its learning rate, null for the policy's.
        kl_coef: Factor of the KL divergence from the sparse to the dense policy.
        policy_gradient: False trains it on the divergence alone.

    Raises:
        ValueError: If a number is out of range, or it would learn nothing.
    """

    r: int = 16
    lora_alpha: float = 32.0
    target_modules: list[str] | str = "all-linear"
    lr: float | None = None
    kl_coef: float = 0.001
    policy_gradient: bool = True

    def __post_init__(self) -> None:
        check_adapter(self.r, self.lora_alpha)
        if self.lr is not None:
            check_number("adapter.lr", self.lr, least=0)
        check_number("adapter.kl_coef", self.kl_coef, least=0)
        if self.kl_coef == 0 and not self.policy_gradient:
            raise UserError(
                "adapter.kl_coef must not be 0 without the policy gradient, or the adapter learns nothing; got "
                f"kl_coef={self.kl_coef}, policy_gradient={self.policy_gradient}."
            )


class DistillSparse(SparseGRPO):
    """SparseGRPO whose sampler wears an adapter that is taught by the dense policy (DistillSparse; Sparrow, App. D).

    Rollouts and everything that speaks of the sparse policy run with the adapter, everything dense without it. A
    rollout is served ``num_iterations`` times for the policy, which learns as in :class:`SparseGRPO`, and then once
    for the adapter, the policy frozen. The adapter's loss is L = L_PPO + ``kl_coef`` x KL: the clipped policy term of
    the sparse policy, and the k3 estimate on the sampled tokens of the divergence from it to the updated dense policy,
    which gives no gradient. What makes the sparse policy differentiable is exact replay of its evictions; with a
    retriever the learner chooses pages again, by the same rule and without gradient through the choice. Nothing is
    rejected or reweighted in this loss: it speaks of the policy that drew the tokens. One optimiser holds both in two
    parameter groups; its schedule counts the steps of both. Export writes the dense policy, and the adapter in
    ``sparse_adapter/``. Needs ``pip install 'sparse-rl-lightning[lora]'``.

    Logged beside SparseGRPO's metrics, in the adapter's steps: ``distill/loss``, ``distill/kl`` (nats per token) and
    ``distill/clip_ratio``.

    Args:
        policy: As in :class:`SparseGRPO`, like all other arguments not listed here.
        adapter: The adapter and its objective, null for the defaults.
        **kwargs: Arguments of :class:`SparseGRPO`.

    Raises:
        ValueError: If an argument is out of range, peft is missing, the policy has adapters already, or there is a
            retriever beside a compressor that evicts, which no learner can follow.
    """

    replays = keeps_evictions = True
    trains_whole_policy = False

    def __init__(self, *args: Any, adapter: SparseAdapter | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.retriever is not None and self.compressor.evicts:
            raise UserError(
                f"DistillSparse follows either evictions or a retriever: {type(self.compressor).__name__} moves "
                f"entries between the pages that {type(self.retriever).__name__} chooses from. Set model.retriever to "
                "null, or model.compressor to FullKV."
            )
        if not self.rescore:
            raise UserError("DistillSparse corrects the policy by its dense log-probs: set model.rescore to true.")
        self.adapter = adapter or SparseAdapter()
        self._own: list[torch.nn.Parameter] = []  # trained by the policy's objective
        self._adapter_own: list[torch.nn.Parameter] = []

    # ---------------------------------------------------------------- who wears the adapter

    def configure_model(self) -> None:
        """Load the policy as SparseGRPO does, and put the adapter on it."""
        if self.policy is not None:
            return
        super().configure_model()
        assert self.policy is not None
        if getattr(self.policy, "peft_config", None):
            raise UserError("DistillSparse trains the policy's own weights: give a policy without adapters.")
        trainable = [p for p in self.policy.parameters() if p.requires_grad]
        options = {"r": self.adapter.r, "lora_alpha": self.adapter.lora_alpha, "lora_dropout": 0.0}
        add_adapter(self.policy, self.adapter.target_modules, **options)
        for parameter in trainable:
            parameter.requires_grad_(True)
        self._own, self._adapter_own = trainable, [p for n, p in self.policy.named_parameters() if "lora_" in n]

    @property
    def dense_policy(self) -> PreTrainedModel:
        """The policy without its adapter, until the next sparse pass puts it on."""
        policy = super().dense_policy
        policy.disable_adapters()
        return policy

    @property
    def sparse_policy(self) -> PreTrainedModel:
        """The same model with its adapter, until the next dense pass takes it off."""
        policy = super().dense_policy
        policy.enable_adapters()
        return policy

    def generate(self, rows: Rows, *args: Any, dense: bool = False, **options: Any) -> ScoredRollout:
        """As in SparseGRPO, with the adapter unless it is dense."""
        self.sampler(dense)  # building it asks for the dense policy
        _ = self.dense_policy if dense else self.sparse_policy
        return super().generate(rows, *args, dense=dense, **options)

    def replayed(self, part: Rollout) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the sparse policy, with gradient."""
        return self._sparse_logprobs(self.sparse_policy, part)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, T, V) logits of the dense policy, for trying things out."""
        _ = self.dense_policy
        return super().forward(input_ids)

    # ---------------------------------------------------------------- two objectives

    @property
    def num_passes(self) -> int:
        """Those of the policy, and one for the adapter."""
        return self.num_iterations + 1

    def plan(self, num_prompts: int) -> BlockPlan:
        """As in SparseGRPO; no optimiser step may hold gradients of both.

        Raises:
            ValueError: If a division leaves a rest.
        """
        if self.steps_per_generation % self._accumulate:
            raise UserError(
                f"DistillSparse: accumulate_grad_batches={self._accumulate} must divide steps_per_generation="
                f"{self.steps_per_generation}, or an optimiser step would mix the policy's and the adapter's micro-"
                "batches. Change trainer.accumulate_grad_batches or model.steps_per_generation."
            )
        return super().plan(num_prompts)

    @property
    def trains_adapter(self) -> bool:
        """Whether the micro-batch last served is the adapter's."""
        return self.block is not None and self.block.cursor > self.steps_per_generation * self.num_iterations

    def _rescore(self, scored: ScoredRollout) -> None:
        super()._rescore(scored)
        self._replay_old(scored)

    def micro_batch_loss(self, part: Rollout, items: Items) -> tuple[LossOutput, Tensor]:
        """The policy's loss in its own passes, the adapter's in the last one; the other is frozen."""
        self.configure_model()
        for parameters, trained in ((self._own, not self.trains_adapter), (self._adapter_own, self.trains_adapter)):
            for parameter in parameters:
                parameter.requires_grad_(trained)
        return self._adapter_loss(part, items) if self.trains_adapter else super().micro_batch_loss(part, items)

    def _adapter_loss(self, part: Rollout, items: Items) -> tuple[LossOutput, Tensor]:
        assert part.advantages is not None
        with torch.no_grad(), eval_mode(self.dense_policy):
            teacher, _ = self._logprobs(self.dense_policy, part)
        logprobs, _ = self.replayed(part)  # last: a checkpointed backward pass still needs the adapter
        objective = replace(
            self.objective, beta=self.adapter.kl_coef, kl_estimator="k3", kl_on="completion", off_policy_delta=None
        )
        gain = part.advantages if self.adapter.policy_gradient else torch.zeros_like(part.advantages)
        own = replace(
            part, advantages=gain, old_logprobs=part.replay_logprobs, ref_logprobs=teacher, keep=None, weights=None,
            weight_reference=None,
        )  # fmt: skip
        output = objective(own, Items(items.everything, items.everything), logprobs)
        named = {"kl": "distill/kl", "clip_ratio/region_mean": "distill/clip_ratio"}
        metrics = {to: output.metrics[name] for name, to in named.items() if name in output.metrics}
        return LossOutput(output.loss, metrics | {"distill/loss": output.loss.detach()}), logprobs

    # ---------------------------------------------------------------- Lightning

    def parameter_groups(self) -> list[Any]:
        """The policy's own weights, then the adapter's with their learning rate."""
        own: dict[str, Any] = {} if self.adapter.lr is None else {"lr": self.adapter.lr}
        return [{"params": self._own}, {"params": self._adapter_own, **own}]

    def export(self, folder: str | Path) -> None:
        """Write the dense policy as a plain Hugging Face folder, and the sampler's adapter in a folder inside it."""
        assert self.policy is not None
        assert self.tokenizer is not None
        plain = without_adapters(self.policy, merge=False)
        self.policy_source.exported(plain).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        self.policy.save_pretrained(Path(folder) / "sparse_adapter")
