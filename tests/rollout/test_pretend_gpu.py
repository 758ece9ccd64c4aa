"""The host's side of rollouts on a GPU, on a pretend one: what the CPU gives, every step from a graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import sparse_rl_lightning.compressors as c
from sparse_rl_lightning.budgets import Adaptive, LengthSchedule, Pyramid
from sparse_rl_lightning.cache.slots import SlotCache
from sparse_rl_lightning.calibration import gather_statistics
from sparse_rl_lightning.compressors import RKV, Compressor, FullKV, SnapKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies import LoraPolicy
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.retrievers import Centroid, Quest
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams
from sparse_rl_lightning.rollout.engine import scheduler
from sparse_rl_lightning.rollout.engine.engine import Engine
from sparse_rl_lightning.rollout.engine.prefill import HAS_VARLEN, packed_attention
from sparse_rl_lightning.testing import character_tokenizer, tiny_model
from tests.families import HYBRIDS, family
from tests.pretend_gpu import CUDA, DeviceTensor, PretendGPU, host

PROMPTS = [([5 + i, 9, 11, 40, 22] * 9)[: 3 + 11 * i] for i in range(3)]
SMALL: dict[str, Any] = {"budget": 16, "buffer": 8, "num_sinks": 2, "window": 4}
TOKENIZER = character_tokenizer()
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


CASES = {
    "full": Case(FullKV()),
    "rkv": Case(),
    "rkv, whole prompt": Case(RKV(**SMALL, compress_prompt=False)),
    "snapkv": Case(SnapKV(**SMALL)),
    "streaming": Case(c.StreamingLLM(**SMALL)),
    "random": Case(c.RandomEviction(**SMALL)),
    "knorm": Case(c.KNorm(**SMALL)),
    "keydiff": Case(c.KeyDiff(**SMALL)),
    "tova": Case(c.TOVA(budget=16, buffer=1, num_sinks=0, window=1)),
    "cur": Case(c.CUR(**SMALL, local_window=4)),
    "lagkv": Case(c.LagKV(**SMALL, lag_size=4)),
    "expected attention": Case(c.ExpectedAttention(**SMALL, query_window=8, num_future=16)),
    "combined": Case(c.Combined([SnapKV(**SMALL), c.KNorm(**SMALL)], [2, 1])),
    "union over heads": Case(c.Combined([SnapKV(**SMALL)], across_heads="max")),
    "protected": Case(SnapKV(budget=34, buffer=8, num_sinks=2, window=4, protect_prompt=True, protect_token_ids=[7])),
    "h2o": Case(c.H2O(**SMALL), is_captured=False),
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
    "float8": Case(options={"kv_dtype": "float8_e4m3fn"}),
    "bfloat16 cache": Case(options={"kv_dtype": "bfloat16"}),
    "prompts in chunks": Case(options={"max_prefill_tokens": 8}),
    "no pool kept": Case(options={"keep_pool": False}),
    "memory limit": Case(options={"memory_limit": 0.01}),
    "llama": Case(architecture="llama"),
    "qwen3": Case(architecture="qwen3"),
    "8 bits": Case(quantization="int8"),
    "4 bits": Case(quantization="nf4"),
    "8 bits, own forward pass": Case(quantization="int8", options={"decoder": "forward"}),
    "own forward pass": Case(architecture="qwen3", options={"decoder": "forward"}),
    "hybrid": Case(architecture="qwen3_5_text"),
    "learned sinks, experts": Case(architecture="gpt_oss"),
    "learned sinks, running state": Case(c.H2O(**SMALL), architecture="gpt_oss", is_captured=False),
    "windows": Case(window=8),
    "windows, own forward pass, in chunks": Case(window=8, options={"decoder": "forward", "max_prefill_tokens": 8}),
    "windows in a float8 cache": Case(
        SnapKV(**SMALL, budget_rule=Adaptive()), window=8, options={"kv_dtype": "float8_e4m3fn"}
    ),
    "own forward pass, turned queries": Case(c.ExpectedAttention(**SMALL), options={"decoder": "forward"}),
}


def policy(architecture: str = "qwen2") -> PreTrainedModel:
    if architecture in (*HYBRIDS, "gpt_oss"):
        model = family(architecture, vocab_size=len(TOKENIZER))
        model.config._experts_implementation = "batched_mm"  # a CPU lacks operations of the others in a graph
        return model
    return tiny_model(architecture, vocab_size=len(TOKENIZER), hidden_size=32, num_heads=2, num_kv_heads=1,
                      initializer_range=0.4)  # fmt: skip


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


def made(compressor: Compressor | type[Compressor], model: PreTrainedModel) -> Compressor:
    """The compressor, with statistics of random text if it needs some."""
    if isinstance(compressor, Compressor):
        return compressor
    texts = torch.randint(2, len(TOKENIZER), (4, 60))
    statistics = gather_statistics(model, texts, torch.full((4,), 60))
    return compressor(**SMALL, statistics=statistics)  # type: ignore[call-arg]


def assert_same(got: Rollout, want: Rollout) -> None:
    """Both on the CPU; the seeds used meet no near-tie."""
    assert torch.equal(got.sequences, want.sequences)
    assert torch.equal(got.finished, want.finished)
    for name in ("sampler_logprobs", "behavior_logprobs", "topk_logprobs"):
        one, other = getattr(got, name), getattr(want, name)
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=2e-5, rtol=0)
    assert (got.evictions is None) == (want.evictions is None)
    if got.evictions is not None:
        assert torch.equal(got.evictions.death, want.evictions.death)


@pytest.mark.parametrize("name", CASES)
def test_a_rollout_is_what_it_is_on_the_cpu(name: str) -> None:
    case = CASES[name]
    model = windowed(case.window) if case.window else policy(case.architecture)
    params, steps = SamplingParams(**{**PARAMS, **case.params}), list[int]()
    if case.quantization is not None:
        need(case.quantization)
        adapt(model, case.quantization)
    compressor = made(case.compressor, model)
    want = RolloutSampler(model, compressor, num_slots=4, **case.options).generate(PROMPTS, params)
    with PretendGPU() as gpu:
        options = case.options | {"cuda_graphs": "require" if case.is_captured else True}
        sampler = RolloutSampler(gpu.copy_of(model), compressor, num_slots=4, **options)
        got = sampler.generate(PROMPTS, params, progress=lambda now: steps.append(now.step)).to("cpu")
    assert_same(got, want)
    assert gpu.captures.refused == []
    assert sum(graph.replays for graph in gpu.captures.graphs) == (steps[-1] if case.is_captured else 0)


def in_a_session(model: PreTrainedModel, compressor: Compressor) -> tuple[Rollout, int]:
    """A rollout over two updates, saved and loaded in between, and its number of steps."""
    session = RolloutSession(RolloutSampler(model, compressor, num_slots=4), SamplingParams(**PARAMS), 40)
    numbers = session.add(PROMPTS, range(2 * len(PROMPTS)))
    session.advance(max_steps=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    session.advance(max_steps=8)
    session.load_state(session.state())
    session.advance()
    return session.take(numbers).to("cpu"), session.scheduler.num_steps


@pytest.mark.parametrize("name", ["rkv", "adaptive", "hybrid", pytest.param("h2o", marks=pytest.mark.slow)])
def test_a_session_over_two_updates_is_what_it_is_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    model = policy(case.architecture)
    monkeypatch.setattr(scheduler, "CHECK_EVERY", {})  # refilled after the same steps, before the same update
    compressor = made(case.compressor, model)
    with PretendGPU() as gpu:
        got, num_steps = in_a_session(gpu.copy_of(model), compressor)
    want, _ = in_a_session(model, compressor)
    assert_same(got, want)
    assert torch.equal(got.policy_versions, want.policy_versions)  # type: ignore[arg-type]
    assert gpu.captures.refused == []
    assert sum(graph.replays for graph in gpu.captures.graphs) == (num_steps if case.is_captured else 0)


def conversations(model: PreTrainedModel, compressor: Compressor) -> tuple[Rollout, int]:
    """Conversations of up to five turns, saved and loaded after each, and their number of steps."""
    sampler = RolloutSampler(model, compressor, num_slots=4, end_token_ids=[*range(20, 50)])
    params = SamplingParams(**PARAMS | {"max_completion_length": 64})
    session = RolloutSession(sampler, params, 40, turns=True)
    numbers = session.add(PROMPTS, range(2 * len(PROMPTS)))
    while session.num_unfinished:
        session.advance()
        session.load_state(session.state())
        for one in list(session.scheduler.paused.values()):
            text = [5 + (7 * one.sequence + 3 * i) % 60 for i in range(2 + (one.sequence + 5 * len(one.given)) % 8)]
            if len(one.given) < 4 and len(text) <= session.room(one.sequence):
                session.append(one.sequence, text)
            else:
                session.finish(one.sequence)
    return session.take(numbers).to("cpu"), session.scheduler.num_steps


CONVERSATIONS = {
    "native": Case(),
    "protected": Case(SnapKV(**SMALL, protect_observations=1)),
    "protected, adaptive": Case(RKV(**SMALL, budget_rule=Adaptive(), protect_observations=1)),
    "running state": Case(c.H2O(**SMALL, protect_observations=2), is_captured=False),
    "hybrid": Case(architecture="qwen3_5_text"),
    "windows": Case(window=8),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations_are_what_they_are_on_the_cpu(name: str) -> None:
    case = CONVERSATIONS[name]
    model = windowed(case.window) if case.window else policy(case.architecture)
    compressor = made(case.compressor, model)
    want, _ = conversations(model, compressor)
    with PretendGPU() as gpu:
        got, num_steps = conversations(gpu.copy_of(model), compressor)
    assert_same(got, want)
    assert got.turns is not None
    assert got.turns.max() >= 5
    assert torch.equal(got.turns, want.turns)  # type: ignore[arg-type]
    assert gpu.captures.refused == []
    assert sum(graph.replays for graph in gpu.captures.graphs) == (num_steps if case.is_captured else 0)


def test_greedy_and_sampled_decoding_in_turns_keep_the_graphs_of_both() -> None:
    model, greedy, sampled = policy(), {"temperature": 0.0}, {"temperature": 1.0}
    with PretendGPU() as gpu:
        sampler = RolloutSampler(gpu.copy_of(model), RKV(**SMALL), num_slots=4, cuda_graphs="require")
        for seed in (1, 2):
            for how in (sampled, greedy):
                params = SamplingParams(**{**PARAMS, **how, "seed": seed})
                want = RolloutSampler(model, RKV(**SMALL), num_slots=4).generate(PROMPTS, params)
                assert_same(sampler.generate(PROMPTS, params).to("cpu"), want)
                with torch.no_grad():  # the learner's update, at the same addresses
                    for policy_of in (model, sampler.model):
                        for parameter in policy_of.parameters():
                            parameter.mul_(1.01)
        assert len(gpu.captures.graphs) == 2
        sampler.generate(PROMPTS, SamplingParams(**PARAMS, top_k=5))
        sampler.generate(PROMPTS, SamplingParams(**PARAMS, top_k=5))
        assert len(gpu.captures.graphs) == 3
        sampler.release()
        sampler.generate(PROMPTS, SamplingParams(**PARAMS))
        assert len(gpu.captures.graphs) == 4


def test_a_sampler_on_another_device_than_the_current_one_has_graphs_there() -> None:
    """After one on the first device, where torch's own stream for captures then is."""
    model, params = policy(), SamplingParams(**PARAMS)
    want = RolloutSampler(model, RKV(**SMALL), num_slots=4).generate(PROMPTS, params)
    with PretendGPU() as gpu:
        for device in (CUDA, torch.device("cuda", 1)):
            moved = gpu.copy_of(model, device)
            gpu.reset()
            got = RolloutSampler(moved, RKV(**SMALL), num_slots=4, cuda_graphs="require").generate(PROMPTS, params)
            assert got.sequences.device == device
            assert gpu.strays == {}  # the device is the current one while a rollout is drawn
            assert torch.cuda.current_device() == 0
            assert_same(got.to("cpu"), want)
        first, second = gpu.captures.graphs
        assert len(first.nodes) == len(second.nodes) > 20


