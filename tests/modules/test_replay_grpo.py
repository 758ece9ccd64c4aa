"""ReplayGRPO: its gradient is that of the compressed decode itself, its objectives are what they say, splits vanish."""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs, assert_same_sums
from lightning.pytorch import Trainer
from tiny_grpo import ALPHABET, Recorder, fit, grouped, likes_a, weights
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from sparse_rl_lightning import ReplayGRPO, SparseGRPO
from sparse_rl_lightning.budgets import Adaptive
from sparse_rl_lightning.callbacks import ImportanceReweighting, MismatchSplit, RunSummary, SparsityAwareRejection
from sparse_rl_lightning.compressors import RKV, Compressor, SnapKV
from sparse_rl_lightning.losses import policy_loss
from sparse_rl_lightning.modules import DistillSparse, LearnerOptions, SparseAdapter
from sparse_rl_lightning.policies import LoadedPolicy, LoraPolicy, PolicySource, PretrainedPolicy
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.report import page, read_run, summary_text
from sparse_rl_lightning.report.record import ROUNDING
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

TIGHT = RKV(budget=8, buffer=3, num_sinks=1, window=2)


def module(
    compressor: Compressor = TIGHT,
    attention: str = "sdpa",
    adapters: dict[str, Any] | None = None,
    kind: type[SparseGRPO] = ReplayGRPO,
    **kwargs: Any,
) -> Any:
    tokenizer = character_tokenizer(ALPHABET)
    policy = tiny_model(vocab_size=len(tokenizer), hidden_size=32, initializer_range=0.2, eos_token_id=1)
    policy.config._attn_implementation = attention
    options: dict[str, Any] = {"num_generations": 4, "max_completion_length": 12, "seed": 3, **kwargs}
    source: PolicySource = LoadedPolicy(policy, tokenizer)
    return kind(
        source if adapters is None else LoraPolicy(source, **adapters), compressor, likes_a,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), **grouped(**options),
    )  # fmt: skip


ROWS = [{"prompt": ALPHABET[i:] + "a", "answer": ""} for i in (0, 3, 11)]


def part_of(grpo: ReplayGRPO) -> Rollout:
    """A scored rollout of three ragged prompts."""
    grpo.configure_model()
    scored = grpo.generator.generate(ROWS)
    grpo.rescore(scored)
    grpo.score(scored)
    return scored.rollout


# ---------------------------------------------------------------- against the decode, step by step


