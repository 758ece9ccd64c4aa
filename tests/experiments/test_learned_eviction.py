"""Learned eviction: draws have the probabilities they say, and the loss of tokens and draws is the gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs, assert_same_sums
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from experiments.learned_eviction import Drawn, LearnedEvictionGRPO, draws
from experiments.learned_eviction.drawn import NewScore, log_exponential
from experiments.learned_eviction.draws import EvictionDraws, draw_statistics, ordered_logprob
from experiments.learned_eviction.loss import eviction_loss
from experiments.learned_eviction.module import FILE
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.budgets import Adaptive
from sparse_rl_lightning.callbacks import DryRun, SparsityAwareRejection
from sparse_rl_lightning.compressors import (
    H2O,
    RKV,
    Combined,
    Compressor,
    ExpectedAttention,
    FullKV,
    KeyDiff,
    LearnedScore,
    SnapKV,
)
from sparse_rl_lightning.evictions import NEVER, EvictionRecord
from sparse_rl_lightning.losses import policy_loss
from sparse_rl_lightning.modules import LearnerOptions
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.testing import tiny_model
from tests.learned import learned_score, sizes_of
from tests.tiny_grpo import fit, loaded, module, weights

SIZES: dict[str, Any] = {"budget": 8, "buffer": 3, "num_sinks": 1, "window": 2}
SNAPKV = Drawn(SnapKV(**SIZES, kernel_size=3), temperature=0.5)
RULE: dict[str, Any] = {"kind": LearnedEvictionGRPO, "compressor": SNAPKV, "lr": 0.1}
NETWORK: dict[str, Any] = {"kind": LearnedEvictionGRPO, "lr": 0.05}
LARGER = SIZES | {"budget": 10, "buffer": 4}
METHODS: dict[str, Compressor] = {
    "SnapKV": SnapKV(**LARGER, kernel_size=3),
    "protected": SnapKV(**LARGER | {"budget": 25}, protect_prompt=True),
    "learned": learned_score(**LARGER),
    "both": Combined([SnapKV(**LARGER), KeyDiff(**LARGER)], normalization="standard"),
}
PROMPTS = [[5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4, 3, 9, 8, 7, 6, 5], [11, 12, 13], list(range(3, 23))]
PARAMS = SamplingParams(num_generations=3, max_completion_length=24, seed=5)
ROWS = [{"prompt": "0123456789abcdef"[i:] + "a", "answer": ""} for i in (0, 3, 11)]


def model() -> Any:
    return tiny_model(initializer_range=0.3, num_layers=2, eos_token_id=None)


def drawn(**options: Any) -> Drawn:
    return Drawn(NewScore(**SIZES, **options), temperature=0.5)


def network_of(grpo: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in grpo.network.parameters()])


def disturb(grpo: Any) -> None:
    with torch.no_grad():
        for index, parameter in enumerate(grpo.policy.parameters()):
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))


def gradient(grpo: Any, loss: Tensor) -> Tensor:
    return torch.cat([slope.flatten() for slope in torch.autograd.grad(loss, list(grpo.policy.parameters()))])


def scored_rollout(grpo: Any) -> Rollout:
    scored = grpo.generator.generate(ROWS)
    grpo.rescore(scored)
    grpo.score(scored)
    rollout: Rollout = scored.rollout
    return rollout


def test_ordered_draws_have_the_probabilities_of_drawing_one_after_the_other() -> None:
    logits = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[4] = -torch.inf
    free, total = [0, 1, 2, 3, 5], 0.0
    for order in permutations(free, 3):
        want, left = 0.0, list(free)
        for entry in order:
            want += float(logits[entry] - logits[left].logsumexp(0))
            left.remove(entry)
        logprob = ordered_logprob(logits[None], torch.tensor([[*order, -1]]))
        assert float(logprob) == pytest.approx(want, abs=1e-12)
        total += float(logprob.exp())
    assert total == pytest.approx(1.0)


def test_nothing_is_not_a_number_where_all_or_none_may_go() -> None:
    logits = torch.tensor([[0.3, -torch.inf, 1.0], [-torch.inf] * 3], requires_grad=True)
    found = ordered_logprob(logits, torch.tensor([[2, 0], [-1, -1]]))
    found.sum().backward()
    assert found[1] == 0
    assert found[0] < 0
    assert logits.grad is not None
    assert logits.grad[0, [0, 2]].abs().sum() > 0
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("name", METHODS)
def test_without_temperature_the_method_evicts(name: str) -> None:
    """Bit for bit: the same tokens, log-probs and deaths."""
    method = METHODS[name]
    policy = model()
    plain = RolloutSampler(policy, method).generate(PROMPTS, PARAMS)
    drawn = RolloutSampler(policy, Drawn(method, temperature=0.0)).generate(PROMPTS, PARAMS)
    assert torch.equal(plain.sequences, drawn.sequences)
    assert torch.equal(plain.sampler_logprobs, drawn.sampler_logprobs)
    assert plain.evictions is not None
    assert drawn.evictions is not None
    assert torch.equal(plain.evictions.death, drawn.evictions.death)
    assert Drawn(method, temperature=0.0).scores_natively == method.scores_natively  # it rounds as no other way does
    other = RolloutSampler(policy, Drawn(method, temperature=1.0)).generate(PROMPTS, PARAMS)
    assert other.evictions is not None
    assert not torch.equal(plain.evictions.death, other.evictions.death)


@pytest.mark.parametrize("name", METHODS)
def test_the_learner_finds_what_was_drawn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From keyed numbers and its own scores: the first of its order are those that went, and replay stays exact."""
    policy, compressor = model(), Drawn(METHODS[name], temperature=0.5)
    rollout = RolloutSampler(policy, compressor, num_slots=4).generate(PROMPTS, PARAMS)
    assert rollout.evictions is not None
    own, margins = draws._drawn_order, []

    def watched(logits: Tensor, died: Tensor, state: Any) -> Tensor:
        """Of all that could go, what went had the largest perturbed logits."""
        perturbed = logits - log_exponential(state)
        least = perturbed.masked_fill(~died, torch.inf).amin(dim=-1)
        most = perturbed.masked_fill(died, -torch.inf).amax(dim=-1)
        margins.append((least - most).min())
        return own(logits, died, state)

    monkeypatch.setattr(draws, "_drawn_order", watched)
    logprobs, _, found = draw_statistics(policy, rollout, compressor)
    assert len(margins) == 2  # layers
    assert min(margins) > -1e-4
    assert_same_logprobs(logprobs, rollout.sampler_logprobs)
    death, count = rollout.evictions.death, 0
    for row in range(len(rollout)):
        for event, step in enumerate(found.steps[row].tolist()):
            for layer in range(death.shape[0]):
                for head in range(death.shape[2]):
                    went = (death[layer, row, head] == step).nonzero().flatten().tolist() if step >= 0 else []
                    order = [p for p in found.order[row, event, layer, head].tolist() if p >= 0]
                    assert sorted(order) == went
                    count += len(went)
    ends = rollout.prompt_lengths[:, None, None]
    assert count == int(((death != NEVER) & (death != ends)).sum()) > 100
    assert (death == ends).any() == (name != "protected")  # by the key that the samples of a prompt share
    again = draw_statistics(policy, rollout, compressor, found)[2]
    torch.testing.assert_close(again.logprobs, found.logprobs, atol=1e-5, rtol=1e-5)
    assert torch.equal(again.order, found.order)
    assert (found.logprobs[found.steps >= 0] < 0).all()
    (slope,) = torch.autograd.grad(found.logprobs.sum(), [policy.model.layers[0].self_attn.k_proj.weight])
    assert slope.isfinite().all()
    assert slope.abs().max() > 0


