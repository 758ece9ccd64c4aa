"""Drawn evictions: probabilities are exact, the learner finds them again, and the estimator is the gradient."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from experiments.learned_eviction import draws
from experiments.learned_eviction.drawn import Drawn, log_exponential
from experiments.learned_eviction.draws import EvictionDraws, draw_statistics, ordered_logprob
from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import Combined, Compressor, FullKV, KeyDiff, SnapKV
from sparse_rl_lightning.evictions import NEVER, EvictionRecord
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.testing import tiny_model
from tests.learned import learned_score

SIZES: dict[str, Any] = {"budget": 10, "buffer": 4, "num_sinks": 1, "window": 2}


def model(**options: Any) -> Any:
    return tiny_model(initializer_range=0.3, num_layers=2, eos_token_id=None, **options)


METHODS: dict[str, Compressor] = {
    "SnapKV": SnapKV(**SIZES, kernel_size=3),
    "protected": SnapKV(**SIZES | {"budget": 25}, protect_prompt=True),
    "learned": learned_score(**SIZES),
    "both": Combined([SnapKV(**SIZES), KeyDiff(**SIZES)], normalization="standard"),
}
PROMPTS = [[5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4, 3, 9, 8, 7, 6, 5], [11, 12, 13], list(range(3, 23))]
PARAMS = SamplingParams(num_generations=3, max_completion_length=24, seed=5)


# ---------------------------------------------------------------- the mathematics


def test_ordered_draws_have_the_probabilities_of_drawing_one_after_the_other() -> None:
    logits = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[4] = -torch.inf
    free, total = [0, 1, 2, 3, 5], 0.0
    for order in permutations(free, 3):
        want, left = 0.0, list(free)
        for entry in order:
            want += float(logits[entry] - logits[left].logsumexp(0))
            left.remove(entry)
        found = ordered_logprob(logits[None], torch.tensor([[*order, -1]]))
        assert float(found) == pytest.approx(want, abs=1e-12)
        total += float(found.exp())
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


# ---------------------------------------------------------------- sampler and learner


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


def test_draws_have_the_frequencies_that_they_say() -> None:
    """Of 500 draws behind two greedy tokens, which pairs went, against the probabilities of both orders."""
    policy, compressor = model(), Drawn(KeyDiff(budget=5, buffer=2, num_sinks=0, window=1), temperature=0.7)
    params = SamplingParams(num_generations=500, max_completion_length=3, temperature=0.0, seed=0)
    rollout = RolloutSampler(policy, compressor).generate([[5, 9, 13, 17, 21]], params)
    assert rollout.evictions is not None
    counts = Counter(tuple((own == 7).nonzero().flatten().tolist()) for own in rollout.evictions.death[0, :, 0])
    chances, rollout = dict.fromkeys(combinations(range(6), 2), 0.0), rollout[:1]
    for order in permutations(range(6), 2):
        death = torch.full((2, 1, 2, 8), NEVER, dtype=torch.int32)  # (L, B, H, T)
        death[..., list(order)] = 7
        given = EvictionDraws(
            torch.tensor([[7]]), torch.tensor(order, dtype=torch.int32).expand(1, 1, 2, 2, 2), torch.zeros(0)
        )
        own = replace(rollout, evictions=EvictionRecord.from_dense(death))
        logprob = draw_statistics(policy, own, compressor, given)[2].logprobs[0, 0, 0, 0]
        chances[min(order), max(order)] += float(logprob.detach().exp())
    assert sum(chances.values()) == pytest.approx(1.0, abs=1e-4)
    chi = sum((counts[pair] - 500 * p) ** 2 / (500 * p) for pair, p in chances.items())
    assert chi < 36.1  # 99.9 % of 14 degrees of freedom
    assert max(chances.values()) > 3 * min(chances.values())  # not merely uniform


# ---------------------------------------------------------------- the estimator


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


def test_joined_draws_have_events_and_entries_of_their_own_only() -> None:
    parts = [
        EvictionDraws(
            torch.full((1, events), 4), torch.ones(1, events, 2, 1, most, dtype=torch.int32),
            torch.full((1, events, 2, 1), -0.5),
        )
        for events, most in ((1, 3), (2, 1))
    ]  # fmt: skip
    joined = EvictionDraws.cat(parts)
    assert joined.steps.tolist() == [[4, -1], [4, 4]]
    assert joined.order[:, :, 0, 0].tolist() == [[[1, 1, 1], [-1, -1, -1]], [[1, -1, -1], [1, -1, -1]]]
    assert joined.logprobs[:, :, 0, 0].tolist() == [[-0.5, 0.0], [-0.5, -0.5]]


def test_full_cache_has_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="never evicts, so there is nothing to draw"):
        Drawn(FullKV())
    with pytest.raises(ValueError, match="Drawn: temperature"):
        Drawn(KeyDiff(**SIZES), temperature=-1.0)
