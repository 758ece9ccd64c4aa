"""LearnedEvictionGRPO: what to evict is drawn, and credited with what became of the sequence."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from experiments.learned_eviction.drawn import Drawn, methods_in
from experiments.learned_eviction.draws import EvictionDraws, draw_statistics
from experiments.learned_eviction.loss import eviction_loss
from sparse_rl_lightning.callbacks.base import correct
from sparse_rl_lightning.compressors.learned_score import LearnedScore, ScoreNetwork, save_network
from sparse_rl_lightning.distributed import ranks
from sparse_rl_lightning.distributed.sharded import ShardedStrategy
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.learner.loss import Denominators
from sparse_rl_lightning.modules.replay_grpo import ReplayGRPO
from sparse_rl_lightning.policies.geometry import CacheGeometry, model_sizes
from sparse_rl_lightning.policies.modes import eval_mode
from sparse_rl_lightning.policies.source import PolicySource
from sparse_rl_lightning.records import LossOutput, Rollout, ScoredRollout, tensors_to

FILE = "learned_score.safetensors"
"""Name of the network's file in the folder of an exported policy."""
KEY = "learned_eviction"
"""Entry of a checkpoint."""


class TrainedNetwork(ScoreNetwork):
    """The network of a LearnedScore as a part of the module that trains it."""

    @classmethod
    def like(cls, network: ScoreNetwork) -> Self:
        """A copy of a network."""
        copy = cls(network.sizes, network.bias.shape[-1])
        copy.load_state_dict(network.state_dict())
        return copy

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the module to its device, but not to another type."""
        super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)  # type: ignore[no-untyped-call]  # torch's
        return self


class LearnedEvictionGRPO(ReplayGRPO):
    """GRPO under replay in which evictions are actions too: drawn by the sampler, credited with the advantage.

    The compressor is a :class:`~experiments.learned_eviction.Drawn`, which draws what to evict from another method's
    scores. The learner replays the evictions and recomputes those scores with gradient, so that keys, queries and
    whatever else they are made of learn to be worth keeping when they are needed (Neural Garbage Collection, arXiv
    2604.18002). The loss is that of ``ReplayGRPO`` with ``replay_objective: sparse``, plus the same objective of the
    draws: each head's draw at each compression has its own ratio, clip, and the sequence's advantage.

    A draw at the end of a prompt is the same for all its samples, which are compared with each other alone, so it gets
    no credit; nor does one at a sequence's very end, which nothing sees. ``compress_prompt: false`` leaves prompts to
    the first draws of each sample.

    Args:
        policy: Policy as in :class:`SparseGRPO`, like all other arguments not listed here.
        compressor: Drawn evictions of a method whose scores have a gradient: SnapKV, R-KV, TOVA, KeyDiff, CUR,
            KNorm, combinations of them that are not ranked, or ``LearnedScore`` (``NewScore``, if there is no file),
            whose network is trained too.
        eviction_weight: Factor of the draws' term; 0 learns tokens alone.
        network_lr: Learning rate of that network; null for the policy's.
        **kwargs: Arguments of :class:`SparseGRPO`.

    Raises:
        ValueError: If the compressor draws nothing or has no gradient, or an option does not go with it.
    """

    def __init__(
        self, policy: str | PolicySource, compressor: Drawn, *args: Any, eviction_weight: float = 1.0,
        network_lr: float | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(policy, compressor, *args, replay_objective="sparse", **kwargs)
        check_number("eviction_weight", eviction_weight, least=0, owner="LearnedEvictionGRPO")
        if network_lr is not None:
            check_number("network_lr", network_lr, above=0, owner="LearnedEvictionGRPO")
        if not isinstance(compressor, Drawn) or compressor.temperature == 0:
            raise UserError(
                f"LearnedEvictionGRPO learns from evictions that were drawn, and {compressor} draws none. Wrap it: "
                "compressor: {class_path: experiments.learned_eviction.drawn.Drawn, init_args: {compressor: {...}, "
                "temperature: 0.3}}."
            )
        if not compressor.has_gradient:
            raise UserError(
                "LearnedEvictionGRPO recomputes scores, with gradient, from keys, values, recent queries and numbers "
                f"that tokens enter with, which those of {compressor} are not made of. Use SnapKV, RKV, TOVA, KeyDiff, "
                "CUR, KNorm or LearnedScore, or Combined of them with normalization: standard."
            )
        if compressor.budget_rule.splits_heads:
            raise UserError(
                f"LearnedEvictionGRPO: budget_rule={compressor.budget_rule!r} lets the draws of all heads decide how "
                "many each evicts, and no probability is known for that. Use the default, or Pyramid."
            )
        options = self.learner.options
        if options.gradient_checkpointing or options.packs or options.share_prompts:
            raise UserError(
                "LearnedEvictionGRPO reads queries and keys out of whole forward passes: set model.learner."
                "gradient_checkpointing to false, share_prompts to false and micro_batch_tokens to null."
            )
        self.drawn = compressor
        self.eviction_weight, self.network_lr = eviction_weight, network_lr
        self.network: TrainedNetwork | None = None
        self.draws: EvictionDraws | None = None  # of the newest rollout, by the policy before the update
        self.draw_keys: Tensor | None = None  # (B) keys of its sequences

    def on_policy_loaded(self) -> None:
        """Make what the compressor learns besides the policy a part of this module; load as ReplayGRPO does."""
        geometry = CacheGeometry.of(self.policy)
        self.drawn.check_model(model_sizes(self.policy, geometry))
        learned = [method for method in methods_in(self.drawn) if isinstance(method, LearnedScore)]
        if len(learned) > 1:
            raise UserError(f"LearnedEvictionGRPO takes one compressor that is learned, got {len(learned)}.")
        for method in learned:
            method.network = self.network = TrainedNetwork.like(method.network).to(geometry.device)
        if self.network is None and self.network_lr is not None:
            raise UserError(
                f"network_lr={self.network_lr} is the learning rate of a compressor's own network, and {self.drawn} "
                "has none. Set it to null, or use LearnedScore."
            )
        super().on_policy_loaded()

    def parameter_groups(self) -> list[Any]:
        """The policy's parameters, and those of the compressor's network with their own learning rate."""
        groups, network = super().parameter_groups(), self.network
        if network is None:
            return groups
        rate = {} if self.network_lr is None else {"lr": self.network_lr}
        return [{"params": groups}, {"params": list(network.parameters()), **rate}]

    def export(self, folder: str | Path, dtype: str | None = None) -> None:
        """Write policy and tokenizer, and the compressor's network beside them."""
        super().export(folder, dtype)
        if self.network is not None and (self._trainer is None or self.global_rank == 0):
            save_network(self.network, Path(folder) / FILE)

    def check_strategy(self) -> None:
        """Refuse strategies whose checkpoints hold the policy alone, without what the compressor learns."""
        super().check_strategy()
        if self.network is not None and isinstance(self.trainer.strategy, ShardedStrategy):
            raise UserError(
                "LearnedScore trains on one device or with DDP: the whole weights in checkpoints of DeepSpeed and "
                "FSDP2 are the policy's alone. Set trainer.strategy to ddp."
            )

    @torch.no_grad()
    def rescore(self, scored: ScoredRollout) -> None:
        """Compute log-probs of tokens and draws of the policy before the update, and the order of the draws."""
        start, rollout = time.perf_counter(), scored.rollout
        if self._reference:
            self._score_by_reference(rollout)
        with eval_mode(self.policy):
            statistics = [self._statistics(micro) for micro in rollout.trimmed_parts(self.steps_per_generation)]
        rollout.old_logprobs = torch.cat([rollout.widened(logprobs) for logprobs, _, _ in statistics])
        assert rollout.keys is not None
        self.draws = EvictionDraws.cat([draws for _, _, draws in statistics])
        self.draw_keys = rollout.keys[:, 1]
        correct(self, rollout)
        scored.seconds["rescoring"] = time.perf_counter() - start

    def micro_batch_loss(self, part: Rollout, denominators: Denominators) -> LossOutput:
        """The loss of the tokens, and ``eviction_weight`` times that of the draws."""
        logprobs, entropy, draws = self._statistics(part)
        assert part.advantages is not None
        before = self.draws_of(part) or draws  # a rehearsal has none
        output, loss = self.loss(part, logprobs, denominators), self.loss
        term = eviction_loss(
            draws.logprobs, before.logprobs.detach(), draws.steps, part.advantages, loss.mask(part),
            loss_type=loss.loss_type, epsilon=loss.epsilon, epsilon_high=loss.epsilon_high, delta=loss.delta,
            denominator=loss.denominator, max_completion_length=denominators.max_completion_length,
            num_items=denominators.everything,
        )  # fmt: skip
        metrics = {**output.metrics, **term.metrics, "entropy": entropy[part.completion_mask].mean().detach()}
        total = output.loss + self.eviction_weight * term.loss
        if self.network is not None:  # DDP waits for a gradient of every parameter, and there may be no draw to credit
            total = total + sum(weight.flatten()[:0].sum() for weight in self.network.parameters())
        return LossOutput(total, metrics)

    def _statistics(self, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor, EvictionDraws]:
        options = self.learner.options
        return draw_statistics(
            self.policy, rollout, self.drawn, self.draws_of(rollout), temperature=self.learner.temperature,
            chunk_size=options.head_chunk_size, head_in_float32=options.head_in_float32,
        )  # fmt: skip

    def draws_of(self, rollout: Rollout) -> EvictionDraws | None:
        """The draws of these sequences as the policy before the update saw them, None if they are of no rollout yet."""
        if self.draws is None or self.draw_keys is None or rollout.keys is None:
            return None
        is_same = rollout.keys[:, 1, None] == self.draw_keys.to(rollout.keys.device)
        return self.draws[is_same.int().argmax(dim=1)] if bool(is_same.any(dim=1).all()) else None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the draws of the newest rollout, of every rank."""
        super().on_save_checkpoint(checkpoint)
        state = {} if self.draws is None else tensors_to({"keys": self.draw_keys, **vars(self.draws)}, "cpu")
        checkpoint[KEY] = {"compressor": repr(self.drawn), "ranks": ranks.gather_to_zero(state, self._world_size)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the draws back; refuse others within a rollout, whose probabilities are computed again.

        Raises:
            ValueError: If the compressor draws otherwise than it did.
        """
        super().on_load_checkpoint(checkpoint)
        stored = checkpoint.get(KEY)
        if stored is None or not self.run_state.is_within(checkpoint) or len(stored["ranks"]) != self._world_size:
            return
        if stored["compressor"] != repr(self.drawn):
            raise UserError(
                f"ckpt_path: this checkpoint is from within a rollout that {stored['compressor']} drew, and the "
                f"compressor is {self.drawn}. Resume as it was, or from a checkpoint between two rollouts."
            )
        state = tensors_to(stored["ranks"][self.global_rank], self.device)
        self.draw_keys = state.pop("keys", None)
        self.draws = EvictionDraws(**state) if state else None