def decode_logprobs(model: Any, rollout: Rollout, row: int, temperature: float) -> list[Tensor]:
    """Log-probs of a completion with gradient, token by token over a cache of exactly the entries that lived then.

    Nothing here is a mask: a dead entry is taken out of the list. The prompt is read at once, as the sampler does.
    """
    death, prompt = rollout.evictions.death[:, row], int(rollout.prompt_lengths[row])
    tokens = rollout.sequences[row, : prompt + int(rollout.completion_lengths[row])]
    caches: dict[tuple[int, int], list[tuple[int, Tensor, Tensor]]] = {}
    logprobs = []
    for t, token in enumerate(tokens[:-1]):
        hidden = model.model.embed_tokens(token)[None, None]
        cos, sin = model.model.rotary_emb(hidden, torch.tensor([[t]]))
        for number, layer in enumerate(model.model.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            q, k, v = (
                projection(normed).view(1, 1, -1, attention.head_dim).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            out = []
            for head in range(k.shape[1]):
                cache = caches.setdefault((number, head), [])
                cache[:] = [entry for entry in cache if t < int(death[number, head, entry[0]])]
                cache.append((t, k[0, head, 0], v[0, head, 0]))
                keys, values = torch.stack([e[1] for e in cache]), torch.stack([e[2] for e in cache])
                group = q.shape[1] // k.shape[1]
                queries = q[0, head * group : (head + 1) * group, 0]
                out.append((queries @ keys.T * attention.scaling).softmax(-1) @ values)
            hidden = hidden + attention.o_proj(torch.cat(out).flatten())[None, None]
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        if t + 1 >= prompt:
            logits = model.lm_head(model.model.norm(hidden))[0, 0] / temperature
            logprobs.append(logits.log_softmax(-1)[tokens[t + 1]])
    return logprobs


def decode_loss(grpo: ReplayGRPO, model: Any, rollout: Rollout, old: list[list[Tensor]]) -> Tensor:
    """The clipped objective, written out: mean over sequences of means over tokens of -min(w A, clip(w) A)."""
    losses = []
    for row, advantage in enumerate(rollout.advantages):
        new = torch.stack(decode_logprobs(model, rollout, row, grpo.generator.sampling.temperature))
        w = (new - torch.stack(old[row])).exp()
        losses.append(-torch.minimum(w * advantage, w.clamp(0.8, 1.2) * advantage).mean())
    return torch.stack(losses).mean()


ADAPTERS: dict[str, Any] = {"r": 2, "lora_alpha": 4.0}


@pytest.mark.parametrize(
    ("compressor", "adapters"),
    [
        (TIGHT, None),
        (SnapKV(budget=8, buffer=3, num_sinks=1, window=2, budget_rule=Adaptive(floor=4)), None),
        (TIGHT, ADAPTERS),
    ],
    ids=["rkv", "per head", "adapters"],
)
def test_sparse_gradient_is_that_of_the_compressed_decode(
    compressor: Compressor, adapters: dict[str, Any] | None
) -> None:
    if adapters is not None:
        pytest.importorskip("peft", reason="peft is an extra")
    grpo = module(compressor, adapters=adapters, temperature=0.8)
    grpo.configure_model()
    policy = grpo.policy
    learned = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    assert (len(learned) < len(list(policy.parameters()))) == (adapters is not None)
    scale = 0.01 if adapters is None else 0.05
    with torch.no_grad():
        for parameter in learned if adapters is not None else []:  # fresh ones add nothing
            parameter.add_(0.1 * torch.randn_like(parameter))
    rollout = part_of(grpo)
    with torch.no_grad():
        old = [decode_logprobs(policy, rollout, row, 0.8) for row in range(len(rollout))]
        for parameter in learned:  # the learner has moved since, so that some ratios are clipped
            parameter.add_(scale * torch.randn_like(parameter))
    for row, want in enumerate(old):
        got = rollout.old_logprobs[row][rollout.completion_mask[row]]
        torch.testing.assert_close(got, torch.stack(want), atol=2e-5, rtol=0)
    ratio = (grpo.learner.logprobs(policy, rollout)[0] - rollout.old_logprobs).exp()
    assert bool((ratio > 1.2).any())
    assert bool((ratio < 0.8).any())
    loss = grpo.micro_batch_loss(rollout, grpo.denominators(rollout)).loss
    want = decode_loss(grpo, policy, rollout, old)
    torch.testing.assert_close(loss, want, atol=1e-5, rtol=0)
    pairs = zip(*(torch.autograd.grad(value, learned) for value in (loss, want)), strict=True)
    differences = [(float((a - b).abs().max()), float(b.abs().max())) for a, b in pairs]
    assert max(size for _, size in differences) > 1e-2
    assert max(difference for difference, _ in differences) < 1e-5


# ---------------------------------------------------------------- what the objectives are


def gradient(grpo: ReplayGRPO, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(grpo.policy.parameters()))])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_mixed_is_the_weighted_sum_of_the_others(alpha: float) -> None:
    losses, gradients = [], []
    for objective in ("sparse", "dense", "mixed"):
        grpo = module(replay_objective=objective, alpha=alpha)
        rollout = part_of(grpo)
        if objective != "sparse":  # callbacks concern the dense term alone
            rollout.keep = rollout.completion_mask & (torch.arange(len(rollout)) % 3 > 0)[:, None]
            rollout.weights = rollout.old_logprobs.sub(rollout.replay_logprobs).exp()
        disturbed(grpo)
        losses.append(grpo.micro_batch_loss(rollout, grpo.denominators(rollout)).loss)
        gradients.append(gradient(grpo, losses[-1]))
    assert (gradients[0] - gradients[1]).abs().max() > 1e-2
    for (sparse, dense, mixed), size in ((losses, 1.0), (gradients, None)):
        assert_same_sums(mixed, alpha * sparse + (1 - alpha) * dense, size, share=1e-5)


