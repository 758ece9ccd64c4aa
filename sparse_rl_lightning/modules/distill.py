"""DistillSparse: a LoRA adapter, active only in sparse rollouts, learns to compensate for evicted context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.checkpoints.folders import save_weights
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.learner.block import BlockPlan
from sparse_rl_lightning.learner.loss import Denominators
from sparse_rl_lightning.modules.replay_grpo import check_attention, check_partial, replay_old
from sparse_rl_lightning.modules.sparse_grpo import SparseGRPO
from sparse_rl_lightning.policies.lora import adapters, add_adapter, check_adapter
from sparse_rl_lightning.policies.modes import eval_mode
from sparse_rl_lightning.policies.source import without_adapters
from sparse_rl_lightning.records import LossOutput, Rollout, ScoredRollout


@dataclass(frozen=True)
class SparseAdapter:
    """The adapter of the sparse policy and its objective.

    Args:
        r: Rank of the adapter.
        lora_alpha: Numerator of the factor lora_alpha / r on the adapter's output.
        target_modules: Names of the linear layers that get an adapter, ``all-linear`` for all but the output head.
        lr: Learning rate of the adapter, null for the policy's.
        kl_coef: Factor of the KL divergence from the sparse to the dense policy.
        policy_gradient: Whether it learns from rewards too; False trains it on the divergence alone.
        seed: Seed of the adapter's initial weights, null for that of ``seed_everything``.

    Raises:
        ValueError: If a number is out of range, or it would learn nothing.
    """

    r: int = 16
    lora_alpha: float = 32.0
    target_modules: list[str] | str = "all-linear"
    lr: float | None = None
    kl_coef: float = 0.001
    policy_gradient: bool = True
    seed: int | None = None

    def __post_init__(self) -> None:
        check_adapter(self.r, self.lora_alpha, self.seed)
        if self.lr is not None:
            check_number("adapter.lr", self.lr, least=0)
        check_number("adapter.kl_coef", self.kl_coef, least=0)
        if self.kl_coef == 0 and not self.policy_gradient:
            raise UserError(
                "adapter.kl_coef must not be 0 without the policy gradient, or the adapter learns nothing; got "
                f"kl_coef={self.kl_coef}, policy_gradient={self.policy_gradient}."
            )


class DistillSparse(SparseGRPO):
    """SparseGRPO whose sampler has an adapter that learns from the dense policy (DistillSparse; Sparrow, App. D).

    Rollouts and all passes of the sparse policy run with the adapter, all dense passes without it. A
    rollout is served ``num_iterations`` times for the policy, which learns as in :class:`SparseGRPO`, and then once
    for the adapter, with the policy frozen. The adapter's loss is L = L_PPO + ``kl_coef`` x KL: the clipped policy term
    of the sparse policy, and the k3 estimate on the sampled tokens of the divergence from it to the updated dense
    policy, which gives no gradient. Exact replay of its evictions makes the sparse policy differentiable; with a
    retriever the learner chooses pages again, by the same rule and without gradient through the choice. Nothing is
    rejected or reweighted in this loss, since it is for the policy that drew the tokens. One optimizer has both in two
    parameter groups; its schedule counts the steps of both. Export writes the dense policy, and the adapter in
    ``sparse_adapter/``. Needs the extra ``lora``.

    Besides SparseGRPO's metrics it logs, in the adapter's steps: ``distill/loss``, ``distill/kl`` (nats per token) and
    ``distill/clip_ratio``.

    Args:
        policy: Policy as in :class:`SparseGRPO`, like all other arguments not listed here.
        adapter: Adapter and its objective.
        **kwargs: Arguments of :class:`SparseGRPO`.

    Raises:
        ValueError: If an argument is out of range, peft is missing, the policy has adapters already, or there is a
            retriever together with a compressor that evicts, which no learner can follow.
    """

    keeps_evictions = True

    def __init__(self, *args: Any, adapter: SparseAdapter = SparseAdapter(), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        compressor, retriever = self.generator.compressor, self.generator.retriever
        if retriever is not None and compressor.evicts:
            raise UserError(
                f"DistillSparse follows either evictions or a retriever: {type(compressor).__name__} moves "
                f"entries between the pages that {type(retriever).__name__} chooses from. Set model.retriever to "
                "null, or model.compressor to FullKV."
            )
        check_partial(self)
        check_attention(self, self.policy_source.attn_implementation)
        self.loss.second_term(adapter.kl_coef)  # which not every loss has
        self.adapter = adapter
        self.adapter_learns_from_rejected = adapter.policy_gradient  # from their rewards, whatever the policy does
        self.generator.sparse_mode, self.generator.dense_mode = self.adapter_on, self.adapter_off
        self._policy_parameters: list[torch.nn.Parameter] = []  # trained by the policy's objective
        self._adapter_parameters: list[torch.nn.Parameter] = []

    # ---------------------------------------------------------------- the adapter: off, but where it is named

    def on_policy_loaded(self) -> None:
        """Load the policy as SparseGRPO does, and add the adapter to it."""
        super().on_policy_loaded()
        check_attention(self, self.policy.config._attn_implementation)
        if getattr(self.policy, "peft_config", None):
            raise UserError("DistillSparse trains the policy's own weights: give a policy without adapters.")
        trainable = [p for p in self.policy.parameters() if p.requires_grad]
        options = {"r": self.adapter.r, "lora_alpha": self.adapter.lora_alpha, "lora_dropout": 0.0}
        add_adapter(self.policy, self.adapter.target_modules, self.adapter.seed, **options)
        self.policy.disable_adapters()
        for parameter in trainable:
            parameter.requires_grad_(True)
        self._policy_parameters, self._adapter_parameters = trainable, adapters(self.policy)

    @contextmanager
    def adapter_on(self) -> Iterator[None]:
        """Switch the adapter on inside the context, which makes the policy the sparse one."""
        self.policy.enable_adapters()
        try:
            yield
        finally:
            self.policy.disable_adapters()

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """Switch the adapter off and leave it so; an interrupted backward pass may have left it on."""
        self.policy.disable_adapters()
        yield

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits (B, T, V) of the dense policy, for trying things out."""
        self.configure_model()
        self.policy.disable_adapters()
        return super().forward(input_ids)

    def on_after_backward(self) -> None:
        """Switch the adapter off, which a checkpointed backward pass still needed."""
        self.policy.disable_adapters()

    def replayed(self, rollout: Rollout) -> tuple[Tensor, ...]:
        """Log-probs and entropies of the sparse policy."""
        with self.adapter_on():
            return self.learner.replayed(self.policy, rollout)

    # ---------------------------------------------------------------- two objectives

    @property
    def num_passes(self) -> int:
        """The number of the policy's passes, and one for the adapter."""
        return self.num_iterations + 1

    def plan(self, num_prompts: int) -> BlockPlan:
        """The plan of SparseGRPO; no optimizer step may have gradients of both.

        Raises:
            ValueError: If the numbers do not divide evenly.
        """
        if self.steps_per_generation % self._accumulate:
            raise UserError(
                f"DistillSparse: accumulate_grad_batches={self._accumulate} must divide steps_per_generation="
                f"{self.steps_per_generation}, or an optimizer step would mix the policy's and the adapter's micro-"
                "batches. Change trainer.accumulate_grad_batches or model.steps_per_generation."
            )
        return super().plan(num_prompts)

    @property
    def trains_adapter(self) -> bool:
        """Whether the micro-batch last served is the adapter's."""
        return self.block is not None and self.block.cursor > self.steps_per_generation * self.num_iterations

    @property
    def grad_norm_key(self) -> str:
        """The metric's name, which differs for the adapter's steps."""
        return "distill/grad_norm" if self.trains_adapter else "grad_norm"

    def rescore(self, scored: ScoredRollout) -> None:
        """Compute log-probs of the dense and of the sparse policy."""
        with self.adapter_on():
            replay_old(self, scored)
        super().rescore(scored)

    def micro_batch_loss(self, part: Rollout, denominators: Denominators) -> LossOutput:
        """The policy's loss in its own passes, the adapter's in the last one; the other is frozen."""
        for parameter in self._policy_parameters:
            parameter.requires_grad_(not self.trains_adapter)
        for parameter in self._adapter_parameters:
            parameter.requires_grad_(self.trains_adapter)
        self.policy.disable_adapters()  # an interrupted backward pass may have left it on
        if self.trains_adapter:
            return self.adapter_loss(part, denominators)
        return super().micro_batch_loss(part, denominators)

    def adapter_loss(self, micro_batch: Rollout, denominators: Denominators) -> LossOutput:
        """The sparse policy's loss; leaves the adapter on, for the backward pass."""
        assert micro_batch.advantages is not None
        with torch.no_grad(), eval_mode(self.policy):
            teacher = self.learner.dense(self.policy, micro_batch)[0]
        self.policy.enable_adapters()
        logprobs, _ = self.learner.replayed(self.policy, micro_batch)
        loss = self.loss.second_term(self.adapter.kl_coef)
        gain = micro_batch.advantages if self.adapter.policy_gradient else torch.zeros_like(micro_batch.advantages)
        sparse_batch = replace(
            micro_batch, advantages=gain, old_logprobs=micro_batch.replay_logprobs, ref_logprobs=teacher,
            keep=None, weights=None, weight_reference=None,
        )  # fmt: skip
        everything = denominators.everything
        output = loss(sparse_batch, logprobs, replace(denominators, policy=everything, penalty=everything))
        named = {"kl": "distill/kl", "clip_ratio/region_mean": "distill/clip_ratio"}
        metrics = {to: output.metrics[name] for name, to in named.items() if name in output.metrics}
        return LossOutput(output.loss, metrics | {"distill/loss": output.loss.detach()})

    # ---------------------------------------------------------------- Lightning

    def on_fit_start(self) -> None:
        """Prepare like SparseGRPO, in a single process.

        Raises:
            ValueError: If there are several processes.
        """
        if self._world_size > 1:
            raise UserError(
                "DistillSparse trains one part of the policy at a time, which works in one process so far: set "
                "trainer.devices and trainer.num_nodes to 1."
            )
        super().on_fit_start()
        self.policy.disable_adapters()  # an interrupted fit may have left it on

    def parameter_groups(self) -> list[Any]:
        """The policy's own weights, then the adapter's with their learning rate."""
        rate: dict[str, Any] = {} if self.adapter.lr is None else {"lr": self.adapter.lr}
        return [{"params": self._policy_parameters}, {"params": self._adapter_parameters, **rate}]

    def export(self, folder: str | Path, dtype: str | None = None) -> None:
        """Write the dense policy as a plain Hugging Face folder, and the sampler's adapter in a folder inside it."""
        self.configure_model()
        self._export(without_adapters(self.policy, merge=False), folder, dtype)
        save_weights(Path(folder) / "sparse_adapter", self.policy)
