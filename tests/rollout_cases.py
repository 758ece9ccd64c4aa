"""Rollouts that a GPU, pretended or real, must give as a CPU does: the cases, their models, and what is compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs
from transformers import PreTrainedModel

import sparse_rl_lightning.compressors as c
from sparse_rl_lightning.budgets import Adaptive, LengthSchedule, Pyramid
from sparse_rl_lightning.calibration import gather_statistics
from sparse_rl_lightning.compressors import RKV, Compressor, FullKV, SnapKV
from sparse_rl_lightning.policies import LoraPolicy
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.policies.quantized import QuantizedLinear
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.retrievers import Centroid, Quest
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams
from sparse_rl_lightning.testing import character_tokenizer, tiny_model
from tests.families import HYBRIDS, family

PROMPTS = [([5 + i, 9, 11, 40, 22] * 9)[: 3 + 11 * i] for i in range(3)]
SMALL: dict[str, Any] = {"budget": 16, "buffer": 8, "num_sinks": 2, "window": 4}
TOKENIZER = character_tokenizer()
NEXT = 2e-2  # if a key or value is rounded to the next number of 8 or 16 bits
PARAMS: dict[str, Any] = {"num_generations": 2, "max_completion_length": 26, "seed": 1}


@dataclass(frozen=True)
class Case:
    """A sampler's settings; the rest is the same in all cases."""

    compressor: Compressor | type[Compressor] = field(default_factory=lambda: RKV(**SMALL))
    params: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    architecture: str = "qwen2"
    quantization: Any = None
    is_captured: bool = True
    window: int = 0  # of all layers but the first
    has_ties: bool = False  # scores of equal tokens that are equal but for rounding: who dies is up to the device
    initializer_range: float = 0.4  # less where attention rounds to 16 bits, which moves tokens of a peaked policy
    close: float = 2e-4  # log-probs of a real GPU to those of a CPU


