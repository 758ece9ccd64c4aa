"""Rollouts on a real GPU: what the CPU gives in float32, every step from a graph, and no step that waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy

import pytest
import torch

from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.engine import scheduler
from sparse_rl_lightning.rollout.engine.engine import Engine, StepRows
from tests.rollout.test_pretend_gpu import CASES, PARAMS, PROMPTS, assert_same, in_a_session, made, policy

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
