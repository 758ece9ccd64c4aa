"""Prompts read once: the numbers of separate sequences, for every family, from as few tokens as there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_rl_lightning.compressors import FullKV, SnapKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.checkpointing import checkpoint_layers
from sparse_rl_lightning.learner.forward import Learner, LearnerOptions
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.replay import shared_prompts
from sparse_rl_lightning.replay.death_attention import BLOCK, flex_death_attention, sdpa_death_attention
from sparse_rl_lightning.replay.logprobs import replay_statistics
from sparse_rl_lightning.replay.shared_prompts import SharedPrompts, shared_statistics
from sparse_rl_lightning.retrievers import Quest
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.testing import tiny_model
from tests.families import FAMILIES, HYBRIDS, family
from tests.replay.test_death_attention import SCALE, compile_for, inputs

HEAD = (0.9, 16, False)
PROMPTS = [list(range(5, 26)), [7, 8, 9], [30, 31, 32, 33, 34, 35, 36, 37]]


def drawn(model: Any, compressor: Any = None, **options: Any) -> Rollout:
    sampler = RolloutSampler(model, compressor or SnapKV(12, buffer=4, num_sinks=1, window=3), **options)
    params = SamplingParams(num_generations=3, max_completion_length=24, temperature=0.9, seed=0)
    rollout = sampler.generate(PROMPTS, params)
    lengths = rollout.completion_lengths
    assert len(set(lengths.tolist())) > 1 or not options, "padding is not tested"
    return rollout


def outcome(model: Any, rollout: Rollout, replays: bool, shared: bool) -> tuple[list[Tensor], Tensor]:
    """Log-probs, entropies and the gradients of a random sum of both; what each token weighs."""
    model.zero_grad()
    torch.manual_seed(1)
    factors = torch.randn(2, *rollout.sequences.shape)
    if shared:
        found = shared_statistics(model, replays, *HEAD, rollout)
    elif replays:
        found = replay_statistics(model, rollout, *HEAD)
    else:
        found = sequence_logprobs(model, rollout.sequences, rollout.completion_mask, *HEAD, rollout.routing)
    (found[0] * factors[0] + found[1] * factors[1]).sum().backward()
    return [*(one.detach() for one in found), *(p.grad for p in model.parameters() if p.grad is not None)], factors


@pytest.mark.thinned(3)
@pytest.mark.parametrize("replays", [False, True], ids=["dense", "replay"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in HYBRIDS])
def test_numbers_and_gradients_are_those_of_separate_sequences(name: str, replays: bool) -> None:
    model = family(name)
    rollout = drawn(model)
    model.train()
    apart, _ = outcome(model, rollout, replays, shared=False)
    together, _ = outcome(model, rollout, replays, shared=True)
    assert len(apart) == len(together)
    for want, got in zip(apart, together, strict=True):
        torch.testing.assert_close(got, want, atol=3e-5 * max(1.0, float(want.abs().max())), rtol=1e-4)
    if replays:
        torch.testing.assert_close(together[0], rollout.sampler_logprobs, atol=2e-4, rtol=0)


def test_in_float64_they_are_the_same_to_its_precision() -> None:
    model = tiny_model(initializer_range=0.2).double()
    rollout = drawn(model)
    for replays in (False, True):
        apart, together = (outcome(model, rollout, replays, shared)[0] for shared in (False, True))
        for want, got in zip(apart[:2], together[:2], strict=True):
            torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    assert not torch.equal(outcome(model, rollout, False, True)[0][0], together[0]), "nothing was evicted"


def test_every_prompt_stands_once() -> None:
    """Also one that two groups have, one that begins another, and one whose samples are apart."""
    sequences = torch.tensor(
        [[3, 4, 5, 9, 9, 0], [3, 4, 7, 9, 9, 9], [3, 4, 5, 8, 0, 0], [3, 4, 5, 8, 8, 8], [3, 4, 5, 9, 9, 9]]
    )
    prompt_lengths = torch.tensor([3, 2, 3, 3, 4])
    lengths = torch.tensor([5, 6, 4, 6, 6])
    at = torch.arange(6)
    mask = (at >= prompt_lengths[:, None]) & (at < lengths[:, None])
    rollout = Rollout(sequences, prompt_lengths, mask, torch.ones(5, dtype=torch.bool), torch.zeros(5, 6))
    shared = SharedPrompts.of(rollout)
    assert shared.rows.tolist() == [0] * 5 + [1] * 6 + [2] + [3] * 3 + [4] * 6
    assert shared.positions.tolist() == [*range(5), *range(6), 3, *range(3, 6), *range(6)]
    row = sequences[shared.rows, shared.positions]
    is_token = at < lengths[:, None]
    assert torch.equal(row[shared.places][is_token], sequences[is_token])
    assert (shared.places[2, :3] == shared.places[0, :3]).all()
    assert not set(shared.places[4].tolist()) & set(shared.places[0].tolist()), "another prompt, though it begins alike"


def test_the_policy_sees_as_many_tokens_as_there_are() -> None:
    model = tiny_model(initializer_range=0.2)
    rollout = drawn(model)
    seen = list[int]()
    model.model.layers[0].register_forward_pre_hook(lambda _module, given: seen.append(given[0].shape[:2].numel()))
    options = LearnerOptions(share_prompts=True)
    for replays in (False, True):
        Learner(options, 0.9, replays=replays).logprobs(model, rollout)
    assert seen == [sum(map(len, PROMPTS)) + int(rollout.completion_mask.sum())] * 2


def test_attention_knows_where_sequences_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a GPU leaves out the padding of shorter ones."""
    model, ends = tiny_model(initializer_range=0.2), list[Any]()
    rollout, own = drawn(model), shared_prompts.death_attention
    monkeypatch.setattr(shared_prompts, "death_attention", lambda *given: ends.append(given[-1]) or own(*given))
    shared_statistics(model, False, *HEAD, rollout)
    assert [one.tolist() for one in ends] == [rollout.lengths.tolist()] * 2  # layers