def test_graphs_that_are_required_and_impossible_are_refused() -> None:
    params = SamplingParams(**PARAMS)
    with pytest.raises(UserError, match=r"cuda_graphs=require, but .* the model is on cpu: move it to a GPU"):
        RolloutSampler(policy(), RKV(**SMALL), cuda_graphs="require").generate(PROMPTS, params)
    with PretendGPU() as gpu:
        model = gpu.copy_of(policy())
        with pytest.raises(UserError, match=r"H2O has running numbers, .* use another compressor, or cuda_graphs=true"):
            RolloutSampler(model, c.H2O(**SMALL), cuda_graphs="require").generate(PROMPTS, params)
    with pytest.raises(UserError, match="cuda_graphs must be true, false or require, got cuda_graphs='always'"):
        RolloutSampler(policy(), cuda_graphs="always")  # type: ignore[arg-type]


def test_a_refilled_rollout_waits_at_its_begin_and_its_end_and_nowhere_else() -> None:
    """With prompts that their slots hold: one that is compressed when it is read takes a few waits per layer."""
    short = [prompt[:20] for prompt in PROMPTS]
    params, steps = SamplingParams(num_generations=8, max_completion_length=64, seed=1), list[int]()
    with PretendGPU() as gpu:
        model = gpu.copy_of(policy())
        sampler = RolloutSampler(model, RKV(**SMALL), num_slots=4, end_token_ids=[3, 4], cuda_graphs="require")
        sampler.generate(short, params)
        gpu.reset()
        sampler.generate(short, params, progress=lambda now: steps.append(now.step))
    windows = steps[-1] // scheduler.CHECK_EVERY_ON_DEVICE
    assert windows > 25  # 24 sequences in 4 slots
    # whether weights are as they were, when all sequences have ended by length, and when the rollout is put together
    assert gpu.waits.total() <= 8, gpu.waits
    assert gpu.waits.total() <= 16 * steps[-1] / 128
    assert windows - 3 <= gpu.late.total() <= windows  # looks, each read with the next window queued


