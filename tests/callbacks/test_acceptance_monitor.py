"""AcceptanceMonitor in real runs: what it logs, its ceiling, and that a run is the same without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_grpo import Recorder, fit, module, weights

from sparse_rl_lightning.acceptance import exact_acceptance, tail_target
from sparse_rl_lightning.callbacks import AcceptanceMonitor, RolloutCallback
from sparse_rl_lightning.callbacks.monitors.acceptance import acceptance_of, drawn_by_newest
from sparse_rl_lightning.compressors import FullKV, RandomEviction
from sparse_rl_lightning.modules import LearnerOptions
from sparse_rl_lightning.replay.hooks import REPLAY, attention_implementation
from sparse_rl_lightning.testing import tiny_model

SCALARS = {
    *(f"acceptance/{name}{bound}" for name in ("p05", "mean", "near_one") for bound in ("", "_upper")),
    *(f"acceptance/{name}" for name in ("sampled_p05", "sampled_mean", "ceiling_p05", "ceiling_p05_upper")),
    "acceptance/target",
}


def sharp(**kwargs: Any) -> Any:
    """A module whose policy is sure of itself, so that forgetting shows."""
    grpo = module(compressor=RandomEviction(budget=6, buffer=2, num_sinks=1, window=2), **kwargs)
    grpo.policy_source.model = tiny_model(
        vocab_size=len(grpo.policy_source.tokenizer), hidden_size=32, initializer_range=0.3, eos_token_id=1
    )
    return grpo


def numbers(trainer: Any) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("acceptance/")}


class Keeps(RolloutCallback):
    """Keeps the sampler's reports beyond the rollout, and what all logits say of it."""

    def __init__(self) -> None:
        self.reported: list[int] = []
        self.exact: list[torch.Tensor] = []

    def on_rollout_scored(self, trainer: Any, module: Any, scored: Any) -> None:
        rollout = scored.rollout
        self.reported.append(0 if rollout.topk_ids is None else rollout.topk_ids.shape[-1])
        policy = module.policy
        with torch.no_grad():
            dense = policy(rollout.sequences).logits.log_softmax(-1)
            with attention_implementation(policy, REPLAY):
                sparse = policy(rollout.sequences, death=rollout.evictions.death).logits.log_softmax(-1)
        self.exact.append(exact_acceptance(dense, sparse)[:, :-1][rollout.completion_mask[:, 1:]])


@pytest.mark.parametrize("learner", [LearnerOptions(), LearnerOptions(micro_batch_tokens=60, head_chunk_size=5)])
def test_all_numbers_of_a_run_around_the_exact_ones(learner: LearnerOptions) -> None:
    keeps = Keeps()
    trainer = fit(sharp(learner=learner), 1, [AcceptanceMonitor(top_k=4, bin_size=8, num_bins=3), keeps])
    got, exact = numbers(trainer), keeps.exact[0].double().numpy()
    bins = {name for name in got if name.count("/") == 2}
    assert got.keys() - bins == SCALARS
    assert {name.split("/")[2] for name in bins} == {"0-8", "8-16", "16+"}

    p05, slack = np.percentile(exact, 5), 1e-5
    assert p05 < 0.8, "nothing was forgotten"
    assert got["acceptance/p05"] <= p05 + slack * (1 - p05)
    assert got["acceptance/p05_upper"] >= p05 - slack * (1 - p05)
    assert got["acceptance/mean"] <= exact.mean() + 1e-5 <= got["acceptance/mean_upper"] + 2e-5
    assert got["acceptance/mean"] < got["acceptance/mean_upper"]
    assert got["acceptance/near_one"] <= (exact > 0.999).mean() <= got["acceptance/near_one_upper"]
    assert got["acceptance/sampled_mean"] == pytest.approx(exact.mean(), abs=0.08)  # an estimate from 150 tokens
    assert got["acceptance/target"] == pytest.approx(tail_target(got["acceptance/ceiling_p05"]))


