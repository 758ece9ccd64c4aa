"""Weights and logits that are no numbers end a rollout by name, under every compressor, and wait for nothing more."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rollouts import CHECK_EVERY, small_model
from torch import Tensor
from transformers import Qwen2ForSequenceClassification

import sparse_rl_lightning.compressors as c
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.forward import LearnerOptions
from sparse_rl_lightning.logprobs import logprobs_at, sequence_logprobs
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams, forced_rollout
from sparse_rl_lightning.rollout.engine.finished import FinishCheck
from sparse_rl_lightning.testing import tiny_model

SIZES: dict[str, Any] = {"budget": 10, "buffer": 4, "num_sinks": 1, "window": 4}
COMPRESSORS: dict[str, Callable[[], c.Compressor]] = {
    "full": c.FullKV,
    "streaming": lambda: c.StreamingLLM(**SIZES),
    "random": lambda: c.RandomEviction(**SIZES),
    "snap": lambda: c.SnapKV(**SIZES),
    "norm": lambda: c.KNorm(**SIZES),
    "sums": lambda: c.H2O(**SIZES),
    "wrapped": lambda: c.Combined([c.RKV(**SIZES, protect_token_ids=[3])], across_heads="max"),
}
PROMPTS = [[5, 6, 7], list(range(8, 30))]


def sharp() -> Any:
    return small_model(eos_token_id=None)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("weight", ["layers.0.self_attn.k_proj.weight", "norm.weight"])
def test_weights_are_named_before_anything_is_drawn(name: str, temperature: float, weight: str) -> None:
    policy = sharp()
    sampler = RolloutSampler(policy, COMPRESSORS[name]())
    params = SamplingParams(max_completion_length=6, temperature=temperature)
    whole = sampler.generate(PROMPTS, params)
    with torch.no_grad():
        good = policy.model.get_parameter(weight)[0].clone()
        policy.model.get_parameter(weight)[0] = torch.nan
    with pytest.raises(ValueError, match=f"weights hold NaN: model.{weight} of 26"):
        sampler.generate(PROMPTS, params)
    with pytest.raises(ValueError, match="weights hold NaN"):
        forced_rollout(policy, whole, COMPRESSORS[name]())
    with torch.no_grad():
        policy.model.get_parameter(weight)[0] = good
    assert torch.equal(sampler.generate(PROMPTS, params).sequences, whole.sequences)


class Poison:
    """Makes the last hidden state NaN, or too large, where the model reads a certain token."""

    def __init__(self, policy: Any, token: int, value: float = torch.nan) -> None:
        self.token, self.value, self.found = token, value, torch.zeros(0, dtype=torch.bool)
        self.handles = [
            policy.model.embed_tokens.register_forward_hook(self.look),
            policy.model.norm.register_forward_hook(self.spoil),
        ]

    def look(self, module: Any, args: tuple[Tensor], out: Tensor) -> None:
        self.found = args[0] == self.token

    def spoil(self, module: Any, args: tuple[Tensor], out: Tensor) -> Tensor:
        return torch.where(self.found.unsqueeze(-1), self.value, out)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_logits_are_found_at_the_next_look(
    name: str, temperature: float, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token that sequence 1 draws spoils what follows it: the next one, at the decode step that feeds it."""
    policy, params = sharp(), SamplingParams(max_completion_length=30, temperature=temperature, seed=1)
    sampler = RolloutSampler(policy, COMPRESSORS[name]())
    whole = sampler.generate(PROMPTS, params)
    drawn = [row[mask].tolist() for row, mask in zip(whole.sequences, whole.completion_mask, strict=True)]
    known = [*drawn[0], *PROMPTS[1]]
    place = next(i for i, token in enumerate(drawn[1]) if i > 4 and token not in [*known, *drawn[1][:i]])
    poison = Poison(policy, drawn[1][place], value)
    for check_every, step in ((1, place + 1), (8, -(-(place + 1) // 8) * 8)):
        monkeypatch.setattr(CHECK_EVERY, {"cpu": check_every})
        with pytest.raises(ValueError, match=rf"Found at decode step (\d+); .*: \{{1: {place + 1}\}}") as refused:
            sampler.generate(PROMPTS, params)
        found = int(str(refused.value).split("decode step ")[1].split(";")[0])
        assert place + 1 <= found <= step  # a compressor that is asked in between finds out earlier
        session = RolloutSession(RolloutSampler(policy, COMPRESSORS[name](), num_slots=2), params, 22)
        session.add(PROMPTS, range(2))
        with pytest.raises(ValueError, match=rf"\{{1: {place + 1}\}}"):
            session.advance()
    with pytest.raises(ValueError, match=rf"\{{1: {place + 1}\}}"):
        forced_rollout(policy, whole, COMPRESSORS[name](), temperature)
    poison.remove()
    assert torch.equal(sampler.generate(PROMPTS, params).sequences, whole.sequences)


def test_a_prompt_spoils_its_own_samples_only() -> None:
    policy = sharp()
    Poison(policy, PROMPTS[1][-1])
    with pytest.raises(ValueError, match=r"Found at decode step 0; .*: \{2: 0, 3: 0\}"):
        RolloutSampler(policy).generate(PROMPTS, SamplingParams(num_generations=2, max_completion_length=4))


def test_nothing_past_an_end_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fed behind an end token is thrown away, so it may be spoiled."""
    policy, params = sharp(), SamplingParams(max_completion_length=20, seed=1)
    whole = RolloutSampler(policy).generate(PROMPTS[:1], params)
    end = int(whole.sequences[0, 12])
    Poison(policy, end)
    monkeypatch.setattr(CHECK_EVERY, {"cpu": 8})
    rollout = RolloutSampler(policy, end_token_ids=[end]).generate(PROMPTS[:1], params)
    assert torch.equal(rollout.sequences, whole.sequences[:, : rollout.sequences.shape[1]])
    assert bool(rollout.finished)


def test_a_score_without_a_reason_is_the_compressors() -> None:
    class Faulty(c.SnapKV):
        def score(self, layer: Any) -> Tensor:
            return torch.full_like(super().score(layer), torch.nan)

    with pytest.raises(ValueError, match=r"^Reading the prompts of sequences \[0, 1\], at decode step 0: Faulty"):
        RolloutSampler(sharp(), Faulty(**SIZES)).generate(PROMPTS, SamplingParams(max_completion_length=4))
    with pytest.raises(ValueError, match=r"^Faulty.score returned NaN for live entries of layer 0\.$"):
        RolloutSampler(sharp(), Faulty(**SIZES)).generate(PROMPTS[:1], SamplingParams(max_completion_length=20))


def test_the_device_is_asked_once_per_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two checks for ends nothing is copied to the host; a check is one copy."""
    checks, copies = [], []
    own, to_list = FinishCheck.read, Tensor.tolist

    def read(self: FinishCheck) -> Any:
        before = len(copies)
        found = list(own(self))
        checks.append((self.num_steps, len(copies) - before))
        return iter(found)

    monkeypatch.setattr(FinishCheck, "read", read)
    monkeypatch.setattr(Tensor, "tolist", lambda self: (copies.append(self.shape), to_list(self))[1])
    monkeypatch.setattr(CHECK_EVERY, {"cpu": 8})
    RolloutSampler(sharp()).generate(PROMPTS, SamplingParams(max_completion_length=33))
    # queued after four times eight steps, of which the last replaces the third; first tokens are among the others
    assert checks == [(8, 1), (16, 1), (32, 1)]


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
    sampler = RolloutSampler(model(), c.RandomEviction(budget=4, buffer=2, num_sinks=1, window=1), num_slots=2)
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
        (["some text"], "prompt 0 is 'some text': .*Text must be tokenized first"),
        ([[3], torch.tensor([3.0])], "prompt 1 holds 3.0: .*whole numbers from 0 to 127"),
        ([torch.tensor([[3, 4]])], r"prompt 0 holds \[3, 4\]"),
        ([torch.tensor(3)], "prompt 0 is 3: "),
        ([[3], np.array([128])], "prompt 1 holds token id 128, but the model has embeddings of 0 to 127. If tokens "),
        ([[1], [2, -1]], r"^prompt 1 holds .*(whole numbers from|embeddings of) 0 to 127"),
        ([[1], [2, 1.5]], r"^prompt 1 holds 1.5: .*whole numbers from 0 to 127"),
        ([[1], [2, "a"]], r"^prompt 1 holds .*whole numbers from 0 to 127"),
        ([[3], torch.tensor([], dtype=torch.int64)], "prompt 1 is empty"),
        ([[1], [2] * 508], r"prompt 1 has 508 tokens.*context of 512"),
        (torch.empty(0, 3), "prompts is empty"),
    ],
)
def test_what_is_no_prompt_is_refused(prompts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutSampler(model()).generate(prompts, PARAMS)


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_seeds_of_64_bits(seed: int) -> None:
    params = SamplingParams(max_completion_length=5, seed=seed)
    RolloutSampler(model(), c.RandomEviction(budget=4, buffer=2, num_sinks=1, window=1)).generate(IDS, params)


@pytest.mark.parametrize("ids", [[128], [3, -1], [2.5], ["a"], torch.tensor([500])])
def test_end_tokens_that_cannot_be_drawn_are_refused(ids: Any) -> None:
    said = r"end_token_ids holds .*can never draw: end tokens are whole numbers from 0 to 12"
    with pytest.raises(ValueError, match=said):
        RolloutSampler(model(), end_token_ids=ids)


def test_arrays_are_end_tokens() -> None:
    assert RolloutSampler(model(), end_token_ids=torch.tensor([3, 4])).end_token_ids == [3, 4]
    assert RolloutSampler(model(), end_token_ids=np.array([3])).end_token_ids == [3]


def test_more_most_likely_tokens_than_there_are() -> None:
    sampler = RolloutSampler(model(), c.FullKV(), num_slots=1)
    whole = SamplingParams(max_completion_length=5, top_logprobs=128)
    assert sampler.generate(IDS, whole).topk_ids.shape[2] == 128
    more = SamplingParams(max_completion_length=5, top_logprobs=129)
    with pytest.raises(ValueError, match="top_logprobs must be at most"):
        RolloutSession(sampler, more, 3).add(IDS, range(2))


def test_what_is_no_compressor_or_no_whole_number_is_refused() -> None:
    model, sizes = tiny_model(), {"buffer": 3, "num_sinks": 1, "window": 2}
    wrong: dict[str, Callable[[], Any]] = {
        r"a compressor such as SnapKV\(budget=512\), got <class": lambda: RolloutSampler(model, c.SnapKV),  # type: ignore[arg-type]
        r"a compressor such as SnapKV\(budget=512\), got 512": lambda: RolloutSampler(model, 512),  # type: ignore[arg-type]
        r"a compressor such as .*, got <class '.*KNorm'>": lambda: c.Smoothed(c.KNorm),  # type: ignore[arg-type]
        r"a compressor such as .*, got <class '.*RKV'>": lambda: c.Combined([c.SnapKV(8, **sizes), c.RKV]),  # type: ignore[list-item]
        r"num_slots must be a whole number": lambda: RolloutSampler(model, num_slots=2.0),  # type: ignore[arg-type]
        r"max_prefill_tokens must be a whole number": lambda: RolloutSampler(model, max_prefill_tokens=1e4),  # type: ignore[arg-type]
        r"head_chunk_size must be a whole number": lambda: LearnerOptions(head_chunk_size=5e2),  # type: ignore[arg-type]
        r"sequence_ids must name 2 sequences": lambda: RolloutSampler(model).generate(
            [[5], [6]], SamplingParams(max_completion_length=2), sequence_ids=[0.2, 0.7],  # type: ignore[list-item]
        ),
    }  # fmt: skip
    for said, make in wrong.items():
        with pytest.raises(UserError, match=said):
            make()
    numbers = ("num_generations", "max_completion_length", "min_completion_length", "top_k", "top_logprobs")
    for name, value in itertools.product(numbers, (2.0, "5", None)):
        with pytest.raises(UserError, match=rf"{name} must be .*a whole number.*, got {name}={value}"):
            SamplingParams(**{name: value})
    with pytest.raises(UserError, match="stop_strings must be a list of texts"):
        SamplingParams(stop_strings=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make", [lambda: model().model, lambda: Qwen2ForSequenceClassification(model().config)], ids=["body", "classifier"]
)
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