def disturbed(grpo: ReplayGRPO) -> ReplayGRPO:
    """With weights that the rollout was not drawn with."""
    with torch.no_grad():
        for index, parameter in enumerate(grpo.policy.parameters()):
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    return grpo


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("lost", [(), (0, 4, 5), tuple(range(12))])
def test_rejected_adds_the_sparse_objective_of_what_is_rejected_as_a_whole(
    lost: tuple[int, ...], loss_type: str
) -> None:
    """Tokens that are dropped from a sequence of which others are kept are not replayed."""
    grpo = module(replay_objective="rejected", loss_type=loss_type)
    rollout = part_of(grpo)
    mask = rollout.completion_mask
    rollout.keep = mask & (mask.cumsum(dim=1) != 2)  # the first completion token of each stays
    rollout.keep[list(lost)] = False
    rollout.weights = rollout.old_logprobs.sub(rollout.replay_logprobs).exp()
    disturbed(grpo)
    found = grpo.micro_batch_loss(rollout, grpo.denominators(rollout))
    items = {"loss_type": loss_type, "num_items": len(rollout) if loss_type == "grpo" else mask.sum()}
    dense, replayed = grpo.learner.logprobs(grpo.policy, rollout)[0], grpo.replayed(rollout)[0]
    rest = {"keep": rollout.keep, "weights": rollout.weights, **items}
    want = policy_loss(dense, rollout.old_logprobs, rollout.advantages, mask, **rest).loss
    own = torch.zeros_like(mask)
    own[list(lost)] = True
    other = {"keep": mask & own, **items}
    want = want + policy_loss(replayed, rollout.replay_logprobs, rollout.advantages, mask, **other).loss
    assert_same_sums(found.loss, want, size=1.0, share=1e-6)
    assert_same_sums(gradient(grpo, found.loss), gradient(grpo, want), share=1e-5)
    assert any(name.startswith("sparse/") for name in found.metrics) == bool(lost)


def test_dense_takes_xi_from_the_replay_and_forgets_the_record() -> None:
    recorder, grpo = Recorder(), module(replay_objective="dense", num_iterations=2)
    trainer = fit(grpo, 1, [SparsityAwareRejection(), ImportanceReweighting(), recorder])
    assert 0 < trainer.callback_metrics["time/replay"] < trainer.callback_metrics["time/rescoring"] + 60
    rollout = recorder.scored[0].rollout
    mask, xi = rollout.completion_mask, (rollout.old_logprobs - rollout.replay_logprobs).exp()
    torch.testing.assert_close(rollout.weights[mask], xi[mask], atol=0, rtol=1e-6)
    assert not torch.equal(rollout.replay_logprobs, rollout.sampler_logprobs)  # rounding differs
    assert_same_logprobs(rollout.replay_logprobs, rollout.sampler_logprobs)
    assert rollout.evictions is None
    logprobs, _ = grpo.learner.logprobs(grpo.policy, rollout)
    factors = {"keep": rollout.keep, "weights": rollout.weights}
    want = policy_loss(logprobs, rollout.old_logprobs, rollout.advantages, mask, **factors).loss
    assert_same_sums(grpo.micro_batch_loss(rollout, grpo.denominators(rollout)).loss, want, size=1.0, share=1e-6)


def test_sparse_has_no_mismatch_left_and_both_validations_are_reported() -> None:
    trainer = fit(module(), 4, [SparsityAwareRejection(), ImportanceReweighting()], limit_val_batches=1)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["mismatch/kl_k3"] < 1e-9
    assert metrics["rejection_rate"] == 0
    assert abs(metrics["mismatch/ratio_p05"] - 1) < 2e-5
    assert metrics["kv/saving_final"] > 0.1
    assert 0 < metrics["kv/record_bytes"] < metrics["kv/record_dense_bytes"]
    assert {"val/reward_dense", "val/reward_sparse"} <= metrics.keys()