@pytest.mark.parametrize("form", [False, True, "selective", "offload"])
@pytest.mark.parametrize("tokens", [None, 60, 1])
def test_parts_and_checkpointing_change_nothing(form: Any, tokens: int | None) -> None:
    model = tiny_model(initializer_range=0.2)
    rollout = drawn(model)
    want, factors = outcome(model, rollout, True, shared=False)
    checkpoint_layers(model, form)
    model.train()
    model.zero_grad()
    learner = Learner(LearnerOptions(tokens, 16, share_prompts=True), 0.9, replays=True)
    found = learner.logprobs(model, rollout)
    (found[0] * factors[0] + found[1] * factors[1]).sum().backward()
    got = [*(one.detach() for one in found), *(p.grad for p in model.parameters() if p.grad is not None)]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=3e-5 * max(1.0, float(other.abs().max())), rtol=1e-4)


def test_recorded_experts_are_those_of_each_token() -> None:
    model = family("qwen3_moe")
    rollout = drawn(model, FullKV(), record_routing=True)
    assert rollout.routing is not None
    rollout.routing = 1 + (rollout.routing + 1) % 8  # others than the routers would choose
    apart, together = (outcome(model, rollout, False, shared)[0] for shared in (False, True))
    torch.testing.assert_close(together[0], apart[0], atol=3e-5, rtol=1e-4)
    rollout.routing = None
    assert (outcome(model, rollout, False, True)[0][0] - apart[0]).abs().max() > 1e-2


@pytest.mark.parametrize("deaths", [True, False])
@pytest.mark.parametrize("asked", [1, BLOCK, BLOCK + 30, 2 * BLOCK + 17])
def test_flex_attention_of_the_last_queries(asked: int, deaths: bool) -> None:
    """Without gradient: on the CPU FlexAttention has none."""
    query, key, value, death = (t.detach() for t in inputs(3 * BLOCK + 17, batch=2))
    given = death if deaths else None
    whole = sdpa_death_attention(query, key, value, given, SCALE)
    for attend in (sdpa_death_attention, lambda *args: flex_death_attention(*args, compiled=False)):
        got = attend(query[:, :, -asked:], key, value, given, SCALE)
        torch.testing.assert_close(got, whole[:, :, -asked:], atol=2e-6, rtol=0)


def test_compiled_flex_attention_of_the_last_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients too, and one kernel for all numbers of queries."""
    compile_for(lambda graph, args: graph.forward, monkeypatch)
    for asked in (BLOCK, BLOCK + 30, 2 * BLOCK + 17):
        *given, death = inputs(3 * BLOCK + 17, width=64)
        last = given[0].detach()[:, :, -asked:].requires_grad_()
        got = flex_death_attention(last, *given[1:], death, SCALE, compiled=True)
        want = sdpa_death_attention(last, *given[1:], death, SCALE)
        torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)
        direction = torch.randn_like(want)
        found = [torch.autograd.grad((one * direction).sum(), (last, *given[1:])) for one in (got, want)]
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a / b.abs().max(), b / b.abs().max(), atol=2e-3, rtol=0)


def test_what_cannot_share_is_refused() -> None:
    learner = Learner(LearnerOptions(share_prompts=True))
    with pytest.raises(UserError, match="share_prompts: this policy has layers with a recurrent state"):
        learner.prepare(family("qwen3_next"))
    retriever = Quest(budget=64)
    with pytest.raises(UserError, match=r"share_prompts: .* chooses pages"):
        Learner(LearnerOptions(share_prompts=True), retriever=retriever).prepare(tiny_model())
