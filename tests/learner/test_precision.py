"""Under ``precision: bf16-true`` Lightning makes bfloat16 torch's default type: only the weights may notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from tiny_grpo import grouped

from sparse_rl_lightning.callbacks import ImportanceReweighting, RolloutCallback, SparsityAwareRejection
from sparse_rl_lightning.compressors import H2O, RKV, Compressor, FullKV
from sparse_rl_lightning.data import PromptDataModule
from sparse_rl_lightning.modules import SparseGRPO
from sparse_rl_lightning.policies import LoadedPolicy
from sparse_rl_lightning.records import Rollout, ScoredRollout
from sparse_rl_lightning.retrievers import Centroid
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

ALPHABET = "0123456789abcdef"
SIZES: dict[str, Any] = {"budget": 8, "buffer": 3, "num_sinks": 1, "window": 2}


class Prompts(PromptDataModule):
    def train_rows(self) -> list[dict[str, Any]]:
        return [{"prompt": ALPHABET[i:] + "a", "answer": ""} for i in range(8)]


class HalfDefault(SparseGRPO):
    """float32 weights, but bfloat16 as the default type of new tensors, as in Lightning's half precision."""

    def training_step(self, batch: list[dict[str, Any]], batch_idx: int) -> torch.Tensor:
        torch.set_default_dtype(torch.bfloat16)
        try:
            return super().training_step(batch, batch_idx)
        finally:
            torch.set_default_dtype(torch.float32)


class Keep(RolloutCallback):
    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []

    def on_rollout_scored(self, trainer: Trainer, module: Any, scored: ScoredRollout) -> None:
        self.rollouts.append(scored.rollout)


def likes_a(completions: list[str], **_: Any) -> list[float | None]:
    return [text.count("a") / 10 for text in completions]


def fit(
    kind: type[SparseGRPO], precision: str = "32-true", compressor: Compressor | None = None, **options: Any
) -> tuple[list[Rollout], dict[str, float]]:
    tokenizer, keep = character_tokenizer(ALPHABET), Keep()
    compressor = compressor or RKV(**SIZES)
    policy = tiny_model(vocab_size=len(tokenizer), hidden_size=32, initializer_range=0.1)
    module = kind(
        LoadedPolicy(policy, tokenizer), compressor, likes_a, steps_per_generation=2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        **grouped(num_generations=4, max_completion_length=12, seed=3, **options),
    )  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", max_steps=4, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[SparsityAwareRejection(0.3), ImportanceReweighting(), keep],
        precision=precision,
    )  # fmt: skip
    trainer.fit(module, datamodule=Prompts(prompts_per_rollout=4))
    metrics = {n: float(v) for n, v in trainer.callback_metrics.items() if not n.startswith("time/")}
    return keep.rollouts, metrics


@pytest.mark.parametrize("options", [{"beta": 0.1}, {"min_p": 0.03, "importance_sampling_level": "sequence"}])
def test_the_default_type_changes_no_bit(options: dict[str, Any]) -> None:
    rollouts, metrics = fit(SparseGRPO, **options)
    others, other_metrics = fit(HalfDefault, **options)
    assert other_metrics == metrics
    assert len(rollouts) == 2
    for rollout, other in zip(rollouts, others, strict=True):
        assert rollout.kv is not None
        assert other.kv is not None
        assert torch.equal(other.kv.stored_integral, rollout.kv.stored_integral)
        for name, value in rollout.state().items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(other.state()[name], value), name
                assert other.state()[name].dtype == value.dtype, name


def test_half_precision_keeps_statistics_in_single() -> None:
    rollouts, metrics = fit(SparseGRPO, "bf16-true", beta=0.1)
    for name in ("sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "weights"):
        assert getattr(rollouts[0], name).dtype == torch.float32, name
    assert all(torch.tensor(value).isfinite() for value in metrics.values())


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
@pytest.mark.parametrize("method", ["running state", "retrieval"])
def test_every_precision_trains_with_running_state_and_with_retrieval(method: str, precision: str) -> None:
    if method == "retrieval":
        options: dict[str, Any] = {"retriever": Centroid(8, page_size=2, num_dense_layers=1), "compressor": FullKV()}
    else:
        options = {"compressor": H2O(**SIZES, age_normalized=True)}
    rollouts, metrics = fit(SparseGRPO, precision, beta=0.1, **options)
    assert len(rollouts) == 2
    kind = torch.float64 if precision == "64-true" else torch.float32
    assert rollouts[0].sampler_logprobs.dtype == rollouts[0].advantages.dtype == torch.float32
    assert rollouts[0].old_logprobs.dtype == rollouts[0].weights.dtype == kind
    assert all(torch.tensor(value).isfinite() for value in metrics.values())
    assert torch.get_default_dtype() == torch.float32
