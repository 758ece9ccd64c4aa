"""SparseGRPO end to end on a tiny real model: it learns, splits do not matter, bad input is named."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_same_sums
from lightning.pytorch import Trainer
from tiny_grpo import ALPHABET, Recorder, Rows, fit, likes_a, module, weights

from sparse_rl_lightning.callbacks.base import RolloutCallback
from sparse_rl_lightning.callbacks.corrections.rejection import SparsityAwareRejection
from sparse_rl_lightning.callbacks.corrections.reweighting import ImportanceReweighting
from sparse_rl_lightning.callbacks.guards.step_guard import StepGuard
from sparse_rl_lightning.compressors import RKV, Compressor, FullKV
from sparse_rl_lightning.downsampling import MaxReward, MaxVariance
from sparse_rl_lightning.modules import ReplayGRPO, SparseGRPO
from sparse_rl_lightning.policies import LoadedPolicy, LoraPolicy, TinyPolicy
from sparse_rl_lightning.records import Rollout, ScoredRollout
from sparse_rl_lightning.testing import character_tokenizer, tiny_model


@pytest.mark.parametrize("compressor", [FullKV(), RKV(budget=8, buffer=3, num_sinks=1, window=2)], ids=["full", "rkv"])
def test_it_learns(compressor: Compressor) -> None:
    recorder = Recorder()
    fit(module(compressor=compressor), 30, [SparsityAwareRejection(), ImportanceReweighting(), recorder])
    rewards = [float(s.rollout.rewards.mean()) for s in recorder.scored]
    assert sum(rewards[-5:]) / 5 > 3 * sum(rewards[:3]) / 3


def test_a_copy_and_a_pickle_ask_themselves_how_far_they_are() -> None:
    grpo = SparseGRPO(TinyPolicy(), RKV(budget=12), likes_a)
    for other in (copy.deepcopy(grpo), pickle.loads(pickle.dumps(grpo))):
        assert other.generator.version.args[0] is other


@pytest.mark.parametrize(
    ("loss_type", "options"),
    [
        *((name, {"denominator": "kept"}) for name in ("grpo", "dapo", "dr_grpo")),
        ("bnpo", {"max_completion_length": 1}),  # the mean of micro-batches with as many tokens each
    ],
)
def test_micro_batches_do_not_change_the_step(loss_type: str, options: dict[str, Any]) -> None:
    results = []
    for parts in (1, 2, 8):
        grpo = module(steps_per_generation=parts, loss_type=loss_type, beta=0.01, **options)
        fit(grpo, 3, [SparsityAwareRejection(threshold=0.3)], accumulate_grad_batches=parts)
        results.append(weights(grpo))
    start = weights(module_configured())
    assert (results[0] - start).abs().max() > 1e-3
    for other in results[1:]:
        assert_same_sums(other, results[0], size=start)


def module_configured() -> SparseGRPO:
    grpo = module()
    grpo.configure_model()
    return grpo


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_penalty_begins_at_zero_in_any_precision(precision: str) -> None:
    """The reference is no wider than the policy, whose weights Lightning may have rounded."""
    grpo = module(beta=0.1)
    trainer = fit(grpo, 1, precision=precision)
    assert float(trainer.callback_metrics["kl"]) == 0
    assert {value.dtype for _, value in grpo._reference[0].named_buffers()} == {torch.float32}


def test_adapters_with_a_penalty_load_on_several_ranks() -> None:
    pytest.importorskip("peft", reason="peft is an extra")
    grpo = module(beta=0.1)
    grpo.policy_source = LoraPolicy(grpo.policy_source, r=2)
    grpo._world_size = 2
    grpo.configure_model()
    assert "reference policy" not in grpo.same_on_ranks  # it is the policy itself


def test_blocks_are_served_as_planned() -> None:
    recorder = Recorder()
    trainer = fit(module(steps_per_generation=2, num_iterations=3), 9, [recorder], accumulate_grad_batches=2)
    assert len(recorder.scored) == 3  # 6 micro-batches, 3 optimizer steps each
    assert trainer.global_step == 9
    prompts = [tuple(row["prompt"] for row in s.rows) for s in recorder.scored]
    assert len(set(prompts)) == 3


def test_everything_rejected_is_a_zero_step() -> None:
    class RejectAll(RolloutCallback):
        def correct(self, trainer: Trainer, module: Any, part: Rollout) -> None:
            part.keep &= False

    grpo = module(denominator="kept")
    fit(grpo, 2, [RejectAll()])
    assert (weights(grpo) == weights(module_configured())).all()


def test_corrections_come_before_what_reads() -> None:
    recorder = Recorder()
    trainer = fit(module(), 2, [recorder, SparsityAwareRejection(threshold=0.9)])
    rejected = [~s.rollout.keep.any(dim=1) for s in recorder.scored]
    assert any(r.any() for r in rejected)
    assert float(trainer.callback_metrics["rejection_rate"]) == pytest.approx(float(rejected[-1].float().mean()))


def test_dense_rollouts_have_no_mismatch_and_sparse_ones_do() -> None:
    dense = fit(module(compressor=FullKV()), 1).callback_metrics
    sparse = fit(module(), 1).callback_metrics
    assert float(dense["sampling/sampling_logp_difference/max"]) < 2e-5
    assert float(sparse["sampling/sampling_logp_difference/max"]) > 1e-3
    assert 0 < float(sparse["kv/saving_final"]) < 1
    assert float(dense["kv/saving_final"]) == 0


def test_on_policy_first_step_has_ratio_one() -> None:
    """One optimizer step per rollout: learner and old log-probs agree, so nothing can be clipped."""
    metrics = fit(module(beta=0.1), 1).callback_metrics
    assert float(metrics["clip_ratio/region_mean"]) == 0
    assert abs(float(metrics["kl"])) < 1e-9


def test_reference_policy_stays_out_of_the_checkpoint() -> None:
    grpo = module(beta=0.1)
    trainer = fit(grpo, 3)
    assert float(trainer.callback_metrics["kl"]) > 0
    assert all(name.startswith("policy.") for name in grpo.state_dict())
    reference = torch.cat([p.flatten() for p in grpo._reference[0].parameters()])
    assert (reference == weights(module_configured())).all()


def test_oversampling_keeps_informative_groups() -> None:
    def only_early_prompts(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
        return [
            text.count("a") / 10 if len(prompt) > 12 else 1.0 for prompt, text in zip(prompts, completions, strict=True)
        ]

    seen: list[ScoredRollout] = []
    recorder = Recorder()
    grpo = module(only_early_prompts, oversampling=2.0, max_completion_length=24)
    trainer = fit(grpo, 4, [recorder])
    seen = recorder.scored
    assert all(len(s.completions) == 16 for s in seen)
    assert len(grpo.block.rollout) == 8
    spread = grpo.block.rollout.advantages.view(2, 4).abs().sum(1) > 0
    available = sum(len(row["prompt"]) > 12 for row in seen[-1].rows)
    assert int(spread.sum()) <= min(2, available)
    assert trainer.global_step == 4


def drawing(rule: Any, **options: Any) -> SparseGRPO:
    return module(downsampling=rule, max_completion_length=10, **options)


@pytest.mark.parametrize("kind", [SparseGRPO, ReplayGRPO])
def test_more_samples_are_drawn_than_trained_on(kind: Any) -> None:
    recorder = Recorder()
    grpo = drawing(MaxVariance(7), kind=kind, beta=0.1, oversampling=2.0)
    trainer = fit(grpo, 3, [recorder])
    drawn = [grpo.generator.sampling.num_generations, grpo.plan(4).num_generations]
    assert drawn == [7, 4]
    for one in recorder.scored:
        assert len(one.completions) == len(one.rollout) == 4 * 4  # of 4 x 7
        advantages = one.rollout.advantages.view(4, 4)
        torch.testing.assert_close(advantages.sum(1), torch.zeros(4), atol=1e-5, rtol=0)  # among those kept
    assert len(grpo.block.rollout) == 2 * 4
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert values["reward_std"] >= values["downsampling/drawn/reward_std"]
    assert trainer.global_step == 3


def test_drawing_as_many_as_are_trained_on_changes_nothing() -> None:
    results = []
    for rule in (None, MaxReward(4)):
        grpo = drawing(rule)
        trainer = fit(grpo, 3)
        metrics = {n: float(v) for n, v in trainer.callback_metrics.items() if not n.startswith(("time", "memory"))}
        results.append((metrics, weights(grpo)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert not any(name.startswith("downsampling") for name in results[0][0])


def test_truncated_completions_can_be_masked() -> None:
    grpo = module(mask_truncated_completions=True, max_completion_length=1)
    fit(grpo, 1)
    part = grpo.block.rollout
    assert (grpo.loss.mask(part).any(dim=1) == part.finished).all()


def test_validation_reports_dense_and_sparse() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    metrics = trainer.validate(module(), datamodule=Rows(), verbose=False)[0]
    assert {"val/reward_dense", "val/reward_sparse", "val/length_dense", "val/length_sparse"} <= metrics.keys()


def test_reload_from_a_checkpoint(tmp_path: Path) -> None:
    grpo = module()
    trainer = fit(grpo, 2)
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)
    again = SparseGRPO.load_from_checkpoint(
        path, policy=LoadedPolicy(tiny_like(), character_tokenizer(ALPHABET)), compressor=FullKV(), reward_funcs=likes_a
    )
    assert (weights(again) == weights(grpo)).all()


def tiny_like(hidden_size: int = 32) -> Any:
    return tiny_model(vocab_size=len(character_tokenizer(ALPHABET)), hidden_size=hidden_size, seed=9)


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer = fit(module(), 1)
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)
    other = LoadedPolicy(tiny_like(hidden_size=64), character_tokenizer(ALPHABET))
    before = torch.cat([p.detach().flatten() for p in other.model.parameters()])
    grpo = SparseGRPO(other, FullKV(), likes_a)
    with pytest.raises(ValueError, match="checkpoint is of another model"):
        Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=2).fit(
            grpo, datamodule=Rows(prompts_per_rollout=4), ckpt_path=path
        )
    assert (torch.cat([p.detach().flatten() for p in other.model.parameters()]) == before).all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_generations": 1}, "num_generations must be at least 2"),
        ({"beta": -1.0}, "beta must be at least 0, got"),
        ({"temperature": -1.0}, "temperature must be a finite number, 0"),
        ({"temperature": 0.0}, "temperature must be above 0 in training"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights has 2 numbers for 1"),
        ({"num_iterations": 0}, "must be at least 1"),
    ],
)
def test_bad_arguments(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        module(**options)


def test_numbers_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"4 prompts x num_generations=4 = 16 sequences.*steps_per_generation=3"):
        fit(module(steps_per_generation=3))
    with pytest.raises(ValueError, match=r"accumulate_grad_batches=4"):
        fit(module(steps_per_generation=2), accumulate_grad_batches=4)


def test_a_reward_that_raises_names_the_sample() -> None:
    def broken(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
        return [1 / (len(p) - 10) for p in prompts]

    with pytest.warns(
        UserWarning,
        match=r"reward function broken failed on 4 sample\(s\), first: it raised .*by zero.* on sample \d+,",
    ):
        fit(module(broken), 4)


def test_a_nan_reward_names_the_sample() -> None:
    with pytest.raises(ValueError, match=r"(sample|sequence) 0"):
        fit(module(lambda completions, **_: [float("nan")] * len(completions)), 1)


def test_a_policy_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    grpo = module()
    grpo.configure_model()

    class Break(RolloutCallback):
        def on_rollout_scored(self, trainer: Trainer, module: Any, scored: ScoredRollout) -> None:
            module.policy.model.norm.weight.data.fill_(float("nan"))

    with pytest.raises(ValueError, match=r"optimizer step 1 is not finite.*step_000001_rank_0.pt"):
        fit(grpo, 1, [Break(), StepGuard(max_in_a_row=1)], default_root_dir=tmp_path)


@pytest.mark.parametrize(("parts", "accumulate"), [(16, 4), (8, 2)])
def test_every_plan_that_divides_can_be_trained(parts: int, accumulate: int) -> None:
    trainer = fit(module(steps_per_generation=parts), 2, accumulate_grad_batches=accumulate)
    assert trainer.global_step == 2


def test_a_block_of_an_interrupted_fit_is_forgotten() -> None:
    class Stop(RolloutCallback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            raise ZeroDivisionError

    grpo = module(num_iterations=3)
    with pytest.raises(ZeroDivisionError):
        fit(grpo, 3, [Stop()])
    assert not grpo.block.is_spent
    recorder = Recorder()
    fit(grpo, 3, [recorder])
    assert len(recorder.scored) == 1


def test_a_checkpoint_inside_an_accumulation_window_is_warned_about(tmp_path: Path) -> None:
    class Save(RolloutCallback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "a.ckpt")

    with pytest.warns(UserWarning, match="between two optimizer steps"):
        fit(module(steps_per_generation=2), 1, [Save()], accumulate_grad_batches=2)


def test_half_precision_leaves_the_rotary_positions_alone() -> None:
    """bf16-true casts every buffer; a frequency rounded to 8 bits is off by radians at long positions."""
    want = module_configured().policy.model.rotary_emb.inv_freq.clone()
    grpo = module()
    fit(grpo, 1, precision="bf16-true")
    got = grpo.policy.model.rotary_emb.inv_freq
    assert got.dtype == torch.float32
    assert (got == want).all()