CASES = {
    "full": Case(FullKV()),
    "rkv": Case(),
    "rkv, whole prompt": Case(RKV(**SMALL, compress_prompt=False)),
    "snapkv": Case(SnapKV(**SMALL)),
    "streaming": Case(c.StreamingLLM(**SMALL)),
    "random": Case(c.RandomEviction(**SMALL)),
    "random attention": Case(c.RandomAttention(budget=34, buffer=8, window=4)),
    "vase": Case(c.VaSE(**SMALL)),
    "snapkv, largest": Case(SnapKV(**SMALL, aggregation="max_clamped")),
    "oldest turns": Case(c.OldestTurns(budget=34, buffer=8, window=4)),
    "knorm": Case(c.KNorm(**SMALL), has_ties=True),
    "keydiff": Case(c.KeyDiff(**SMALL)),
    "tova": Case(c.TOVA(budget=16, buffer=1, num_sinks=0, window=1)),
    "cur": Case(c.CUR(**SMALL, local_window=4), has_ties=True),
    "lagkv": Case(c.LagKV(**SMALL, lag_size=4)),
    "expected attention": Case(c.ExpectedAttention(**SMALL, query_window=8, num_future=16)),
    "combined": Case(c.Combined([SnapKV(**SMALL), c.KNorm(**SMALL)], [2, 1]), has_ties=True),
    "union over heads": Case(c.Combined([SnapKV(**SMALL)], across_heads="max")),
    "protected": Case(SnapKV(budget=34, buffer=8, num_sinks=2, window=4, protect_prompt=True, protect_token_ids=[7])),
    "h2o": Case(c.H2O(**SMALL), is_captured=False),
    "smoothed": Case(c.Smoothed(SnapKV(**SMALL)), is_captured=False),
    "qfilters": Case(c.QFilters),
    "triattention": Case(c.TriAttention),
    "schedule": Case(RKV(budget=LengthSchedule([0, 30], [12, 18]), buffer=8, num_sinks=2, window=4)),
    "pyramid": Case(SnapKV(budget=24, buffer=8, num_sinks=1, window=4, budget_rule=Pyramid(beta=2))),
    "adaptive": Case(SnapKV(**SMALL, budget_rule=Adaptive())),
    "centroid": Case(FullKV(), options={"retriever": Centroid(budget=16, page_size=4, num_dense_layers=1)}),
    "quest over rkv": Case(options={"retriever": Quest(budget=12, page_size=4, num_dense_layers=0)}),
    "top-k": Case(params={"top_k": 7}),
    "top-p": Case(params={"top_p": 0.8}),
    "min-p": Case(params={"min_p": 0.1}),
    "greedy": Case(params={"temperature": 0.0}),
    "temperature": Case(params={"temperature": 0.7}),
    "minimum length": Case(params={"min_completion_length": 5}),
    "repetition penalty": Case(params={"repetition_penalty": 1.3}),
    "top log-probs": Case(params={"top_logprobs": 3}),
    "stop strings": Case(params={"stop_strings": ("a", "Z")}, options={"tokenizer": TOKENIZER}),
    "float8": Case(params={"seed": 5}, options={"kv_dtype": "float8_e4m3fn"}, close=NEXT),
    "bfloat16 cache": Case(options={"kv_dtype": "bfloat16"}, close=NEXT, initializer_range=0.05),
    "prompts in chunks": Case(options={"max_prefill_tokens": 8}),
    "no pool kept": Case(options={"keep_pool": False}),
    "memory limit": Case(options={"memory_limit": 0.01}),
    "llama": Case(architecture="llama"),
    "qwen3": Case(architecture="qwen3"),
    "8 bits": Case(quantization="int8"),
    "4 bits": Case(quantization="nf4"),
    "8 bits, own forward pass": Case(quantization="int8", options={"decoder": "transformers"}),
    "own forward pass": Case(architecture="qwen3", options={"decoder": "transformers"}),
    "hybrid": Case(architecture="qwen3_5_text"),
    "learned sinks, experts": Case(architecture="gpt_oss"),
    "learned sinks, running state": Case(c.H2O(**SMALL), architecture="gpt_oss", is_captured=False),
    "windows": Case(window=8),
    "windows, own forward pass, in chunks": Case(
        window=8, options={"decoder": "transformers", "max_prefill_tokens": 8}
    ),
    "windows in a float8 cache": Case(
        SnapKV(**SMALL, budget_rule=Adaptive()), {"seed": 4}, {"kv_dtype": "float8_e4m3fn"}, window=8, close=NEXT
    ),
    "own forward pass, turned queries": Case(c.ExpectedAttention(**SMALL), options={"decoder": "transformers"}),
}


def policy(architecture: str = "qwen2", initializer_range: float = 0.4) -> PreTrainedModel:
    if architecture in (*HYBRIDS, "gpt_oss"):
        model = family(architecture, vocab_size=len(TOKENIZER))
        model.config._experts_implementation = "batched_mm"  # a CPU lacks operations of the others in a graph
        return model
    return tiny_model(architecture, vocab_size=len(TOKENIZER), hidden_size=32, num_heads=2, num_kv_heads=1,
                      initializer_range=initializer_range)  # fmt: skip


def need(quantization: str) -> None:
    pytest.importorskip("peft", reason="peft is an extra")
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is an extra")


def adapt(model: PreTrainedModel, quantization: Any) -> None:
    """Quantize under adapters that change something."""
    LoraPolicy("a folder", r=2, quantization=quantization).adapt(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.03, generator=torch.Generator().manual_seed(0))


def windowed(window: int) -> PreTrainedModel:
    return family(
        "qwen2", vocab_size=len(TOKENIZER), hidden_size=32, num_attention_heads=2, num_key_value_heads=1,
        num_hidden_layers=3, initializer_range=0.4, use_sliding_window=True, sliding_window=window,
        max_window_layers=1,
    )  # fmt: skip


def model_of(case: Case) -> PreTrainedModel:
    """The model of a case, on the CPU; it is what the case says."""
    model = windowed(case.window) if case.window else policy(case.architecture, case.initializer_range)
    if case.quantization is not None:
        need(case.quantization)
        adapt(model, case.quantization)
    kinds = {module.quantization for module in model.modules() if isinstance(module, QuantizedLinear)}
    assert kinds == ({case.quantization} - {None})
    assert model.config.model_type in (case.architecture, f"{case.architecture}_lm")
    assert not case.window or CacheGeometry.of(model).window_of(1) == case.window
    return model


