"""Attention with learned sinks (gpt-oss): rollouts, replay, what compressors read of it, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from rollouts import assert_generated, assert_replayed, assert_same, roll_out
from transformers import PreTrainedModel

from sparse_rl_lightning.budgets import Adaptive
from sparse_rl_lightning.compressors import H2O, RKV, Compressor, ExpectedAttention, FullKV, SnapKV, StreamingLLM
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.ops.pools import gather_heads
from sparse_rl_lightning.retrieval.logprobs import retrieval_logprobs
from sparse_rl_lightning.retrievers import Quest
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, forced_rollout, replay_logprobs
from tests.closeness import assert_same_logprobs
from tests.families import family

PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 8, 9, 40, 1)]
SMALL: dict[str, Any] = {"budget": 12, "buffer": 5, "num_sinks": 2, "window": 4}
GREEDY = SamplingParams(max_completion_length=24, temperature=0)
ONCE = SamplingParams(max_completion_length=30, seed=5)
PARAMS = dataclasses.replace(ONCE, num_generations=2)
KINDS = {
    "alternating": {},
    "full": {"layer_types": ["full_attention"] * 4},
    "windows": {"layer_types": ["sliding_attention"] * 4},
}


def model_with_sinks(**changed: Any) -> PreTrainedModel:
    """Heads whose sinks take nearly nothing, about half, and nearly everything."""
    model: Any = family("gpt_oss", **changed)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.sinks.data = torch.tensor([-8.0, 1.0, 3.0, 8.0]).roll(number)
    return model


def without_sinks(model: PreTrainedModel) -> PreTrainedModel:
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-1e4)
    return model


@pytest.mark.thinned(3)
@pytest.mark.parametrize("chunk", [16384, 16, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_generate(kind: str, chunk: int) -> None:
    model = model_with_sinks(**KINDS[kind])
    rollout = RolloutSampler(model, FullKV(), 3, max_prefill_tokens=chunk).generate(PROMPTS, GREEDY)
    assert_generated(model, rollout, 24, PROMPTS)
    with torch.no_grad():
        logprobs = sequence_logprobs(model, rollout.sequences, rollout.completion_mask)[0]
    assert_same_logprobs(logprobs, rollout.sampler_logprobs)
    assert_replayed(model, rollout)
    other = replay_logprobs(without_sinks(model), rollout)
    assert float((other - rollout.sampler_logprobs).detach().abs().max()) > 0.1, "the sinks of these tests matter"


COMPRESSORS = {
    "StreamingLLM": StreamingLLM(**SMALL),
    "SnapKV": SnapKV(**SMALL),
    "R-KV": RKV(**SMALL),
    "heads of their own": SnapKV(**SMALL, budget_rule=Adaptive(floor=7)),
    "running state": H2O(**SMALL),
    "rotation": ExpectedAttention(query_window=6, num_future=9, **SMALL),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("compressor", list(COMPRESSORS.values()), ids=list(COMPRESSORS))
@pytest.mark.parametrize("kind", ["alternating", "full"])
def test_replay_is_exact_and_batches_do_not_matter(kind: str, compressor: Compressor) -> None:
    model = model_with_sinks(**KINDS[kind])
    rollout = RolloutSampler(model, compressor).generate(PROMPTS, ONCE)
    assert bool((rollout.kv.stored < rollout.kv.full).any())
    assert_replayed(model, rollout)
    assert_same(roll_out(model, compressor, 2, prompts=PROMPTS, params=ONCE, max_prefill_tokens=16), rollout)
    forced = forced_rollout(model, rollout, compressor, seed=5)
    assert_same_logprobs(forced.sampler_logprobs, rollout.sampler_logprobs)


def test_gradients_of_sinks_are_those_of_the_model() -> None:
    """The replay of a rollout without evictions is the dense pass, which transformers computes."""
    model = model_with_sinks()
    rollout = RolloutSampler(model, FullKV()).generate(PROMPTS, PARAMS)
    found = []
    for logprobs in (
        replay_logprobs(model, rollout),
        sequence_logprobs(model, rollout.sequences, rollout.completion_mask)[0],
    ):
        model.zero_grad()
        logprobs.sum().backward()
        found.append(torch.stack([layer.self_attn.sinks.grad for layer in model.model.layers]))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    assert float(found[0].abs().max()) > 1.0


@pytest.mark.parametrize("max_prefill_tokens", [1000, 7])
@torch.no_grad()
def test_compressors_read_the_probabilities_that_the_sinks_leave(max_prefill_tokens: int) -> None:
    """H2O's mass is the column sums of transformers' own attention."""
    model: Any = model_with_sinks()
    sampler = RolloutSampler(model, H2O(**{**SMALL, "budget": 90}), max_prefill_tokens=max_prefill_tokens)
    rollout = sampler.generate(PROMPTS, GREEDY)
    cache, model = sampler.cache, model.double()
    model.config._experts_implementation = "eager"  # the fast ones know no float64
    for row, prompt in enumerate(PROMPTS):
        fed = len(prompt) + int(rollout.completion_lengths[row]) - 1
        attentions = model(rollout.sequences[row : row + 1, :fed], output_attentions=True).attentions
        for place, layer in enumerate((1, 3)):
            want = attentions[layer][0].unflatten(0, (2, 2)).sum(dim=(1, 2))  # over groups and queries
            rows, live = gather_heads(cache.pools.offsets[place, row], cache.lengths[place, row], fed)
            assert live.all()
            torch.testing.assert_close(cache.state_pool[rows][..., 0].double(), want, atol=1e-4, rtol=0)


def test_mixed_precision_is_admitted_though_experts_flip() -> None:
    """Sinks this strong leave little but the experts, several of which are chosen otherwise in 16 bits."""
    model = model_with_sinks()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rollout = RolloutSampler(model, RKV(**SMALL), record_routing=True).generate(PROMPTS, PARAMS)
        replayed = replay_logprobs(model, rollout)
        free = replay_logprobs(model, dataclasses.replace(rollout, routing=None))
    differences = [(logprobs - rollout.sampler_logprobs).abs() for logprobs in (replayed, free)]
    apart, flipped = (difference[rollout.completion_mask].mean() for difference in differences)
    assert float(apart) < 0.02
    assert float(flipped) > 2 * float(apart)


@pytest.mark.parametrize(
    ("kind", "reason"), [("alternating", "layers with a sliding window"), ("full", "the learned sinks")]
)
def test_a_retriever_is_refused(kind: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"Quest does not know {reason}"):
        RolloutSampler(model_with_sinks(**KINDS[kind]), FullKV(), retriever=Quest(16, page_size=4, num_dense_layers=0))
    model = model_with_sinks(**KINDS[kind])
    rollout = RolloutSampler(model, FullKV()).generate(PROMPTS, GREEDY)
    with pytest.raises(ValueError, match="Quest does not know the learned sinks"):
        retrieval_logprobs(model, rollout, Quest(16, page_size=4, num_dense_layers=0))
