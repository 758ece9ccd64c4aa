"""DistillSparse: who wears the adapter, who learns when, and from exactly which loss."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs, assert_same_sums
from tiny_grpo import Recorder, fit, likes_a, loaded, module
from torch import Tensor
from transformers import AutoModelForCausalLM

from sparse_rl_lightning import DistillSparse, SparseGRPO
from sparse_rl_lightning.callbacks import ImportanceReweighting, MismatchSplit, SparsityAwareRejection
from sparse_rl_lightning.compressors import RKV, FullKV
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.modules import SparseAdapter
from sparse_rl_lightning.policies import PretrainedPolicy
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.retrieval.logprobs import LearnerPages
from sparse_rl_lightning.retrievers import Centroid

pytest.importorskip("peft", reason="peft is an extra (lora)")


def distill(**options: Any) -> DistillSparse:
    adapter = SparseAdapter(**{"r": 2, "lora_alpha": 4.0, **options.pop("adapter", {})})
    grpo = module(kind=DistillSparse, adapter=adapter, **options)
    assert isinstance(grpo, DistillSparse)
    grpo.configure_model()
    return grpo


def shaken(grpo: DistillSparse) -> DistillSparse:
    """With an adapter that does something: a fresh one adds nothing."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in grpo.policy.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return grpo


def scored_part(grpo: DistillSparse) -> Rollout:
    """A scored rollout of three ragged prompts, as a micro-batch."""
    scored = grpo.generator.generate([{"prompt": text, "answer": ""} for text in ("0123456789a", "b", "cdef0123a")])
    grpo.rescore(scored)
    grpo.score(scored)
    return scored.rollout


def test_what_is_dense_is_so_after_an_exception_in_an_adapter_step() -> None:
    grpo = shaken(distill())
    ids = torch.tensor([[3, 4, 5, 6]])
    rows = [{"prompt": "0123", "answer": ""}]
    expected, texts = grpo(ids), grpo.generator.generate(rows, grpo.val_sampling, dense=True).completions
    with grpo.adapter_on():
        assert not torch.equal(grpo.policy(ids).logits, expected)
    grpo.policy.enable_adapters()  # as a backward pass leaves it that was interrupted
    torch.testing.assert_close(grpo(ids), expected, rtol=0, atol=0)
    grpo.policy.enable_adapters()
    dense = grpo.generator.generate(rows, grpo.val_sampling, dense=True)
    assert dense.completions == texts
    mask = dense.rollout.completion_mask
    logprobs, _ = sequence_logprobs(grpo.policy, dense.rollout.sequences, mask)  # the adapter is off now
    assert_same_logprobs(logprobs, dense.rollout.sampler_logprobs)


def own_weights(grpo: SparseGRPO) -> Tensor:
    return torch.cat([p.detach().flatten() for n, p in grpo.policy.named_parameters() if "lora_" not in n])


def adapter_weights(grpo: SparseGRPO) -> Tensor:
    return torch.cat([p.detach().flatten() for n, p in grpo.policy.named_parameters() if "lora_" in n])


def test_the_adapter_is_worn_by_the_sparse_policy_alone() -> None:
    grpo = shaken(distill())
    rollout = scored_part(grpo)
    plain = module().policy_source.load()[0].eval()
    mask = rollout.completion_mask
    with torch.no_grad():
        dense, _ = sequence_logprobs(plain, rollout.sequences, mask)
    assert_same_logprobs(rollout.old_logprobs, dense)
    # the sampler drew with the adapter under its evictions, and replay sees both
    assert_same_logprobs(rollout.replay_logprobs, rollout.sampler_logprobs)
    grpo.policy.eval()
    unadapted, _ = grpo.learner.replayed(grpo.policy, rollout)
    assert (unadapted - rollout.replay_logprobs)[mask].abs().max() > 0.01
    validation = grpo.generator.generate([{"prompt": "0123a", "answer": ""}], grpo.val_sampling, dense=True).rollout
    with torch.no_grad():
        expected, _ = sequence_logprobs(plain, validation.sequences, validation.completion_mask)
    assert_same_logprobs(validation.sampler_logprobs, expected)