def made(compressor: Compressor | type[Compressor], model: PreTrainedModel) -> Compressor:
    """The compressor, with statistics of random text if it needs some."""
    if isinstance(compressor, Compressor):
        return compressor
    texts = torch.randint(2, len(TOKENIZER), (4, 60))
    statistics = gather_statistics(model, texts, torch.full((4,), 60))
    return compressor(**SMALL, statistics=statistics)  # type: ignore[call-arg]


def assert_same(got: Rollout, want: Rollout, close: float = 2e-5) -> None:
    """Both on the CPU; the seeds used meet no near-tie."""
    assert torch.equal(got.sequences, want.sequences)
    assert torch.equal(got.finished, want.finished)
    for name in ("sampler_logprobs", "behavior_logprobs", "topk_logprobs"):
        one, other = getattr(got, name), getattr(want, name)
        assert (one is None) == (other is None)
        if one is not None:
            assert_same_logprobs(one, other, close)
    assert (got.evictions is None) == (want.evictions is None)
    if got.evictions is not None:
        assert torch.equal(got.evictions.death, want.evictions.death)


def put_back(session: RolloutSession) -> None:
    """Take every slot's content out, fill the slot with another's, and put its own back, as beams of a text do."""
    cache, slots = session.engine.cache, session.scheduler.in_slots
    contents = {slot: cache.save(slot, one.num_fed) for slot, one in slots.items()}
    order = [*contents]
    for slot, other in zip(order, [*order[1:], *order[:1]], strict=True):
        cache.restore(slot, contents[other])
    for slot, content in contents.items():
        cache.restore(slot, content)


def in_a_session(model: PreTrainedModel, compressor: Compressor) -> tuple[Rollout, int]:
    """A rollout over two updates, its slots taken out and put back in between, and its number of steps."""
    session = RolloutSession(RolloutSampler(model, compressor, num_slots=4), SamplingParams(**PARAMS), 40)
    numbers = session.add(PROMPTS, range(2 * len(PROMPTS)))
    session.advance(max_steps=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    session.advance(max_steps=8)
    put_back(session)
    session.advance()
    return session.take(numbers).to("cpu"), session.scheduler.num_steps


def conversations(model: PreTrainedModel, compressor: Compressor) -> tuple[Rollout, int]:
    """Conversations of up to five turns, slots taken out and put back after each, and their number of steps."""
    sampler = RolloutSampler(model, compressor, num_slots=4, end_token_ids=[*range(20, 50)])
    params = SamplingParams(**PARAMS | {"max_completion_length": 64})
    session = RolloutSession(sampler, params, 40, turns=True)
    numbers = session.add(PROMPTS, range(2 * len(PROMPTS)))
    while session.num_unfinished:
        session.advance()
        put_back(session)
        for one in list(session.scheduler.paused.values()):
            text = [5 + (7 * one.number + 3 * i) % 60 for i in range(2 + (one.number + 5 * len(one.observations)) % 8)]
            if len(one.observations) < 4 and len(text) <= session.room(one.number):
                session.append(one.number, text)
            else:
                session.finish(one.number)
    return session.take(numbers).to("cpu"), session.scheduler.num_steps


CONVERSATIONS = {
    "native": Case(),
    "protected": Case(SnapKV(**SMALL, protect_observations=1)),
    "protected, adaptive": Case(RKV(**SMALL, budget_rule=Adaptive(), protect_observations=1)),
    "running state": Case(c.H2O(**SMALL, protect_observations=2), is_captured=False),
    "hybrid": Case(architecture="qwen3_5_text"),
    "windows": Case(window=8),
}


def put_back_midway(sampler: RolloutSampler, prompts: list[list[int]], params: SamplingParams) -> Rollout:
    """Draw as ``generate`` does, with all slots taken out and put back after 21 steps."""
    session = RolloutSession(sampler, params, 40)
    numbers = session.add(prompts, range(len(prompts) * params.num_generations))
    session.advance(max_steps=21)
    put_back(session)
    session.advance()
    return session.take(numbers)
