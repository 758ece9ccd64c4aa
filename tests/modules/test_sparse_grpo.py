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
from tiny_grpo import ALPHABET, Recorder, Rows, fit, likes_a, loaded, module, weights
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.callbacks.base import RolloutCallback
from sparse_rl_lightning.callbacks.corrections.rejection import SparsityAwareRejection
from sparse_rl_lightning.callbacks.corrections.reweighting import ImportanceReweighting
from sparse_rl_lightning.compressors import RKV, Compressor, FullKV
from sparse_rl_lightning.downsampling import MaxReward, MaxVariance
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.modules import ReplayGRPO, SparseGRPO
from sparse_rl_lightning.policies import LoadedPolicy, LoraPolicy, TinyPolicy
from sparse_rl_lightning.records import Rollout
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
    for parts in (1, 8):
        grpo = module(steps_per_generation=parts, loss_type=loss_type, beta=0.01, **options)
        fit(grpo, 2, [SparsityAwareRejection(threshold=0.3)], accumulate_grad_batches=parts)
        results.append(weights(grpo))
    start = weights(loaded())
    assert (results[0] - start).abs().max() > 1e-3
    assert_same_sums(results[1], results[0], size=start)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_penalty_begins_at_zero_in_any_precision(precision: str) -> None:
    """The reference is no wider than the policy, whose weights Lightning may have rounded."""
    grpo = module(beta=0.1)
    trainer = fit(grpo, 1, precision=precision)
    assert float(trainer.callback_metrics["kl"]) == 0
    assert float(trainer.callback_metrics["clip_ratio/region_mean"]) == 0  # learner and old log-probs agree
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
    assert (weights(grpo) == weights(loaded())).all()


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


def test_reference_policy_stays_out_of_the_checkpoint() -> None:
    grpo = module(beta=0.1)
    trainer = fit(grpo, 2)
    assert float(trainer.callback_metrics["kl"]) > 0
    assert all(name.startswith("policy.") for name in grpo.state_dict())
    reference = torch.cat([p.flatten() for p in grpo._reference[0].parameters()])
    assert (reference == weights(loaded())).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps_per_generation": 2.0}, "steps_per_generation must be a whole number"),
        ({"num_iterations": 2.0}, "num_iterations must be a whole number"),
        ({"loss_type": ["grpo"]}, "loss takes a name or a number for each option, got GRPOLoss"),
        ({"epsilon": [0.2]}, "loss takes a name or a number for each option"),
        ({"head_chunk_size": None}, "head_chunk_size must be a whole number, at least 1, got"),
        ({"reward_weights": 0.5, "reward": [likes_a, likes_a]}, "reward_weights has 1 numbers for 2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_no_option_is_refused_before_anything_is_drawn(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        module(**options)


def test_oversampling_that_leaves_out_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"oversampling=1\.1 leaves out none of data.prompts_per_rollout=4 prompts"):
        fit(module(oversampling=1.1), 1)


