"""Under ``precision: bf16-true`` Lightning makes bfloat16 torch's default type: only the weights may notice.

Rotary angles are exact whatever precision float32 products have: older transformers compute them by a product. TF32,
which Lightning advises, has 11 bits and no effect on a CPU, so what counts is the precision that is in force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny_grpo import Recorder, fit, module
from torch import nn

from sparse_rl_lightning.calibration.query_statistics import gather_statistics
from sparse_rl_lightning.callbacks import ImportanceReweighting, SparsityAwareRejection
from sparse_rl_lightning.compressors import H2O, RKV, FullKV
from sparse_rl_lightning.learner.forward import Learner, LearnerOptions
from sparse_rl_lightning.modules import SparseGRPO
from sparse_rl_lightning.policies import LoadedPolicy
from sparse_rl_lightning.policies.lora import LoraPolicy
from sparse_rl_lightning.policies.modes import PRODUCTS, exact_angles
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.retrievers import Centroid
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

SIZES: dict[str, Any] = {"budget": 8, "buffer": 3, "num_sinks": 1, "window": 2}


class HalfDefault(SparseGRPO):
    """float32 weights, but bfloat16 as the default type of new tensors, as in Lightning's half precision."""

    def training_step(self, batch: list[dict[str, Any]], batch_idx: int) -> torch.Tensor:
        torch.set_default_dtype(torch.bfloat16)
        try:
            return super().training_step(batch, batch_idx)
        finally:
            torch.set_default_dtype(torch.float32)


def trained(
    kind: type[SparseGRPO], precision: str = "32-true", **options: Any
) -> tuple[list[Rollout], dict[str, float]]:
    """The rollouts of a fit and what it logged last."""
    recorder = Recorder()
    callbacks = [SparsityAwareRejection(0.3), ImportanceReweighting(), recorder]
    trainer = fit(module(kind=kind, steps_per_generation=2, **options), 4, callbacks, precision=precision)
    metrics = {n: float(v) for n, v in trainer.callback_metrics.items() if not n.startswith("time/")}
    return [scored.rollout for scored in recorder.scored], metrics


@pytest.mark.parametrize("options", [{"beta": 0.1}, {"min_p": 0.03, "importance_sampling_level": "sequence"}])
def test_the_default_type_changes_no_bit(options: dict[str, Any]) -> None:
    rollouts, metrics = trained(SparseGRPO, **options)
    others, other_metrics = trained(HalfDefault, **options)
    assert other_metrics == metrics
    assert len(rollouts) == 2
    for rollout, other in zip(rollouts, others, strict=True):
        assert torch.equal(other.kv.stored_integral, rollout.kv.stored_integral)
        for name, value in rollout.state().items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(other.state()[name], value), name
                assert other.state()[name].dtype == value.dtype, name


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
@pytest.mark.parametrize("method", ["running state", "retrieval"])
def test_every_precision_trains_with_running_state_and_with_retrieval(method: str, precision: str) -> None:
    if method == "retrieval":
        options: dict[str, Any] = {"retriever": Centroid(8, page_size=2, num_dense_layers=1), "compressor": FullKV()}
    else:
        options = {"compressor": H2O(**SIZES, age_normalized=True)}
    rollouts, metrics = trained(SparseGRPO, precision, beta=0.1, **options)
    assert len(rollouts) == 2
    kind = torch.float64 if precision == "64-true" else torch.float32
    assert rollouts[0].old_logprobs.dtype == rollouts[0].weights.dtype == kind
    single = ("sampler_logprobs", "ref_logprobs", "advantages")
    assert {getattr(rollouts[0], name).dtype for name in single} == {torch.float32}
    assert all(torch.tensor(value).isfinite() for value in metrics.values())
    assert torch.get_default_dtype() == torch.float32


# ---------------------------------------------------------------- rotary angles


Pass = Callable[[Any, Any], object]
PASSES: dict[str, Pass] = {
    "dense": lambda model, rollout: Learner(LearnerOptions()).dense(model, rollout),
    "checkpointed": lambda model, rollout: checkpointed(model, rollout),
    "replay": lambda model, rollout: Learner(LearnerOptions(), replays=True).logprobs(model, rollout),
    "reference": lambda model, rollout: Learner(LearnerOptions()).dense(reference(model), rollout),
    "rescored": lambda model, rollout: Learner(LearnerOptions()).rescored(model, rollout),
    "sampler": lambda model, rollout: drawn(model, decoder="transformers"),
    "calibration": lambda model, rollout: gather_statistics(model, rollout.sequences, torch.tensor([9, 9])),
}


def drawn(model: Any, **options: Any) -> Any:
    sampler = RolloutSampler(model, RKV(budget=8, buffer=3, num_sinks=1, window=2), **options)
    return sampler.generate([[3, 4, 5], [6, 7]], SamplingParams(max_completion_length=12))


def reference(model: Any) -> Any:
    """The model with adapters that are switched off, as the KL penalty of LoRA compares with."""
    pytest.importorskip("peft", reason="peft is an extra")
    lora = LoraPolicy(LoadedPolicy(model, character_tokenizer()))
    lora.load()
    return lora.load_reference()


def checkpointed(model: Any, rollout: Any) -> None:
    learner = Learner(LearnerOptions(gradient_checkpointing=True))
    learner.prepare(model)
    learner.dense(model.train(), rollout)[0].sum().backward()


def in_force() -> tuple[str, ...]:
    return tuple(backend.fp32_precision for backend in PRODUCTS)


@pytest.fixture(params=["high", "medium", "own"])
def reduced(request: pytest.FixtureRequest) -> Iterator[tuple[str, ...]]:
    torch.set_float32_matmul_precision("highest")
    before = in_force()
    if request.param == "own":  # torch's newer setting, of a GPU alone
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision(request.param)
    yield in_force()
    torch.set_float32_matmul_precision("highest")
    assert in_force() == before


@pytest.mark.parametrize("name", PASSES)
def test_angles_are_computed_in_full_and_all_else_as_the_user_says(
    name: str, reduced: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(eos_token_id=None)
    rollout, seen = drawn(model), {"angles": set[Any](), "layers": set[Any]()}
    for name_of, part in (("angles", model.model.rotary_emb), ("layers", model.model.layers[0])):
        monkeypatch.setattr(type(part), "forward", noting(type(part).forward, seen[name_of]))
    PASSES[name](model, rollout)
    assert seen == {"angles": {tuple("ieee" for _ in PRODUCTS)}, "layers": {reduced}}
    assert in_force() == reduced
    assert not model.model.rotary_emb._forward_hooks
    assert not model.model.rotary_emb._forward_pre_hooks


def noting(forward: Callable[..., Any], seen: set[Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.add(in_force())
        return forward(*args, **kwargs)

    return noted


def test_a_failed_pass_leaves_the_setting_as_it_was(reduced: tuple[str, ...]) -> None:
    model = tiny_model()
    for broken in ("x", None):  # in the angles, behind them
        with pytest.raises((AttributeError, TypeError)), exact_angles(model):
            model.model.rotary_emb(broken, broken)
        assert in_force() == reduced
    assert not model.model.rotary_emb._forward_hooks


def test_a_model_in_full_precision_or_without_rotary_positions_is_left_alone() -> None:
    model = tiny_model()
    with exact_angles(model):
        assert not model.model.rotary_emb._forward_hooks
    del model.model.rotary_emb
    with exact_angles(model):
        assert isinstance(model, nn.Module)
