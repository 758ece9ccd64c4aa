"""The repetition penalty: the tokens of transformers, a distribution by hand, the same in any batch and session."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sparse_rl_lightning.compressors import FullKV, SnapKV
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams, replay_logprobs
from sparse_rl_lightning.rollout.engine.sampling import occurring, penalize
from sparse_rl_lightning.testing import tiny_model

PROMPTS = [[5, 6, 7, 5], [8], list(range(20, 60)), [3, 3, 3]]
SMALL = {"budget": 12, "buffer": 5, "num_sinks": 2, "window": 4}


def model(architecture: str = "qwen2") -> PreTrainedModel:
    return tiny_model(architecture, initializer_range=0.2, vocab_size=64, eos_token_id=None)


def generated(policy: PreTrainedModel, prompt: list[int], length: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    return policy.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, **options
    )[0].tolist()  # fmt: skip


@pytest.mark.parametrize("penalty", [1.3, 0.7])
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_greedy_tokens_are_those_of_generate(architecture: str, penalty: float) -> None:
    """With slots that are used again, prompts read once for two samples, and prompts cached in between."""
    policy = model(architecture)
    params = SamplingParams(
        num_generations=2, max_completion_length=24, temperature=0, repetition_penalty=penalty, seed=0
    )
    rollout = RolloutSampler(policy, FullKV(), num_slots=3, end_token_ids=[]).generate(PROMPTS, params)
    for row, sequence in enumerate(rollout.sequences):
        prompt = PROMPTS[row // 2]
        want = generated(policy, prompt, 24, repetition_penalty=penalty)
        assert sequence[: len(want)].tolist() == want
    plain = generated(policy, PROMPTS[0], 24)
    assert rollout.sequences[0, : len(plain)].tolist() != plain  # the penalty does something


def test_what_is_drawn_from_is_transformers_distribution() -> None:
    """And sampler_logprobs stay those of the whole distribution, under evictions too."""
    policy = model()
    params = SamplingParams(
        num_generations=2,
        max_completion_length=20,
        temperature=0.8,
        repetition_penalty=1.4,
        top_k=20,
        top_p=0.9,
        seed=4,
    )
    rollout = RolloutSampler(policy, FullKV(), num_slots=3, end_token_ids=[]).generate(PROMPTS, params)
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.4),
            TemperatureLogitsWarper(0.8),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
        ]
    )
    assert rollout.behavior_logprobs is not None
    for row, prompt_length in enumerate(rollout.prompt_lengths.tolist()):
        tokens = rollout.sequences[row, : prompt_length + 20]
        with torch.no_grad():
            logits = policy(tokens[None]).logits[0]
        for t in range(prompt_length, len(tokens)):
            drawn_from = processors(tokens[None, :t], logits[None, t - 1].clone()).log_softmax(-1)[0]
            assert_same_logprobs(rollout.behavior_logprobs[row, t], drawn_from[tokens[t]])
            whole = (logits[t - 1] / 0.8).log_softmax(-1)
            assert_same_logprobs(rollout.sampler_logprobs[row, t], whole[tokens[t]])


def test_replay_reproduces_the_log_probs_before_the_penalty() -> None:
    policy = model()
    params = SamplingParams(num_generations=2, max_completion_length=30, repetition_penalty=1.5, seed=1)
    rollout = RolloutSampler(policy, SnapKV(**SMALL), num_slots=3).generate(PROMPTS, params)
    with torch.no_grad():
        replayed = replay_logprobs(policy, rollout)
    assert_same_logprobs(replayed, rollout.sampler_logprobs)
    assert rollout.behavior_logprobs is not None
    assert not torch.allclose(rollout.behavior_logprobs, rollout.sampler_logprobs, atol=1e-3)


def test_a_sequence_is_the_same_alone_and_in_a_session() -> None:
    policy = model()
    params = SamplingParams(num_generations=2, max_completion_length=30, repetition_penalty=1.5, seed=1)
    together = RolloutSampler(policy, SnapKV(**SMALL)).generate(PROMPTS, params)
    alone = RolloutSampler(policy, SnapKV(**SMALL), num_slots=1).generate(PROMPTS[1:2], params, sequence_ids=[2, 3])
    width = alone.sequences.shape[1]
    assert torch.equal(together.sequences[2:4, :width], alone.sequences)
    session = RolloutSession(RolloutSampler(policy, SnapKV(**SMALL), num_slots=3), params, max_prompt_length=40)
    session.add(PROMPTS, sequence_ids=range(8))
    session.advance(max_steps=13)
    session.advance()
    assert_same(session.take(session.complete), together)


def assert_same(a: Rollout, b: Rollout) -> None:
    assert torch.equal(a.sequences, b.sequences)
    assert a.behavior_logprobs is not None
    assert b.behavior_logprobs is not None
    assert_same_logprobs(a.behavior_logprobs, b.behavior_logprobs)


def test_the_penalty_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 0.0, 4.0], [2.0, -2.0, 0.0, 4.0]])
    occurred = occurring(torch.tensor([[0, 1, 3], [2, 3, 3]]), torch.tensor([2, 0]), 4)
    assert occurred.tolist() == [[True, True, False, False], [False] * 4]
    assert penalize(logits, occurred, 2.0).tolist() == [[1.0, -4.0, 0.0, 4.0], [2.0, -2.0, 0.0, 4.0]]


def test_without_a_penalty_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(*_: Tensor) -> None:
        raise AssertionError("nobody needs it")

    monkeypatch.setattr("sparse_rl_lightning.rollout.engine.engine.occurring", count)
    rollout = RolloutSampler(model()).generate([[3]], SamplingParams(max_completion_length=3))
    assert rollout.behavior_logprobs is None


@pytest.mark.parametrize("penalty", [0.0, -1.0, float("inf"), float("nan")])
def test_penalties_out_of_range_are_refused(penalty: float) -> None:
    with pytest.raises(ValueError, match="repetition_penalty must be a positive number, 1 for no penalty, got"):
        SamplingParams(repetition_penalty=penalty)
