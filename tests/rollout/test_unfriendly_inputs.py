"""What callers of the sampler give by mistake or by habit: a clear error, or it works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2ForSequenceClassification

from sparse_rl_lightning.compressors import FullKV, RandomEviction
from sparse_rl_lightning.logprobs import logprobs_at, sequence_logprobs
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams
from sparse_rl_lightning.testing import tiny_model

IDS = [[5, 9, 33], [7, 8]]
PARAMS = SamplingParams(max_completion_length=5, seed=1)


def model() -> Any:
    return tiny_model(initializer_range=0.2, eos_token_id=None)


@pytest.mark.parametrize(
    "prompts",
    [
        [torch.tensor(ids) for ids in IDS],
        [torch.tensor(ids, dtype=torch.int32) for ids in IDS],
        [np.array(ids) for ids in IDS],
        [[np.int64(token) for token in ids] for ids in IDS],
        tuple(tuple(ids) for ids in IDS),
        np.array([np.array(ids) for ids in IDS], dtype=object),
    ],
)
def test_arrays_are_prompts(prompts: Any) -> None:
    sampler = RolloutSampler(model(), RandomEviction(budget=4, buffer=2, num_sinks=1, window=1), num_slots=2)
    want = sampler.generate(IDS, PARAMS)
    got = sampler.generate(prompts, PARAMS)
    session = RolloutSession(sampler, PARAMS, 3)
    session.add(prompts, range(2))
    session.advance()
    for rollout in (got, session.take(session.complete)):
        assert torch.equal(rollout.sequences, want.sequences)
        assert torch.equal(rollout.evictions.death, want.evictions.death)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (torch.tensor([[3, 4], [5, 0]]), r"prompts is one array of shape \(2, 2\), whose rows may be padded"),
        (np.array([[3, 4]]), r"prompts is one array of shape \(1, 2\)"),
        (torch.tensor([3, 4]), "prompt 0 is 3: .*a single prompt stands in a list of its own"),
        ([3, 4], "prompt 0 is 3: .*a single prompt stands in a list of its own"),
        ("text", "prompt 0 is 't': .*Text must be tokenized first"),
        (["some text"], "prompt 0 is 'some text': .*Text must be tokenized first"),
        ([[3], torch.tensor([3.0])], "prompt 1 holds 3.0: .*whole numbers from 0 to 127"),
        ([torch.tensor([[3, 4]])], r"prompt 0 holds \[3, 4\]"),
        ([torch.tensor(3)], "prompt 0 is 3: "),
        (
            [[3], np.array([128])],
            "prompt 1 holds token id 128, but the model has embeddings of 0 to 127. If tokens were",
        ),
        ([[1], [2, -1]], r"^prompt 1 holds .*(whole numbers from|embeddings of) 0 to 127"),
        ([[1], [2, 1.5]], r"^prompt 1 holds 1.5: .*whole numbers from 0 to 127"),
        ([[1], [2, "a"]], r"^prompt 1 holds .*whole numbers from 0 to 127"),
        ([[3], torch.tensor([], dtype=torch.int64)], "prompt 1 is empty"),
        ([[1], [2] * 508], r"prompt 1 has 508 tokens.*context of 512"),
        ([], "prompts is empty"),
        (torch.empty(0, 3), "prompts is empty"),
    ],
)
def test_what_is_no_prompt_is_refused(prompts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutSampler(model()).generate(prompts, PARAMS)


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_seeds_of_64_bits(seed: int) -> None:
    params = SamplingParams(max_completion_length=5, seed=seed)
    RolloutSampler(model(), RandomEviction(budget=4, buffer=2, num_sinks=1, window=1)).generate(IDS, params)


def test_larger_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"seed must be a whole number of 64 bits.*got seed=9223372036854775808"):
        SamplingParams(seed=2**63)


@pytest.mark.parametrize("ids", [[128], [3, -1], [2.5], ["a"], torch.tensor([500])])
def test_end_tokens_that_cannot_be_drawn_are_refused(ids: Any) -> None:
    with pytest.raises(
        ValueError, match=r"end_token_ids holds .*can never draw: end tokens are whole numbers from 0 to 12"
    ):
        RolloutSampler(model(), end_token_ids=ids)


def test_end_tokens_of_the_model_and_of_arrays() -> None:
    policy = model()
    assert RolloutSampler(policy, end_token_ids=torch.tensor([3, 4])).end_token_ids == [3, 4]
    assert RolloutSampler(policy, end_token_ids=np.array([3])).end_token_ids == [3]
    policy.generation_config.eos_token_id = 200
    with pytest.raises(
        ValueError, match=r"eos_token_id of the model's generation_config holds 200, which the model can never draw"
    ):
        RolloutSampler(policy)


def test_more_most_likely_tokens_than_there_are() -> None:
    sampler = RolloutSampler(model(), FullKV(), num_slots=1)
    whole = SamplingParams(max_completion_length=5, top_logprobs=128)
    assert sampler.generate(IDS, whole).topk_ids.shape[2] == 128
    more = SamplingParams(max_completion_length=5, top_logprobs=129)
    with pytest.raises(ValueError, match="top_logprobs must be at most the vocabulary's 128 tokens"):
        sampler.generate(IDS, more)
    with pytest.raises(ValueError, match="top_logprobs must be at most"):
        RolloutSession(sampler, more, 3).add(IDS, range(2))


def headless() -> Any:
    return model().model


def classifier() -> Any:
    return Qwen2ForSequenceClassification(model().config)


@pytest.mark.parametrize("make", [headless, classifier])
def test_models_without_an_output_head_are_refused(make: Callable[[], Any]) -> None:
    policy, ids = make(), torch.tensor([[3, 4]])
    refused = f"{type(policy).__name__} has no output head.*AutoModelForCausalLM"
    with pytest.raises(ValueError, match=refused):
        RolloutSampler(policy)
    with pytest.raises(ValueError, match=refused):
        sequence_logprobs(policy, ids, ids > 3)
    with pytest.raises(ValueError, match=refused):
        logprobs_at(policy, ids, ids[..., None], ids > 3)


def test_weights_without_numbers_are_refused() -> None:
    with torch.device("meta"):
        policy = model()
    with pytest.raises(ValueError, match="weights of this Qwen2ForCausalLM are on the meta device"):
        RolloutSampler(policy)


@pytest.mark.parametrize("thing", ["Qwen/Qwen2.5-0.5B", torch.nn.Linear(2, 2), None])
def test_what_is_no_model_is_refused(thing: Any) -> None:
    with pytest.raises(ValueError, match=f"model must be a causal language model of transformers, got {type(thing)}"):
        RolloutSampler(thing)