def test_a_rollout_is_served_to_the_policy_and_then_to_the_adapter() -> None:
    moved: list[tuple[bool, bool]] = []

    class Watched(DistillSparse):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(batch, batch_idx)
            self.before = own_weights(self), adapter_weights(self)

        def on_train_batch_end(self, *_: Any) -> None:
            own, adapter = self.before
            moved.append((not torch.equal(own, own_weights(self)), not torch.equal(adapter, adapter_weights(self))))

    grpo = module(kind=Watched, adapter=SparseAdapter(r=2, lora_alpha=4.0), steps_per_generation=2, num_iterations=2)
    fit(grpo, steps=12)
    policy, adapter = (True, False), (False, True)
    assert moved == 2 * (4 * [policy] + 2 * [adapter])


def test_the_policy_learns_as_in_sparse_grpo_while_the_adapter_does_nothing() -> None:
    """An adapter without learning rate stays zero, so every rollout is SparseGRPO's."""
    callbacks = [SparsityAwareRejection(threshold=1e-3), ImportanceReweighting(clip_max=1.5)]
    plain = module(steps_per_generation=2)
    fit(plain, steps=4, callbacks=callbacks)
    grpo = distill(steps_per_generation=2, adapter={"lr": 0.0})
    fit(grpo, steps=6, callbacks=callbacks)
    assert_same_sums(own_weights(grpo), own_weights(plain), size=own_weights(loaded()))


@pytest.mark.parametrize("policy_gradient", [True, False])
def test_the_adapters_loss_is_the_formula(policy_gradient: bool) -> None:
    grpo = shaken(distill(adapter={"kl_coef": 0.3, "policy_gradient": policy_gradient}, epsilon=0.1))
    part = scored_part(grpo)
    with torch.no_grad():  # the policy and the adapter have moved since the rollout, and the teacher with them
        for parameter in (*grpo._policy_parameters, *grpo._adapter_parameters):
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    part.keep = part.completion_mask & (torch.rand(part.keep.shape) > 0.5)  # concerns the policy's own loss only
    part.weights = torch.rand(part.keep.shape)
    teacher = grpo.learner.dense(grpo.policy, part)[0].detach().double()
    output = grpo.adapter_loss(part, grpo.denominators(part))
    new, old = grpo.replayed(part)[0].double(), part.replay_logprobs.double()
    want = 0.0
    for row in range(len(part)):
        tokens = part.completion_mask[row].nonzero().flatten()
        total = 0.0
        for t in tokens:
            w, advantage = (new[row, t] - old[row, t]).exp(), part.advantages[row].double()
            gain = torch.minimum(w * advantage, w.clamp(0.9, 1.1) * advantage)
            r = teacher[row, t] - new[row, t]
            total = total - (gain if policy_gradient else 0.0) + 0.3 * (r.exp() - r - 1)
        want = want + total / len(tokens)
    want = want / len(part)
    assert_same_sums(output.loss, want, size=1.0, share=1e-5)
    grpo.policy.enable_adapters()  # which makes its weights trainable again
    found = torch.autograd.grad(output.loss, grpo._adapter_parameters)
    expected = torch.autograd.grad(want, grpo._adapter_parameters)
    assert_same_sums(found, expected)
    assert max(float(g.abs().max()) for g in found) > 1e-4


@pytest.mark.slow
def test_distillation_brings_the_sparse_policy_nearer_to_the_dense_one() -> None:
    class Split(MismatchSplit):
        def __init__(self) -> None:
            super().__init__(every_n_rollouts=1)
            self.found: list[float] = []

        def on_rollout_scored(self, trainer: Any, module: Any, scored: Any) -> None:
            super().on_rollout_scored(trainer, module, scored)
            self.found.append(float(trainer.callback_metrics["mismatch_split/compression/kl_k3"]))

    split, adam = Split(), lambda groups: torch.optim.Adam(groups, lr=0.0)
    grpo = distill(adapter={"r": 8, "lr": 0.01, "kl_coef": 1.0, "policy_gradient": False}, optimizer=adam)
    before = own_weights(grpo)
    fit(grpo, steps=60, callbacks=[split])
    assert torch.equal(before, own_weights(grpo))  # its learning rate is 0
    assert sum(split.found[-10:]) < 0.8 * sum(split.found[:10])