def test_oversampling_keeps_informative_groups() -> None:
    def only_early_prompts(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
        pairs = zip(prompts, completions, strict=True)
        return [text.count("a") / 10 if len(prompt) > 12 else 1.0 for prompt, text in pairs]

    recorder = Recorder()
    grpo = module(only_early_prompts, oversampling=2.0, max_completion_length=24)
    trainer = fit(grpo, 4, [recorder])
    assert all(len(s.completions) == 16 for s in recorder.scored)
    assert len(grpo.block.rollout) == 8
    spread = grpo.block.rollout.advantages.view(2, 4).abs().sum(1) > 0
    available = sum(len(row["prompt"]) > 12 for row in recorder.scored[-1].rows)
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


def test_reload_from_a_checkpoint(tmp_path: Path) -> None:
    grpo = module()
    trainer = fit(grpo, 2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    tokenizer = character_tokenizer(ALPHABET)
    other = LoadedPolicy(tiny_model(vocab_size=len(tokenizer), hidden_size=32, seed=9), tokenizer)
    options = {"policy": other, "compressor": FullKV(), "reward_funcs": likes_a}
    again = SparseGRPO.load_from_checkpoint(tmp_path / "a.ckpt", **options)
    assert (weights(again) == weights(grpo)).all()


def test_numbers_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"4 prompts x num_generations=4 = 16 sequences.*steps_per_generation=3"):
        fit(module(steps_per_generation=3))
    with pytest.raises(ValueError, match=r"accumulate_grad_batches=4"):
        fit(module(steps_per_generation=2), accumulate_grad_batches=4)


def test_every_plan_that_divides_can_be_trained() -> None:
    assert fit(module(steps_per_generation=16), 2, accumulate_grad_batches=4).global_step == 2


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


def test_half_precision_leaves_the_rotary_positions_alone() -> None:
    """bf16-true casts every buffer; a frequency rounded to 8 bits is off by radians at long positions."""
    want = loaded().policy.model.rotary_emb.inv_freq.clone()
    grpo = module()
    fit(grpo, 1, precision="bf16-true")
    got = grpo.policy.model.rotary_emb.inv_freq
    assert got.dtype == torch.float32
    assert (got == want).all()


STEPS, ROLLOUTS, GROUP = 4, 3, 4
THRESHOLD, CAP = 0.7, 1.5
OPTIONS: dict[str, Any] = {
    "steps_per_generation": STEPS,
    "compressor": RKV(budget=6, buffer=2, num_sinks=0, window=2),
    "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
}


class Prompts(RolloutCallback):
    """Keeps the rows of every rollout."""

    def __init__(self) -> None:
        self.rows: list[Rows] = []

    def on_rollout_start(self, trainer: Any, module: Any, rows: Rows) -> None:
        self.rows.append(rows)


def logprobs_of(policy: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Log-probs (B, T) of every token but the first, by transformers alone."""
    everything = policy(rollout.sequences).logits.log_softmax(dim=-1)[:, :-1]
    own = everything.gather(-1, rollout.sequences[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(own, (1, 0))


def plain_loop(grpo: SparseGRPO, rows: list[Rows], corrects: bool) -> list[float]:
    """Train on the library's samples with nothing else of the library; returns the largest ratio of every step."""
    policy, largest = grpo.policy, []
    optimizer = grpo.optimizer_factory(policy.parameters())
    for index, own in enumerate(rows):
        scored = grpo.generator.roll_out(own, index)
        rollout, mask = scored.rollout, scored.rollout.completion_mask
        rewards = torch.tensor(likes_a([], scored.completions)).view(-1, GROUP)
        deviations = rewards.std(dim=1, keepdim=True)
        advantages = ((rewards - rewards.mean(dim=1, keepdim=True)) / (deviations + 1e-6)).flatten()
        with torch.no_grad():
            old = logprobs_of(policy, rollout)
        xi = torch.where(mask, old - rollout.sampler_logprobs, 0.0).exp()
        keep, factor = mask, torch.ones_like(old)
        if corrects:
            lost = (torch.where(mask, xi, 1.0) < THRESHOLD).any(dim=1, keepdim=True)
            assert 0 < int(lost.sum()) < len(lost)
            keep, factor = mask & ~lost, xi.clamp(max=CAP)
        for part in grpo.plan(len(own)).order(index, grpo.generator.sampling.seed, old.device).chunk(STEPS):
            ratio = (logprobs_of(policy, rollout[part]) - old[part]).exp()
            one = torch.minimum(ratio * advantages[part, None], ratio.clamp(0.8, 1.2) * advantages[part, None])
            per_sequence = (one * factor[part] * keep[part]).sum(dim=1) / mask[part].sum(dim=1)
            optimizer.zero_grad()
            (-per_sequence.mean()).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            largest.append(float(ratio.detach().where(keep[part], 0.0).max()))
    return largest


@pytest.mark.parametrize("corrects", [False, True])
def test_weights_are_those_of_a_plain_loop(corrects: bool) -> None:
    prompts, callbacks = Prompts(), [SparsityAwareRejection(THRESHOLD), ImportanceReweighting(clip_max=CAP)]
    trained = module(**OPTIONS)
    used = [prompts, *(callbacks if corrects else [])]
    fit(trained, steps=STEPS * ROLLOUTS, callbacks=used, gradient_clip_val=1.0)
    other = loaded(**OPTIONS)
    before = weights(other).clone()
    largest = plain_loop(other, prompts.rows, corrects)
    assert len(prompts.rows) == ROLLOUTS
    assert [largest[0], max(largest) > 1.05] == [pytest.approx(1.0, abs=1e-5), True]  # later steps are off-policy
    assert_same_sums(weights(trained), weights(other), size=before, share=1e-3)
