"""Rollouts on a real GPU: what the CPU gives in float32, every step from a graph, and no step that waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch

from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.engine import scheduler
from sparse_rl_lightning.rollout.engine.engine import Engine, StepRows
from sparse_rl_lightning.rollout.engine.looks import Look
from sparse_rl_lightning.rollout.engine.scheduler import Scheduler
from tests.rollout.test_pretend_gpu import CASES, PARAMS, PROMPTS, TOKENIZER, assert_same, in_a_session, made, policy

pytestmark = pytest.mark.gpu


@contextmanager
def no_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make every wait for the device inside of a replayed step an error; at least one is replayed."""
    proper, steps = Engine.decode, list[int]()

    def decode(self: Engine, rows: StepRows) -> None:
        if not steps:  # the first one captures, which may wait
            proper(self, rows)
        else:
            torch.cuda.set_sync_debug_mode("error")
            try:
                proper(self, rows)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        steps.append(len(rows.slots))

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "decode", decode)
        yield
    assert len(steps) > 1


@pytest.mark.parametrize("name", CASES)
def test_a_rollout_is_what_it_is_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    model, params = policy(case.architecture), SamplingParams(**{**PARAMS, **case.params})
    compressor = made(case.compressor, model)
    want = RolloutSampler(model, compressor, num_slots=4, **case.options).generate(PROMPTS, params)
    options = case.options | {"cuda_graphs": "require" if case.is_captured else True}
    sampler = RolloutSampler(deepcopy(model).to("cuda"), compressor, num_slots=4, **options)
    with no_waits(monkeypatch) if case.is_captured else nullcontext():
        got = sampler.generate(PROMPTS, params).to("cpu")
    assert_same(got, want)


@pytest.mark.parametrize("name", ["rkv", "adaptive", "h2o"])
def test_a_session_over_two_updates_is_what_it_is_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy()
    compressor = made(CASES[name].compressor, model)
    monkeypatch.setattr(scheduler, "CHECK_EVERY", {})  # refilled after the same steps, before the same update
    got, _ = in_a_session(deepcopy(model).to("cuda"), compressor)
    want, _ = in_a_session(model, compressor)
    assert_same(got, want)
    assert torch.equal(got.policy_versions, want.policy_versions)  # type: ignore[arg-type]


def test_looks_are_queued_and_read_without_a_blocking_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, queue, read = list[int](), Scheduler._queue_look, Look.read

    def unwaited(work: Callable[[], Any]) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return work()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def read_unwaited(self: Look) -> Any:
        reads.append(self.num_steps)
        return iter(unwaited(lambda: list(read(self))))

    monkeypatch.setattr(Scheduler, "_queue_look", lambda self: unwaited(lambda: queue(self)))
    monkeypatch.setattr(Look, "read", read_unwaited)
    model, params = policy(), SamplingParams(**{**PARAMS, "stop_strings": ("a", "Z"), "max_completion_length": 60})
    compressor = made(CASES["rkv"].compressor, model)
    want = RolloutSampler(model, compressor, 4, tokenizer=TOKENIZER).generate(PROMPTS, params)
    reads.clear()
    got = RolloutSampler(deepcopy(model).to("cuda"), compressor, 4, tokenizer=TOKENIZER).generate(PROMPTS, params)
    assert_same(got.to("cpu"), want)
    assert len(reads) > 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_in_float32_gives_the_exact_sums(dtype: torch.dtype) -> None:
    model = policy().to("cuda", dtype)
    sampler = RolloutSampler(
        model, made(CASES["rkv"].compressor, model), 4, cuda_graphs="require", head_in_float32=True
    )
    sampler.generate(PROMPTS, SamplingParams(**PARAMS))
    assert sampler._engine is not None
    hidden = torch.randn(5, 32, device="cuda", dtype=dtype)
    with torch.no_grad():
        found = sampler._engine.decoder.logits(hidden)
        exact = hidden.double() @ model.lm_head.weight.double().T
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=0)


def test_greedy_and_sampled_rollouts_in_turns_capture_once_each() -> None:
    model = policy().to("cuda")
    sampler = RolloutSampler(model, made(CASES["rkv"].compressor, model), 4, cuda_graphs="require")
    used = []
    for _ in range(3):
        for temperature in (0.0, 1.0):
            sampler.generate(PROMPTS, SamplingParams(**{**PARAMS, "temperature": temperature}))
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[1] == used[2]