@pytest.mark.parametrize("objective", ["sparse", "dense"])
def test_a_report_tells_compression_from_rounding(objective: str, tmp_path: Path) -> None:
    """Under ``sparse`` the numbers of ``mismatch/`` are of rounding, and a page must not sell them as compression."""
    summary = RunSummary(num_problems=0, folder=tmp_path)
    fit(module(replay_objective=objective), 3, [SparsityAwareRejection(), MismatchSplit(2), summary])
    run = read_run(tmp_path)
    replays = objective == "sparse"
    assert [len(run.points(key)) for key in ("mismatch/kl_k3", ROUNDING)] == ([2, 3] if replays else [3, 2])
    told = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["summary"]
    assert told["rounding_kl_k3"] < 1e-9 < 1e-6 < told["mismatch_kl_k3"]
    assert f"{told['rounding_kl_k3']:.1e}" in summary_text(run)
    worst = {kind for one in run.worst for kind in one["kinds"]}
    assert ("most mismatched" in worst) == (not replays)
    assert ("under the full cache as under the sampler" in page(run)) == (not replays)


def test_rounding_that_nothing_acts_on_is_no_reason_to_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrections of SparseGRPO see rounding; both uses of replay keep it from them."""
    monkeypatch.setattr("sparse_rl_lightning.callbacks.monitors.mismatch_split.ROUNDING", 0.0)
    said: dict[str, int] = {}
    modules = {"sparse": module(), "dense": module(replay_objective="dense"), "none": module(kind=SparseGRPO)}
    for name, grpo in modules.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(grpo, 1, [SparsityAwareRejection(), MismatchSplit(1, tolerance=1e-30)])
        said[name] = sum("rounding moves the sampler" in str(one.message) for one in caught)
    assert said == {"sparse": 0, "dense": 0, "none": 1}


@pytest.mark.parametrize("objective", ["sparse", "dense", "mixed", "rejected"])
def test_adapters_train_under_replay(objective: str) -> None:
    pytest.importorskip("peft", reason="peft is an extra")
    grpo, recorder = module(adapters=ADAPTERS, replay_objective=objective, beta=0.1, steps_per_generation=2), Recorder()
    grpo.configure_model()
    before = {name: parameter.detach().clone() for name, parameter in grpo.policy.named_parameters()}
    callbacks = [SparsityAwareRejection(), ImportanceReweighting(), MismatchSplit(1), recorder]
    metrics = fit(grpo, 4, callbacks).callback_metrics
    moved = {name for name, p in grpo.policy.named_parameters() if not torch.equal(p, before[name])}
    assert len(moved) == len([name for name in before if "lora_" in name]) > 0
    assert all("lora_" in name for name in moved)
    assert float(metrics["kl"]) > 0  # the reference is the policy without its adapters
    for scored in recorder.scored[1:]:  # the sampler drew with the adapters, and replay finds its numbers again
        rollout = scored.rollout
        replayed = rollout.old_logprobs if objective == "sparse" else rollout.replay_logprobs
        assert_same_logprobs(replayed, rollout.sampler_logprobs)
    assert float(metrics["mismatch_split/rounding/kl_k3"]) < 1e-9 < float(metrics["mismatch_split/compression/kl_k3"])


@pytest.mark.parametrize("objective", ["sparse", "dense", "mixed", "rejected"])
def test_micro_batches_and_packing_do_not_change_the_step(objective: str) -> None:
    results = []
    learners = [LearnerOptions(), LearnerOptions(), LearnerOptions(10_000), LearnerOptions(30, head_chunk_size=5)]
    for parts, learner in zip((1, 8, 4, 4), learners, strict=True):
        grpo = module(replay_objective=objective, steps_per_generation=parts, beta=0.01, learner=learner)
        passes: list[int] = []
        grpo.configure_model()
        note = lambda _module, _args, options, passes=passes: passes.append(options["input_ids"].numel())  # noqa: E731
        grpo.policy.model.register_forward_pre_hook(note, with_kwargs=True)
        fit(grpo, 2, [SparsityAwareRejection(0.3), ImportanceReweighting()], accumulate_grad_batches=parts)
        results.append((weights(grpo), max(passes)))
    assert results[3][1] <= 30 < results[0][1]
    untrained = module()
    untrained.configure_model()
    assert (results[0][0] - weights(untrained)).abs().max() > 1e-3
    for other, _ in results[1:]:
        assert_same_sums(other, results[0][0], size=weights(untrained))


@pytest.mark.parametrize("objective", ["sparse", "dense", "mixed", "rejected"])
def test_the_order_of_sequences_does_not_change_loss_and_gradient(objective: str) -> None:
    grpo = module(replay_objective=objective)
    rollout = part_of(grpo)
    items = grpo.denominators(rollout)
    results = []
    for order in (torch.arange(len(rollout)), torch.randperm(len(rollout), generator=torch.Generator().manual_seed(0))):
        for sizes in ([12], [5, 4, 3]):
            parts = [rollout[rows] for rows in order.split(sizes)]
            loss = torch.stack([grpo.micro_batch_loss(part, items).loss for part in parts]).sum()
            results.append((loss.detach(), gradient(grpo, loss)))
    assert results[0][1].abs().max() > 1e-2
    for other in results[1:]:
        assert_same_sums(other[0], results[0][0], size=1.0, share=1e-5)
        assert_same_sums(other[1], results[0][1])


@pytest.mark.parametrize("objective", ["sparse", "mixed"])
def test_off_policy_masking_concerns_what_callbacks_concern(objective: str) -> None:
    losses = []
    for delta in (None, 0.0):
        grpo = module(replay_objective=objective, alpha=1.0)
        rollout = part_of(grpo)
        disturbed(grpo)
        grpo.loss = replace(grpo.loss, off_policy_delta=delta)
        losses.append(float(grpo.micro_batch_loss(rollout, grpo.denominators(rollout)).loss.detach()))
    assert (losses[0] == losses[1]) == (objective == "mixed")


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("objective", ["sparse", "dense", "mixed", "rejected"])
def test_a_baseline_of_what_is_kept_is_refused_where_the_rejected_are_learned_from(objective: str) -> None:
    grpo, callback = module(replay_objective=objective), SparsityAwareRejection(baseline="kept")
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[callback])
    if objective in ("sparse", "dense"):
        callback.setup(trainer, grpo, "fit")
        return
    with pytest.raises(ValueError, match="baseline='kept' leaves rejected sequences without an advantage"):
        callback.setup(trainer, grpo, "fit")


@pytest.mark.parametrize("policy_gradient", [False, True])
def test_so_it_is_where_an_adapter_learns_from_their_rewards(policy_gradient: bool) -> None:
    adapter = SparseAdapter(policy_gradient=policy_gradient)
    grpo, callback = module(kind=DistillSparse, adapter=adapter), SparsityAwareRejection(baseline="kept")
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[callback])
    with pytest.raises(ValueError, match="DistillSparse as it is configured") if policy_gradient else nullcontext():
        callback.setup(trainer, grpo, "fit")


def test_flash_attention_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attn_implementation='flash_attention_2' takes no such mask"):
        module(attention="flash_attention_2").configure_model()


@pytest.mark.parametrize("wrapped", [False, True])
def test_flash_attention_is_refused_before_its_package_is_asked_for(wrapped: bool) -> None:
    source: PolicySource = PretrainedPolicy("some/model", attn_implementation="flash_attention_2")
    with pytest.raises(ValueError, match=r"attn_implementation='flash_attention_2' takes no such mask"):
        ReplayGRPO(LoraPolicy(source) if wrapped else source, TIGHT, likes_a)


@pytest.mark.parametrize("objective", ["sparse", "dense", "mixed", "rejected"])
def test_sequences_of_several_policies_are_refused(objective: str) -> None:
    grpo = module(replay_objective=objective)
    grpo.configure_model()
    scored = grpo.generator.generate(ROWS)
    rollout = scored.rollout
    rollout.policy_versions = torch.zeros_like(rollout.sequences, dtype=torch.int32)
    grpo.rescore(scored)  # one version everywhere
    rollout.policy_versions[5, int(rollout.prompt_lengths[5]) + 1 :] = 1
    with pytest.raises(ValueError, match=r"Sequences \[\d\] were drawn by several versions"):
        grpo.rescore(scored)


@pytest.mark.parametrize(
    ("objective", "corrects"), [("sparse", True), ("mixed", True), ("dense", False), ("rejected", False)]
)
def test_what_learns_by_replay_corrects(objective: str, corrects: bool) -> None:
    assert module(replay_objective=objective).corrects == corrects