def test_the_ceiling_is_truncation_alone_where_kernels_agree() -> None:
    whole = numbers(fit(sharp(), 1, [AcceptanceMonitor()]))  # 20 tokens are the whole vocabulary
    assert whole["acceptance/ceiling_p05"] == pytest.approx(1, abs=1e-4)
    assert whole["acceptance/p05"] == pytest.approx(whole["acceptance/p05_upper"], abs=1e-4)
    cut = numbers(fit(sharp(), 1, [AcceptanceMonitor(top_k=2)]))
    assert cut["acceptance/ceiling_p05"] < 0.9
    assert cut["acceptance/ceiling_p05_upper"] == pytest.approx(1, abs=1e-4)
    dense = numbers(fit(module(compressor=FullKV()), 1, [AcceptanceMonitor()]))
    assert dense["acceptance/p05"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("own", [0, 3])
def test_the_sampler_reports_only_where_it_is_asked(own: int) -> None:
    keeps, grpo = Keeps(), sharp(top_logprobs=own)
    fit(grpo, 3, [AcceptanceMonitor(every_n_rollouts=2, top_k=5), keeps])
    assert keeps.reported == [5, own, 5]
    assert grpo.generator.sampling.top_logprobs == own


def test_a_run_is_the_same_without_it() -> None:
    with_it, without = sharp(), sharp()
    fit(with_it, 3, [AcceptanceMonitor(every_n_rollouts=2, ceiling_every_n_rollouts=1)])
    fit(without, 3)
    assert torch.equal(weights(with_it), weights(without))
    assert with_it.generator.sampler(dense=True).cache is None, "the full cache's memory is still taken"


def test_the_ceiling_is_measured_when_due_and_survives_a_checkpoint(tmp_path: Path) -> None:
    drawn: list[int] = []

    class Counts(AcceptanceMonitor):
        def _measure_ceiling(self, module: Any, scored: Any) -> None:
            before = self._ceiling_index, dict(self._ceiling)
            super()._measure_ceiling(module, scored)
            if before != (self._ceiling_index, self._ceiling):
                drawn.append(scored.index)

    fit(sharp(), 3, [Counts(every_n_rollouts=1, ceiling_every_n_rollouts=2)]).save_checkpoint(tmp_path / "last.ckpt")
    assert drawn == [0, 2]
    again = Counts(every_n_rollouts=1, ceiling_every_n_rollouts=2)
    assert fit(sharp(), 5, [again], ckpt_path=tmp_path / "last.ckpt").global_step == 5
    assert drawn == [0, 2, 4]
    drawn.clear()
    none = numbers(fit(sharp(), 1, [Counts(ceiling_prompts=0)]))
    assert not drawn
    assert not [name for name in none if "ceiling" in name or "target" in name]


def test_partial_rollouts_are_measured_where_one_policy_drew_all(tmp_path: Path) -> None:
    recorder = Recorder()
    options: dict[str, Any] = {"num_slots": 5, "partial_rollout_steps": 6}
    monitor = AcceptanceMonitor(every_n_rollouts=2, top_k=4)
    trainer = fit(sharp(**options), 5, [monitor, recorder])
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert monitor.report is not None
    mixed = [scored.rollout for scored in recorder.scored if scored.rollout.policy_versions.max() > 1]
    assert mixed
    assert all(scored.rollout.topk_ids is None for scored in recorder.scored)  # dropped before training
    again = AcceptanceMonitor(every_n_rollouts=2, top_k=4)
    assert fit(sharp(**options), 7, [again], ckpt_path=tmp_path / "last.ckpt").global_step == 7


def test_an_adapter_of_the_sampler_counts_but_not_in_the_ceiling() -> None:
    pytest.importorskip("peft")
    from sparse_rl_lightning.modules import DistillSparse

    plain = numbers(fit(sharp(), 1, [AcceptanceMonitor()]))
    fresh, moved = sharp(kind=DistillSparse), sharp(kind=DistillSparse)
    at_first = numbers(fit(fresh, 1, [AcceptanceMonitor()]))  # the adapter starts as nothing
    assert at_first["acceptance/p05"] == pytest.approx(plain["acceptance/p05"], abs=1e-4)
    moved.configure_model()
    for name, parameter in moved.policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    with_adapter = numbers(fit(moved, 1, [AcceptanceMonitor()]))
    assert with_adapter["acceptance/ceiling_p05"] == pytest.approx(1, abs=1e-4)
    assert with_adapter["acceptance/p05"] < plain["acceptance/p05"] - 0.05


def test_what_an_older_policy_began_is_left_out() -> None:
    grpo = sharp(num_slots=5, partial_rollout_steps=4)
    grpo.configure_model()
    rollout = grpo.generator.generate([{"prompt": "0123456789abcdef"}]).rollout

    class Session:
        version = 3

    grpo.generator.partial.session = Session()
    rollout.policy_versions = 3 * rollout.completion_mask.int()
    rollout.policy_versions[1, rollout.prompt_lengths[1]] = 2
    rollout.policy_versions[2] = 2 * rollout.completion_mask[2].int()
    kept = drawn_by_newest(grpo, rollout)
    assert torch.equal(kept.sequences, rollout.sequences[[0, 3]])


def test_the_training_flag_comes_back() -> None:
    grpo = sharp(top_logprobs=4)
    grpo.configure_model()
    rollout = grpo.generator.generate([{"prompt": "0123"}]).rollout
    grpo.policy.train()
    lower, upper = acceptance_of(grpo, rollout)
    assert grpo.policy.training
    assert not lower.requires_grad
    assert bool((lower <= upper).all())