def test_a_run_resumed_among_the_adapters_steps_is_the_run_that_went_on(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    def adam(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(groups, lr=0.01)

    options: dict[str, Any] = {"steps_per_generation": 2, "optimizer": adam, "adapter": {"lr": 0.02}}
    whole, again = distill(**options), distill(**options)
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    fit(whole, steps=8, callbacks=[saver], enable_checkpointing=True)
    fit(again, steps=8, ckpt_path=str(tmp_path / "step=3.ckpt"))
    assert torch.equal(own_weights(whole), own_weights(again))
    assert torch.equal(adapter_weights(whole), adapter_weights(again))


def test_export_is_the_dense_policy_with_the_adapter_beside_it(tmp_path: Path) -> None:
    grpo = shaken(distill())
    grpo.export(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert not [name for name, _ in plain.named_parameters() if "lora" in name]
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, grpo.forward(ids), atol=1e-5, rtol=0)
        plain.load_adapter(str(tmp_path / "sparse_adapter"))
        with grpo.adapter_on():
            torch.testing.assert_close(plain(ids).logits, grpo.policy(ids, use_cache=False).logits, atol=1e-5, rtol=0)


def test_under_retrieval_the_learner_chooses_pages_again(monkeypatch: pytest.MonkeyPatch) -> None:
    retriever = Centroid(budget=8, page_size=2, num_first_pages=1, num_last_pages=1, num_dense_layers=1)
    grpo = shaken(distill(compressor=FullKV(), retriever=retriever, max_completion_length=24))
    rollout = scored_part(grpo)
    assert_same_logprobs(rollout.replay_logprobs, rollout.sampler_logprobs)
    assert (rollout.old_logprobs - rollout.sampler_logprobs)[rollout.completion_mask].abs().max() > 0.01
    chosen: list[tuple[int, Tensor]] = []  # by layer, (B, H, t, P)
    own = LearnerPages.choose

    def choose(pages: LearnerPages, layer: int, *args: Any) -> Tensor:
        kept = own(pages, layer, *args)
        chosen.append((layer, kept))
        return kept

    monkeypatch.setattr(LearnerPages, "choose", choose)
    trainer = fit(grpo, steps=4)
    assert trainer.callback_metrics["distill/kl"] > 0
    assert {layer for layer, _ in chosen} == set(range(1, grpo.policy.config.num_hidden_layers))
    last = [kept[..., -1, :] for _, kept in chosen if kept.shape[-1] > 4]  # (B, H, P), of queries that must choose
    assert len(last) >= 4  # in every step
    assert all(bool((kept.sum(dim=-1) == 4).all()) for kept in last)
    with pytest.raises(ValueError, match=r"either evictions or a retriever: RKV moves entries"):
        distill(retriever=retriever)


def test_what_cannot_learn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"learns nothing.*kl_coef=0"):
        SparseAdapter(kl_coef=0, policy_gradient=False)
    with pytest.raises(ValueError, match=r"r must be at least 1.*r=0"):
        SparseAdapter(r=0)
    with pytest.raises(ValueError, match=r"accumulate_grad_batches=4 must divide steps_per_generation=2"):
        fit(distill(steps_per_generation=2), accumulate_grad_batches=4)  # two of the policy, two of the adapter
    flash = PretrainedPolicy("some/model", attn_implementation="flash_attention_2")
    with pytest.raises(ValueError, match=r"DistillSparse attends .*'flash_attention_2' takes no such mask"):
        DistillSparse(flash, RKV(budget=8, buffer=3, num_sinks=1, window=2), likes_a)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"pip install 'sparse-rl-lightning\[lora\]'"):
        module(kind=DistillSparse).configure_model()


def test_the_recorded_metrics_are_the_adapters_own() -> None:
    grpo, recorder = distill(steps_per_generation=1), Recorder()
    trainer = fit(grpo, steps=4, callbacks=[recorder])
    assert {"distill/loss", "distill/kl", "distill/clip_ratio", "entropy"} <= trainer.callback_metrics.keys()
    assert trainer.callback_metrics["distill/kl"] > 0