def by_hand(policy: Any, tokens: Tensor, gone: tuple[int, ...], step: int, temperature: float) -> tuple[Tensor, Tensor]:
    """One layer, one head: log-probs (T, V) of the next token, and KeyDiff's logits (step,) of going at ``step``."""
    layer = policy.model.layers[0]
    hidden = policy.model.embed_tokens(tokens)[None]
    normed, attention = layer.input_layernorm(hidden), layer.self_attn
    cos, sin = policy.model.rotary_emb(hidden, torch.arange(len(tokens))[None])
    q, k, v = (
        projection(normed).view(1, len(tokens), -1, attention.head_dim).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    unit = k[0, 0, :step] / k[0, 0, :step].norm(dim=-1, keepdim=True)
    mean = unit.sum(dim=0) / unit.sum(dim=0).norm()
    scores = -(unit @ mean)
    free = scores[: step - 1]  # all but the window of one
    logits = -(free - free.mean()) / ((free - free.mean()).square().mean().sqrt()) / temperature
    index = torch.arange(len(tokens))
    dead = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    dead[step:, list(gone)] = True
    seen = (index[None, :] <= index[:, None]) & ~dead
    paid = (q[0] @ k[0].mT * attention.scaling).masked_fill(~seen, -torch.inf).softmax(-1)
    mixed = attention.o_proj((paid @ v[0]).transpose(0, 1).reshape(1, len(tokens), -1))
    hidden = hidden + mixed
    hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return policy.lm_head(policy.model.norm(hidden))[0].log_softmax(-1), logits


def test_estimator_is_the_gradient_of_the_expected_reward() -> None:
    """All tokens and all ordered draws are enumerated in float64: 6 are given, of which 2 of 5 go before the first.

    The expected reward and its gradient are written out by hand; the estimator weights the learner's own log-probs of
    tokens and draws, whose gradients it takes from the replay, by probability and reward.
    """
    temperature, vocab, step = 0.8, 5, 6
    policy = tiny_model(
        vocab_size=vocab, num_layers=1, num_heads=1, num_kv_heads=1, hidden_size=8, initializer_range=0.5,
        eos_token_id=None,
    ).double()  # fmt: skip
    compressor = Drawn(KeyDiff(budget=4, buffer=2, num_sinks=0, window=1), temperature)
    prompt = [1, 3, 2, 4, 2, 1]
    rewards = torch.randn(vocab, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    orders = list(permutations(range(5), 2))
    parameters = list(policy.parameters())

    expected = torch.zeros((), dtype=torch.float64)
    for first in range(vocab):
        tokens = torch.tensor([*prompt, first])
        for order in orders:
            logprobs, logits = by_hand(policy, tokens, order, step, temperature)
            chance = logprobs[step - 1, first].exp()
            left = list(range(5))
            for entry in order:
                chance = chance * (logits[entry] - logits[left].logsumexp(0)).exp()
                left.remove(entry)
            expected = expected + chance * (logprobs[step].exp() * rewards[first]).sum()
    want = torch.cat([g.flatten() for g in torch.autograd.grad(expected, parameters)])

    outcomes = [(a, b, order) for a in range(vocab) for b in range(vocab) for order in orders]
    sequences = torch.tensor([[*prompt, a, b] for a, b, _ in outcomes])
    death = torch.full((1, len(outcomes), 1, 8), NEVER, dtype=torch.int32)
    for row, (_, _, order) in enumerate(outcomes):
        death[0, row, 0, list(order)] = step
    mask = (torch.arange(8) >= step).expand(len(outcomes), 8)
    count = torch.full((len(outcomes),), step)
    rollout = Rollout(  # what went at a prompt's end would have no credit
        sequences, count - 1, mask, torch.ones_like(count, dtype=torch.bool), torch.zeros(len(outcomes), 8),
        evictions=EvictionRecord.from_dense(death), keys=torch.zeros(len(outcomes), 2, dtype=torch.int64),
    )  # fmt: skip
    given = torch.tensor([order for _, _, order in outcomes], dtype=torch.int32)[:, None, None, None]
    known = EvictionDraws(count[:, None], given, torch.zeros(0))
    logprobs, _, found = draw_statistics(policy, rollout, compressor, known)
    total = logprobs.sum(dim=1) + found.logprobs.sum(dim=(1, 2, 3))
    weight = torch.tensor([float(rewards[a, b]) for a, b, _ in outcomes]).double() * total.detach().exp()
    assert float(total.detach().exp().sum()) == pytest.approx(1.0, abs=1e-6)
    assert float(weight.sum()) == pytest.approx(float(expected.detach()), abs=1e-6)
    got = torch.cat([g.flatten() for g in torch.autograd.grad((weight * total).sum(), parameters, retain_graph=True)])
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-4)
    # tokens alone are another direction: without the second term the estimator is biased
    alone = torch.autograd.grad((weight * logprobs.sum(dim=1)).sum(), parameters)
    bias = (torch.cat([g.flatten() for g in alone]) - want).norm()
    assert bias > 0.01 * want.norm()
    assert bias > 1000 * (got - want).norm()


@pytest.mark.parametrize(("weight", "loss_type"), [(1.0, "grpo"), (0.3, "dapo"), (0.0, "dr_grpo")])
def test_loss_is_that_of_tokens_and_draws(weight: float, loss_type: str) -> None:
    clip = {"epsilon": 0.02, "epsilon_high": 0.03, "delta": 1.05}
    grpo = loaded(**RULE, eviction_weight=weight, loss_type=loss_type, **clip)
    rollout = scored_rollout(grpo)
    disturb(grpo)
    before = grpo.draws_of(rollout)
    assert before is not None
    found = grpo.micro_batch_loss(rollout, grpo.denominators(rollout))
    logprobs, _, draws = grpo._statistics(rollout)
    mask, options = rollout.completion_mask, {"loss_type": loss_type, "max_completion_length": 12, **clip}
    want = policy_loss(logprobs, rollout.old_logprobs, rollout.advantages, mask, **options).loss
    ratio = (draws.logprobs - before.logprobs).exp()
    assert (ratio - 1).abs().max() > 0.01
    side = rollout.advantages[:, None, None, None]
    steps, ends = before.steps, rollout.prompt_lengths + rollout.completion_lengths - 1
    # not the draws at a prompt's end, which its samples share, nor at the very end, which nothing sees
    assert rollout.evictions is not None
    assert (rollout.evictions.death == rollout.prompt_lengths[:, None, None]).any()
    assert (steps[steps >= 0] > rollout.prompt_lengths[:, None].expand_as(steps)[steps >= 0]).all()
    credited = (steps >= 0) & (steps < ends[:, None])
    assert credited.sum() > 10
    terms = torch.minimum(ratio.clamp(max=1.05) * side, ratio.clamp(0.98, 1.03) * side) * credited[..., None, None]
    per_sequence = terms.sum(dim=(1, 2, 3))
    divided = {
        "grpo": (per_sequence / mask.sum(dim=1)).mean(), "dapo": per_sequence.sum() / mask.sum(),
        "dr_grpo": per_sequence.sum() / (12 * len(rollout)),
    }[loss_type]  # fmt: skip
    want = want - weight * divided
    assert_same_sums(found.loss, want, size=1.0, share=1e-5)
    assert_same_sums(gradient(grpo, found.loss), gradient(grpo, want))
    assert found.metrics["draws/logprob"] < 0
    assert found.metrics["draws/ratio_max"] > 1


def test_micro_batches_do_not_change_the_step() -> None:
    results = []
    for parts in (1, 2, 8):
        grpo = module(**RULE, steps_per_generation=parts, beta=0.01)
        fit(grpo, 2, [SparsityAwareRejection(0.3)], accumulate_grad_batches=parts)
        results.append(weights(grpo))
        assert (grpo.draws.steps >= 0).any()
    for other in results[1:]:
        assert_same_sums(other, results[0], size=weights(loaded(**RULE)))


def test_a_draw_is_clipped_like_a_token() -> None:
    steps, advantages = torch.tensor([[3, -1], [2, 4]]), torch.tensor([1.0, -1.0])
    mask = torch.arange(6).expand(2, 6) >= 2
    new = torch.tensor([[0.5, 9.0], [0.5, -0.5]])[..., None, None].requires_grad_()
    found = eviction_loss(new, torch.zeros(2, 2, 1, 1), steps, advantages, mask)
    want = -(1.2 / 4 - (torch.tensor(0.5).exp() + 0.8) / 4) / 2  # what is not there does not count
    assert float(found.loss.detach()) == pytest.approx(float(want))
    (own,) = torch.autograd.grad(found.loss, new)
    assert own.flatten().tolist() == pytest.approx([0, 0, float(torch.tensor(0.5).exp()) / 8, 0])
    assert float(found.metrics["draws/clip_ratio"]) == pytest.approx(2 / 3)
    # the mean of all 8 tokens; to cispo epsilon_high is a cap of weights, which draws have not
    capped = eviction_loss(new, torch.zeros(2, 2, 1, 1), steps, advantages, mask, loss_type="cispo", epsilon_high=5.0)
    assert float(capped.loss.detach()) == pytest.approx(float(want))


def test_draws_in_an_answer_of_a_tool_are_credited_with_what_is_sampled_next() -> None:
    """Sampled are 2, 3, 6 and 7: what has died when so many were fed is missing for the tokens behind the next one."""
    mask = torch.tensor([[False, False, True, True, False, False, True, True, False]])
    steps = torch.tensor([[3, 4, 5, 6, 7, 8, -1]])
    new = torch.zeros(1, 7, 2, 1, requires_grad=True)
    found = eviction_loss(new, torch.zeros(1, 7, 2, 1), steps, torch.ones(1), mask)
    (own,) = torch.autograd.grad(found.loss, new)
    # each by four tokens; nothing that was sampled has seen the others
    assert own[0, :, :, 0].tolist() == [[-0.25, -0.25]] * 4 + [[0.0, 0.0]] * 3
    assert float(found.loss.detach()) == pytest.approx(-8 / 4)


def test_a_rehearsal_before_training_passes() -> None:
    """Of the largest update, whose made-up sequences lose their oldest tokens, by draws."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert fit(module(**RULE), 1, [DryRun(enabled=True)]).global_step == 1


def network_pair() -> Drawn:
    return Drawn(Combined([NewScore(**SIZES), NewScore(**SIZES)], normalization="standard"))


@pytest.mark.parametrize(("build", "match"), [
    (lambda: {"compressor": RKV(**SIZES)}, "draws none. Wrap it"),
    (lambda: {"compressor": Drawn(RKV(**SIZES), temperature=0.0)}, "draws none. Wrap it"),
    (lambda: {"compressor": Drawn(H2O(**SIZES))}, "recomputes scores, with gradient, .* normalization: standard"),
    (lambda: {"compressor": Drawn(Combined([KeyDiff(**SIZES)]))}, "recomputes scores, with gradient"),
    (lambda: {"compressor": Drawn(ExpectedAttention(**SIZES))}, "recomputes scores, with gradient"),
    (lambda: {"compressor": Drawn(KeyDiff(**SIZES, budget_rule=Adaptive()))}, "no probability is known for that"),
    (lambda: {"compressor": Drawn(FullKV())}, "never evicts, so there is nothing to draw"),
    (lambda: {"compressor": Drawn(KeyDiff(**SIZES), temperature=-1.0)}, "Drawn: temperature"),
    (lambda: {"compressor": Drawn(KeyDiff(**SIZES)), "network_lr": 0.1}, r"network_lr=0.1 .*KeyDiff"),
    (lambda: {"compressor": network_pair()}, "one compressor that is learned, got 2"),
    (lambda: {"learner": LearnerOptions(gradient_checkpointing=True)}, "gradient_checkpointing to false"),
    (lambda: {"learner": LearnerOptions(share_prompts=True)}, "share_prompts to false"),
    (lambda: {"learner": LearnerOptions(micro_batch_tokens=100)}, "micro_batch_tokens to null"),
    (lambda: {"eviction_weight": -1.0}, "eviction_weight"),
])  # fmt: skip
def test_what_cannot_be_learned_is_refused(build: Callable[[], dict[str, Any]], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        loaded(**RULE | build())


def test_the_network_learns_with_the_policy_at_its_own_rate() -> None:
    before = network_of(loaded(**NETWORK, compressor=drawn()))
    moved = []
    for rate in (None, 1e-6):
        grpo = module(**NETWORK, compressor=drawn(), network_lr=rate)
        fit(grpo, 4)
        moved.append(float((network_of(grpo) - before).abs().max()))
        assert grpo.state_dict().keys() >= {"network.key", "network.recency"}
    assert moved[0] > 1e-3
    assert 0 < moved[1] < 1e-4


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_the_network_stays_float32_whatever_the_precision(precision: str) -> None:
    grpo = module(**NETWORK, compressor=drawn())
    fit(grpo, 2, precision=precision)
    assert {parameter.dtype for parameter in grpo.network.parameters()} == {torch.float32}
    assert not torch.equal(network_of(grpo), network_of(loaded(**NETWORK, compressor=drawn())))


def test_draws_follow_finite_differences_of_the_network() -> None:
    """The log-probability of fixed draws along a direction of all weights, in its gradient and in two evaluations."""
    policy, score = tiny_model(initializer_range=0.3, eos_token_id=None), learned_score(**SIZES)
    compressor, network = Drawn(score, temperature=0.7), score.network
    params = SamplingParams(num_generations=3, max_completion_length=24, seed=2)
    rollout = RolloutSampler(policy, compressor).generate([list(range(5, 20)), [3, 4, 5]], params)
    _, _, fixed = draw_statistics(policy, rollout, compressor)
    parameters = list(network.parameters())
    slopes = torch.autograd.grad(fixed.logprobs.sum(), parameters)
    generator = torch.Generator().manual_seed(9)
    for name, slope, parameter in zip(dict(network.named_parameters()), slopes, parameters, strict=True):
        step = 1e-2 * torch.randn(parameter.shape, generator=generator) / parameter.numel() ** 0.5
        totals = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * step)
                totals.append(float(draw_statistics(policy, rollout, compressor, fixed)[2].logprobs.double().sum()))
                parameter.sub_(sign * step)
        along = float((slope.double() * step.double()).sum())
        assert (totals[0] - totals[1]) / 2 == pytest.approx(along, rel=0.05, abs=2e-4), name
        assert slope.abs().max() > 0, name


def test_a_resumed_run_goes_on_within_a_rollout(tmp_path: Path) -> None:
    """With the draws of the policy before the update, and with none other."""

    def run(steps: int, temperature: float = 0.5, **options: Any) -> Any:
        compressor = Drawn(NewScore(**SIZES), temperature=temperature)
        grpo = module(**NETWORK, compressor=compressor, steps_per_generation=2)
        fit(grpo, steps, callbacks=options.pop("callbacks", None), **options)
        return grpo

    straight = run(5)
    keep = ModelCheckpoint(dirpath=tmp_path, save_last=True, every_n_train_steps=3, save_top_k=0)
    run(3, callbacks=[keep], enable_checkpointing=True)
    resumed = run(5, ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(weights(resumed), weights(straight))
    assert torch.equal(network_of(resumed), network_of(straight))
    with pytest.raises(ValueError, match=r"that Drawn\(.*0.5\) drew, and the compressor is Drawn\(.*0.6"):
        run(5, temperature=0.6, ckpt_path=tmp_path / "last.ckpt")


def test_export_writes_it_beside_the_policy(tmp_path: Path) -> None:
    grpo = module(**NETWORK, compressor=drawn())
    fit(grpo, 2)
    grpo.export(tmp_path / "policy")
    again = LearnedScore(**SIZES, weights=str(tmp_path / "policy" / FILE))
    again.check_model(sizes_of(grpo.policy))
    own = torch.cat([parameter.detach().flatten() for parameter in again.network.parameters()])
    assert torch.equal(own, network_of(grpo))
