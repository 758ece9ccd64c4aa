"""Settings of drawing: generation_kwargs and chat_template_kwargs as TRL has them, and the repetition penalty."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs
from rollouts import SMALL, assert_replayed, assert_same, roll_out, small_model
from tiny_grpo import grouped
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sparse_rl_lightning import SparseGRPO
from sparse_rl_lightning.compressors import FullKV, SnapKV
from sparse_rl_lightning.evaluation.problems import with_room
from sparse_rl_lightning.modules import Evaluation, SupervisedWarmup
from sparse_rl_lightning.policies.source import PolicySource
from sparse_rl_lightning.policies.tiny import CHAT_TEMPLATE
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout import RolloutOptions, RolloutSampler, RolloutSession, SamplingParams
from sparse_rl_lightning.rollout.engine.sampling import occurring, penalize
from sparse_rl_lightning.rollout.generation_kwargs import HONORED, with_generation_kwargs
from sparse_rl_lightning.rollout.prompts import encode_prompt, encode_prompts
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

PARAMS = SamplingParams(num_generations=4, max_completion_length=30, temperature=0.9, top_k=7, top_p=0.8, min_p=0.1)
MESSAGES = [{"role": "user", "content": "2+2?"}]
THINKING = CHAT_TEMPLATE + "{% if enable_thinking is defined and enable_thinking is false %}<none>{% endif %}"


@pytest.mark.parametrize(
    ("kwargs", "name", "value"),
    [
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"top_k": 3}, "top_k", 3),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": None}, "top_k", 0),
        ({"top_p": None}, "top_p", 1.0),
        ({"min_p": None}, "min_p", None),
        ({"repetition_penalty": 1.2}, "repetition_penalty", 1.2),
        ({"max_new_tokens": 12}, "max_completion_length", 12),
        ({"max_tokens": 12}, "max_completion_length", 12),
        ({"max_new_tokens": None}, "max_completion_length", 30),
        ({"min_new_tokens": 5}, "min_completion_length", 5),
        ({"min_tokens": 5}, "min_completion_length", 5),
        ({"stop_strings": "##"}, "stop_strings", ("##",)),
        ({"stop": ["a", "b"]}, "stop_strings", ("a", "b")),
        ({"stop": None}, "stop_strings", ()),
        ({"seed": 3}, "seed", 3),
        ({"do_sample": False}, "temperature", 0.0),
        ({"do_sample": True}, "temperature", 0.9),
    ],
)
def test_keys_are_applied_over_the_others(kwargs: dict[str, Any], name: str, value: object) -> None:
    changed = with_generation_kwargs(PARAMS, kwargs)
    assert getattr(changed, name) == value
    same = {field: getattr(changed, field) for field in vars(PARAMS) if field != name}
    assert same == {field: getattr(PARAMS, field) for field in same}


def test_no_keys_change_nothing() -> None:
    assert with_generation_kwargs(PARAMS, None) == with_generation_kwargs(PARAMS, {}) == PARAMS
    bounded = replace(PARAMS, min_completion_length=2, seed=5)
    assert with_generation_kwargs(bounded, {"max_tokens": None, "min_tokens": None, "seed": None}) == bounded


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"num_beams": 4}, "num_beams is not honored, remove it. Honored are do_sample and settings of SamplingParams"),
        ({"begin_suppress_tokens": [3]}, "begin_suppress_tokens is not honored"),
        ({"top_logprobs": 3}, "top_logprobs is not honored, remove it"),
        ({"min_length": 3}, "min_length is not honored, set min_completion_length instead"),
        ({"eos_token_id": 3}, "eos_token_id is not honored, set end_tokens of rollout"),
        ({"n": 4}, "n is not honored, set num_generations instead"),
        (
            {"max_tokens": 3, "max_new_tokens": 4},
            "gives max_completion_length twice, the second time as max_new_tokens",
        ),
        ({"do_sample": False, "temperature": 1.0}, "gives temperature twice"),
        ({"do_sample": "no"}, "do_sample must be true or false, got 'no'"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got top_p=1.5"),
        ({"temperature": "hot"}, "temperature must be a finite number"),
        ({"stop": 5}, "has the wrong type"),
        ({"min_new_tokens": 99}, "min_completion_length must be between 0 and max_completion_length=30"),
    ],
)
def test_what_cannot_be_honored_is_refused(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        with_generation_kwargs(PARAMS, kwargs)


@pytest.mark.parametrize(
    ("changes", "truncates"),
    [
        ({}, False), ({"temperature": 0.5}, False), ({"stop_strings": ("a",)}, False), ({"min_p": 0.0}, False),
        ({"min_completion_length": 1}, True), ({"top_k": 5}, True), ({"top_p": 0.9}, True), ({"min_p": 0.1}, True),
        ({"repetition_penalty": 0.9}, True), ({"top_k": 5, "temperature": 0.0}, False),
    ],
    ids=str,
)  # fmt: skip
def test_what_draws_from_another_distribution(changes: dict[str, Any], truncates: bool) -> None:
    """And what the messages about it advise does not."""
    params = SamplingParams(**changes)
    assert params.truncates is truncates
    advised = dict(each.split("=") for each in SamplingParams.whole_distribution().split(", "))
    assert not replace(params, **{name: json.loads(text) for name, text in advised.items()}).truncates


def test_every_key_leads_to_a_setting() -> None:
    assert set(HONORED.values()) <= set(vars(PARAMS))


class Thinking(PolicySource):
    """A source of a policy whose template reads ``enable_thinking``."""

    def load(self) -> Any:
        tokenizer = character_tokenizer()
        tokenizer.chat_template = THINKING
        return tiny_model(vocab_size=len(tokenizer)), tokenizer


def module(**kwargs: Any) -> SparseGRPO:
    return SparseGRPO(Thinking(), FullKV(), [lambda completions, **_: [0.0] * len(completions)], **grouped(**kwargs))


def test_training_takes_the_last_word() -> None:
    """Of the length that a constant denominator divides by, and of the temperature of every log-prob, too."""
    own = module(
        temperature=1.0, max_completion_length=20, repetition_penalty=1.1,
        generation_kwargs={"temperature": 0.5, "max_new_tokens": 8, "repetition_penalty": 1.3},
    )  # fmt: skip
    assert (own.generator.sampling.temperature, own.learner.temperature) == (0.5, 0.5)
    assert own.generator.sampling.max_completion_length == 8
    rollout = Rollout(*[torch.ones(1, 2)] * 3, torch.ones(1), torch.zeros(1, 2))
    assert own.denominators(rollout).max_completion_length == 8
    assert own.val_sampling.max_completion_length == 8
    assert own.generator.sampling.repetition_penalty == 1.3
    with pytest.raises(ValueError, match=r"sampling\.temperature must be above 0 in training"):
        module(generation_kwargs={"do_sample": False})


def test_the_template_gets_its_arguments_everywhere() -> None:
    tokenizer = Thinking().load()[1]
    plain, without = encode_prompt(tokenizer, MESSAGES), encode_prompt(tokenizer, MESSAGES, {"enable_thinking": False})
    assert tokenizer.decode(without) == tokenizer.decode(plain) + "<none>"
    rows = [{"prompt": MESSAGES, "answer": "4", "solution": "4"}]
    kwargs = {"enable_thinking": False}

    def encoded(own: Any) -> list[list[int]]:
        own.configure_model()
        return own.generator.encode(rows)

    assert encoded(module()) == [plain]
    assert encoded(module(chat_template_kwargs=kwargs)) == [without]
    assert encoded(Evaluation(Thinking(), rollout=RolloutOptions(chat_template_kwargs=kwargs))) == [without]
    warmup = SupervisedWarmup(Thinking(), chat_template_kwargs=kwargs)
    warmup.configure_model()
    assert warmup._encode(rows)[0][0, : len(without)].tolist() == without


def test_results_under_other_templates_are_other_results() -> None:
    rows = [{"prompt": MESSAGES, "answer": "4"}]

    def fingerprint(**kwargs: Any) -> dict[str, str]:
        own = Evaluation(Thinking(), rollout=RolloutOptions(**kwargs))
        own.configure_model()
        own._parts = own._fingerprints("32-true")
        return own._fingerprint(with_room("b", rows, [[3]], own.sampling, None), next(iter(own.caches)))

    plain = fingerprint()
    assert fingerprint(chat_template_kwargs={"enable_thinking": False}) != plain
    assert fingerprint(generation_kwargs={"repetition_penalty": 1.1}) != plain


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"enable_thinkng": False}, "does not read enable_thinkng. Correct or remove it"),
        ({"tokenize": False}, "tokenize cannot be set"),
        ({"add_generation_prompt": False, "enable_thinking": True}, "add_generation_prompt cannot be set"),
    ],
)
def test_arguments_that_would_do_nothing_are_refused(kwargs: dict[str, Any], match: str) -> None:
    tokenizer = Thinking().load()[1]
    with pytest.raises(ValueError, match=match):
        encode_prompts(tokenizer, [MESSAGES], kwargs)


def test_another_template_may_be_given() -> None:
    tokenizer = character_tokenizer()
    template = "{{ messages[0].content }}{{ tail }}"
    ids = encode_prompt(tokenizer, MESSAGES, {"chat_template": template, "tail": "!"})
    assert tokenizer.decode(ids) == "2+2?!"


def test_text_does_not_see_the_template_and_says_so() -> None:
    tokenizer = Thinking().load()[1]
    kwargs = {"enable_thinking": False}
    with pytest.warns(UserWarning, match="no effect on prompts that are text"):
        text, *_ = encode_prompts(tokenizer, ["2+2?"], kwargs)
    assert text == encode_prompt(tokenizer, "2+2?")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode_prompts(tokenizer, ["2+2?", MESSAGES], kwargs)


# ---------------------------------------------------------------- the repetition penalty


REPEATING = [[5, 6, 7, 5], [8], list(range(20, 60)), [3, 3, 3]]


def policy_of(architecture: str = "qwen2") -> PreTrainedModel:
    return small_model(architecture, vocab_size=64, eos_token_id=None)


def generated(policy: PreTrainedModel, prompt: list[int], length: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    return policy.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, **options
    )[0].tolist()  # fmt: skip


@pytest.mark.parametrize("penalty", [1.3, 0.7])
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_greedy_tokens_are_those_of_generate(architecture: str, penalty: float) -> None:
    """With slots that are used again, prompts read once for two samples, and prompts cached in between."""
    policy = policy_of(architecture)
    options: dict[str, Any] = {"temperature": 0, "repetition_penalty": penalty, "seed": 0}
    params = SamplingParams(num_generations=2, max_completion_length=24, **options)
    rollout = roll_out(policy, None, 3, prompts=REPEATING, params=params)
    for row, sequence in enumerate(rollout.sequences):
        prompt = REPEATING[row // 2]
        want = generated(policy, prompt, 24, repetition_penalty=penalty)
        assert sequence[: len(want)].tolist() == want
    plain = generated(policy, REPEATING[0], 24)
    assert rollout.sequences[0, : len(plain)].tolist() != plain  # the penalty does something


def test_what_is_drawn_from_is_transformers_distribution() -> None:
    """And sampler_logprobs stay those of the whole distribution, under evictions too."""
    policy = policy_of()
    options: dict[str, Any] = {"temperature": 0.8, "repetition_penalty": 1.4, "top_k": 20, "top_p": 0.9}
    params = SamplingParams(num_generations=2, max_completion_length=20, **options)
    rollout = roll_out(policy, None, 3, prompts=REPEATING, params=params)
    warpers = TemperatureLogitsWarper(0.8), TopKLogitsWarper(20), TopPLogitsWarper(0.9)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4), *warpers])
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
    policy = policy_of()
    params = SamplingParams(num_generations=2, max_completion_length=30, repetition_penalty=1.5, seed=1)
    rollout = roll_out(policy, SnapKV(**SMALL), 3, prompts=REPEATING, params=params)
    assert_replayed(policy, rollout)
    assert rollout.behavior_logprobs is not None
    assert not torch.allclose(rollout.behavior_logprobs, rollout.sampler_logprobs, atol=1e-3)


def test_a_sequence_is_the_same_alone_and_in_a_session() -> None:
    policy = policy_of()
    params = SamplingParams(num_generations=2, max_completion_length=30, repetition_penalty=1.5, seed=1)
    together = RolloutSampler(policy, SnapKV(**SMALL)).generate(REPEATING, params)
    alone = RolloutSampler(policy, SnapKV(**SMALL), num_slots=1).generate(REPEATING[1:2], params, sequence_ids=[2, 3])
    width = alone.sequences.shape[1]
    assert torch.equal(together.sequences[2:4, :width], alone.sequences)
    session = RolloutSession(RolloutSampler(policy, SnapKV(**SMALL), num_slots=3), params, max_prompt_length=40)
    session.add(REPEATING, sequence_ids=range(8))
    session.advance(max_steps=13)
    session.advance()
    assert_same(session.take(session.complete), together)


def test_the_penalty_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 0.0, 4.0], [2.0, -2.0, 0.0, 4.0]])
    occurred = occurring(torch.tensor([[0, 1, 3], [2, 3, 3]]), torch.tensor([2, 0]), 4)
    assert occurred.tolist() == [[True, True, False, False], [False] * 4]
    assert penalize(logits, occurred, 2.0).tolist() == [[1.0, -4.0, 0.0, 4.0], [2.0, -2.0, 0.0, 4.0]]


def test_without_a_penalty_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(*_: Tensor) -> None:
        raise AssertionError("nobody needs it")

    monkeypatch.setattr("sparse_rl_lightning.rollout.engine.engine.occurring", count)
    rollout = RolloutSampler(policy_of()).generate([[3]], SamplingParams(max_completion_length=3))
    assert rollout.behavior_logprobs is None