def test_texts_are_read_late_too() -> None:
    params, steps = SamplingParams(**{**PARAMS, "max_completion_length": 64}, stop_strings=("a", "Z")), list[int]()
    with PretendGPU() as gpu:
        sampler = RolloutSampler(gpu.copy_of(policy()), FullKV(), num_slots=4, tokenizer=TOKENIZER)
        sampler.generate(PROMPTS, params, progress=lambda now: steps.append(now.step))
        assert sum(count for (where, _), count in gpu.waits.items() if "downloads" in where) <= 4, gpu.waits
    assert gpu.late.total() > len(steps) - 4 > 4


def test_prompts_are_read_by_one_launch_per_layer() -> None:
    """Torch's kernel for packed sequences on a GPU in 16 bits, one product after the other elsewhere.

    So do older torch releases on a GPU: their kernel is not told to let results be the same in any batch.
    """
    g, lengths = torch.Generator().manual_seed(0), [3, 7, 4]
    query, key, value = (torch.randn(16, heads, 8, generator=g).bfloat16() for heads in (4, 2, 2))
    borders = torch.tensor([0, 3, 10, 14], dtype=torch.int32)
    want = packed_attention(query, key, value, lengths, borders, 0.3)
    assert want[14:].count_nonzero() == 0
    with PretendGPU() as gpu:
        there = [DeviceTensor(t) for t in (query, key, value)]
        got = packed_attention(*there, lengths, DeviceTensor(borders), 0.3)
    launched = Counter[str]()
    for (_, op), count in gpu.launches.items():
        launched[op] += count
    if HAS_VARLEN:
        assert launched == {"_varlen_attn": 1, "copy_": 1, "zeros_like": 1}
    else:
        assert (launched["_varlen_attn"], launched["scaled_dot_product_attention"]) == (0, len(lengths))
    assert not gpu.waits
    torch.testing.assert_close(host(got), want, atol=0.02, rtol=0)


