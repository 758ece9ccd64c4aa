"""Rollouts on a GPU, pretended or real: what the CPU gives in float32, steps from graphs, and no step that waits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from rollout_cases import (
    CASES,
    CONVERSATIONS,
    PARAMS,
    PROMPTS,
    SMALL,
    TOKENIZER,
    assert_same,
    conversations,
    in_a_session,
    made,
    model_of,
    policy,
)
from transformers import PreTrainedModel

import sparse_rl_lightning.compressors as c
from sparse_rl_lightning.budgets import Adaptive
from sparse_rl_lightning.compressors import RKV, Compressor, SnapKV
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.rollout.engine import scheduler
from sparse_rl_lightning.rollout.engine.engine import Engine, StepGraphs, StepRows
from sparse_rl_lightning.rollout.engine.finished import FinishCheck
from sparse_rl_lightning.rollout.engine.scheduler import Scheduler
from sparse_rl_lightning.testing import tiny_model
from tests.gpus import RealGPU, close_on, on_the_cpu


@contextmanager
def no_waits(gpu: RealGPU, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make every wait for the device inside of a replayed step an error; at least one is replayed."""
    proper, steps = Engine.decode, list[int]()

    def decode(self: Engine, rows: StepRows) -> None:
        with gpu.unwaited() if steps else nullcontext():  # the first one captures, which may wait
            proper(self, rows)
        steps.append(len(rows.slots))

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "decode", decode)
        yield
    assert len(steps) > 1


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", CASES)
def test_a_rollout_is_what_it_is_on_the_cpu(name: str, gpu: RealGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    model, params = model_of(case), SamplingParams(**{**PARAMS, **case.params})
    compressor, last = made(case.compressor, model), [0]
    with on_the_cpu():
        want = RolloutSampler(model, compressor, num_slots=4, **case.options).generate(PROMPTS, params)
    options = case.options | {"cuda_graphs": "require" if case.is_captured else True}
    with gpu, no_waits(gpu, monkeypatch) if case.is_captured else nullcontext():
        sampler = RolloutSampler(gpu.copy_of(model), compressor, num_slots=4, **options)
        got = sampler.generate(PROMPTS, params, progress=lambda now: last.append(now.step)).to("cpu")
    if case.has_ties:
        assert_replays(model, got, close_on(gpu))
    if not case.has_ties or close_on(gpu) < 1e-4:
        assert_same(got, want, close_on(gpu, case.close))
    gpu.check_replayed(last[-1] if case.is_captured else 0)


def assert_replays(model: PreTrainedModel, rollout: Rollout, close: float, moved: float = 0.3) -> None:
    """The log-probs are the model's under the evictions, which moved some of them."""
    assert rollout.evictions is not None
    with torch.no_grad():
        again = replay_logprobs(model, rollout)
        dense = sequence_logprobs(model, rollout.sequences, rollout.completion_mask)[0]
    torch.testing.assert_close(again, rollout.sampler_logprobs, atol=close, rtol=0)
    if moved:
        assert float((dense - again)[rollout.completion_mask].abs().max()) > moved


@pytest.mark.parametrize("name", ["rkv", "adaptive", "hybrid", pytest.param("h2o", marks=pytest.mark.slow)])
def test_a_session_over_two_updates_is_what_it_is_on_the_cpu(
    name: str, gpu: RealGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    model = model_of(case)
    compressor = made(case.compressor, model)
    monkeypatch.setattr(scheduler, "CHECK_EVERY", {})  # refilled after the same steps, before the same update
    with gpu:
        got, num_steps = in_a_session(gpu.copy_of(model), compressor)
    with on_the_cpu():
        want, _ = in_a_session(model, compressor)
    assert_same(got, want, close_on(gpu))
    assert torch.equal(got.policy_versions, want.policy_versions)  # type: ignore[arg-type]
    gpu.check_replayed(num_steps if case.is_captured else 0)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations_are_what_they_are_on_the_cpu(name: str, gpu: RealGPU) -> None:
    case = CONVERSATIONS[name]
    model = model_of(case)
    compressor = made(case.compressor, model)
    with on_the_cpu():
        want, _ = conversations(model, compressor)
    with gpu:
        got, num_steps = conversations(gpu.copy_of(model), compressor)
    assert_same(got, want, close_on(gpu))
    assert got.turns.max() >= 5
    assert torch.equal(got.turns, want.turns)  # type: ignore[arg-type]
    gpu.check_replayed(num_steps if case.is_captured else 0)


def test_checks_are_queued_and_read_without_a_blocking_copy(gpu: RealGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    model, params = policy(), SamplingParams(**{**PARAMS, "stop_strings": ("a", "Z"), "max_completion_length": 60})
    compressor = made(CASES["rkv"].compressor, model)
    with on_the_cpu():
        want = RolloutSampler(model, compressor, 4, tokenizer=TOKENIZER).generate(PROMPTS, params)
    reads, queue, read = list[int](), Scheduler._queue_check, FinishCheck.read

    def unwaited(work: Callable[[], Any]) -> Any:
        with gpu.unwaited():
            return work()

    def read_unwaited(self: FinishCheck) -> Any:
        reads.append(self.num_steps)
        return iter(unwaited(lambda: list(read(self))))

    monkeypatch.setattr(Scheduler, "_queue_check", lambda self: unwaited(lambda: queue(self)))
    monkeypatch.setattr(FinishCheck, "read", read_unwaited)
    with gpu:
        sampler = RolloutSampler(gpu.copy_of(model), compressor, 4, tokenizer=TOKENIZER)
        got = sampler.generate(PROMPTS, params).to("cpu")
    assert_same(got, want, close_on(gpu))
    assert len(reads) > 3


def test_greedy_and_sampled_rollouts_in_turns_capture_once_each(gpu: RealGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    used, model, captured = [], policy(), list[StepGraphs]()
    capture_all = StepGraphs._capture_all

    def noted(self: StepGraphs, step: Any) -> None:
        captured.append(self)
        capture_all(self, step)

    monkeypatch.setattr(StepGraphs, "_capture_all", noted)
    with gpu:
        sampler = RolloutSampler(gpu.copy_of(model), RKV(**SMALL), 4, cuda_graphs="require")
        for _ in range(3):
            for temperature in (0.0, 1.0):
                sampler.generate(PROMPTS, SamplingParams(**{**PARAMS, "temperature": temperature}))
            torch.cuda.synchronize()
            gc.collect()  # what was captured for the first time leaves cycles, of some megabytes
            used.append(torch.cuda.memory_allocated())
    assert len(captured) == 2
    assert used[1] == used[2]


# ---------------------------------------------------------------- in 16 bits: tensor cores on a real GPU


def in_16_bits(
    dtype: torch.dtype, heads: int, kv_heads: int, width: int, initializer_range: float = 0.02
) -> PreTrainedModel:
    model = tiny_model(
        vocab_size=len(TOKENIZER), hidden_size=heads * width, intermediate_size=64, num_heads=heads,
        num_kv_heads=kv_heads, max_position_embeddings=2048, initializer_range=initializer_range,
    )  # fmt: skip
    return model.to(dtype)  # type: ignore[arg-type]  # transformers' wrapper hides the signature


HEADS = [(torch.bfloat16, 8, 2, 64), (torch.bfloat16, 4, 1, 128), (torch.float16, 4, 2, 64)]
EVICTING: dict[str, Compressor] = {
    "rkv": RKV(**SMALL),
    "adaptive": SnapKV(**SMALL, budget_rule=Adaptive()),
    "expected attention": c.ExpectedAttention(**SMALL),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "width"), HEADS)
def test_rollouts_in_16_bits_replay(
    dtype: torch.dtype, heads: int, kv_heads: int, width: int, name: str, gpu: RealGPU
) -> None:
    """On the same device. Measured on a CPU: replay is within 0.015 (float16 0.002), evictions move by 0.5 and more."""
    model = in_16_bits(dtype, heads, kv_heads, width)
    rollout, learner = drawn(model, EVICTING[name], PROMPTS, SamplingParams(**PARAMS), gpu)
    assert_replays(learner, rollout, 0.05 if dtype == torch.bfloat16 else 0.01)


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "width"), HEADS[:2])
@pytest.mark.parametrize("evicts", [True, False])
def test_long_heads_in_16_bits_replay(
    evicts: bool, dtype: torch.dtype, heads: int, kv_heads: int, width: int, gpu: RealGPU
) -> None:
    """So long that several blocks read a head, and that FlexAttention replays it.

    Measured on a CPU: replay is within 0.008, evictions move by 0.2 and more.
    """
    model = in_16_bits(dtype, heads, kv_heads, width, initializer_range=0.03)
    prompts = [torch.randint(5, 90, (length,)).tolist() for length in (1000, 1601)]
    compressor = c.StreamingLLM(budget=800, buffer=8, num_sinks=2, window=4) if evicts else c.FullKV()
    rollout, learner = drawn(model, compressor, prompts, SamplingParams(max_completion_length=12, seed=1), gpu)
    assert_replays(learner, rollout, 0.05, moved=0.1 if evicts else 0.0)


def drawn(
    model: PreTrainedModel, compressor: Compressor, prompts: list[list[int]], params: SamplingParams, gpu: RealGPU
) -> tuple[Rollout, PreTrainedModel]:
    """A rollout, and a model on the device on which it is replayed: a pretend GPU replays nothing."""
    with gpu:
        moved = gpu.copy_of(model)
        rollout = RolloutSampler(moved, compressor, num_slots=4, cuda_graphs="require").generate(prompts, params)
        return (rollout, moved) if gpu.is_real else (rollout.to("cpu"), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_in_float32_gives_the_exact_sums(dtype: torch.dtype, gpu: RealGPU) -> None:
    model = policy().to(dtype)  # type: ignore[arg-type]  # transformers' wrapper hides the signature
    hidden = torch.randn(5, 32).to(dtype)
    with gpu, torch.no_grad():
        sampler = RolloutSampler(gpu.copy_of(model), RKV(**SMALL), 4, cuda_graphs="require", head_in_float32=True)
        sampler.generate(PROMPTS, SamplingParams(**PARAMS))
        assert sampler.engine is not None
        found = sampler.engine.decoder.logits(hidden.to("cuda")).to("cpu")
    exact = hidden.double() @ model.lm_head.weight.detach().double().T
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=0)