# ---------------------------------------------------------------- what once kept every step from being captured


def spoil_end_step(monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a number to one element, as steps once ended; returns file and line."""
    proper = SlotCache.end_step

    def end_step(self: SlotCache, *args: Any) -> Tensor:
        after = proper(self, *args)
        self.seen[-1] = 0
        return after

    monkeypatch.setattr(SlotCache, "end_step", end_step)
    return f"tests/rollout/test_pretend_gpu.py:{end_step.__code__.co_firstlineno + 2}"


def spoil_draw(monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a number to an index, as end tokens were once forbidden; returns file and line."""
    proper = Engine.draw

    def draw(self: Engine, logits: torch.Tensor, *args: Any) -> None:
        is_end = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        is_end[self.end_ids] = True
        proper(self, logits, *args)

    monkeypatch.setattr(Engine, "draw", draw)
    return f"tests/rollout/test_pretend_gpu.py:{draw.__code__.co_firstlineno + 2}"


@pytest.mark.parametrize("spoil", [spoil_end_step, spoil_draw])
def test_what_cannot_be_captured_is_found_by_file_and_line(spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, params = policy(), SamplingParams(**PARAMS)
    want = RolloutSampler(model, RKV(**SMALL), num_slots=4).generate(PROMPTS, params)
    line = spoil(monkeypatch)
    with PretendGPU() as gpu, pytest.warns(UserWarning, match="cannot be captured: .*copy of a number from host"):
        got = RolloutSampler(gpu.copy_of(model), RKV(**SMALL), num_slots=4).generate(PROMPTS, params).to("cpu")
    assert gpu.captures.refused == [(line, "copy of a number from host memory")]
    assert gpu.captures.graphs == []
    assert gpu.waits[line, "copy of a number from host memory"] > 20  # once a step, without graphs
    assert_same(got, want)


def test_a_number_of_python_in_a_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph replays what its capture saw: a count that Python keeps does not go on."""
    model, params, calls = policy(), SamplingParams(**PARAMS), [0]
    proper = SlotCache.end_step

    def end_step(self: SlotCache, *args: Any) -> Tensor:
        calls[0] += 1
        self.held.add_(calls[0] - calls[0] % 10)
        return proper(self, *args)

    want = RolloutSampler(model, RKV(**SMALL), num_slots=4).generate(PROMPTS, params)
    monkeypatch.setattr(SlotCache, "end_step", end_step)
    with PretendGPU() as gpu:
        got = RolloutSampler(gpu.copy_of(model), RKV(**SMALL), num_slots=4).generate(PROMPTS, params).to("cpu")
    assert calls == [2]  # a step to warm up, one to capture
    assert torch.equal(got.kv.stored, want.kv.stored)  # type: ignore[union-attr]
