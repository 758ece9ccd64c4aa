"""The host's side of rollouts on a GPU, on a pretend one: graphs are kept, and waits, copies and launches are few.

What a rollout on it gives, ``test_on_gpu.py`` holds. What rounding can do to the cases that a real GPU is held to is at
the end: it moves log-probs little, and no token and no death. A GPU sums in another order than a CPU, so both differ
from exact numbers by as much, each in its way. Weights that differ by a rounding (up to 2.4e-7 of each) stand for that:
they move log-probs by more than the errors of two devices add up to (2e-5 each, against float64).
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
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
from torch import Tensor
from transformers import PreTrainedModel

import sparse_rl_lightning.compressors as c
from sparse_rl_lightning.cache.slots import SlotCache
from sparse_rl_lightning.compressors import RKV, FullKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.attention import HAS_VARLEN, packed_attention
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.rollout.engine import scheduler
from sparse_rl_lightning.rollout.engine.engine import Engine
from tests.pretend_gpu import CUDA, DeviceTensor, PretendGPU, host


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
    assert windows - 3 <= gpu.late.total() <= windows  # checks for ends, each read with the next window queued


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


@pytest.mark.parametrize(("width", "capability"), [(8, (7, 5)), (12, (9, 0)), (256, (8, 0)), (264, (9, 0))])
def test_prompts_that_torchs_kernel_does_not_take_are_attended_one_after_the_other(
    width: int, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes head sizes in multiples of 8 up to 256, on cards of compute capability 8.0 on."""
    monkeypatch.setattr("tests.pretend_gpu.CAPABILITY", capability)
    query, key, value = (torch.randn(8, heads, width).bfloat16() for heads in (4, 2, 2))
    borders = torch.tensor([0, 3, 8], dtype=torch.int32)
    with PretendGPU() as gpu:
        there = [DeviceTensor(t) for t in (query, key, value)]
        got = packed_attention(*there, [3, 5], DeviceTensor(borders), 0.1)
    ops = Counter(op for _, op in gpu.launches.elements())
    taken = HAS_VARLEN and width == 256
    assert (ops["_varlen_attn"], ops["scaled_dot_product_attention"]) == ((1, 0) if taken else (0, 2))
    want = packed_attention(query, key, value, [3, 5], borders, 0.1)
    torch.testing.assert_close(host(got), want, atol=0.05, rtol=0)


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


# ---------------------------------------------------------------- rounding


def shaken(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """A copy whose weights differ by about a rounding."""
    other, g = deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + 2.4e-7 * (2 * torch.rand(parameter.shape, generator=g) - 1))
    return other


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.has_ties])
def test_cases_meet_no_near_tie(name: str) -> None:
    case = CASES[name]
    model, params = model_of(case), SamplingParams(**{**PARAMS, **case.params})
    compressor = made(case.compressor, model)
    want, *others = (
        RolloutSampler(one, compressor, num_slots=4, **case.options).generate(PROMPTS, params)
        for one in (model, *(shaken(model, seed) for seed in range(4)))
    )
    for other in others:
        assert_same(other, want, case.close / 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rkv", "adaptive", "hybrid", "h2o"])
def test_sessions_meet_no_near_tie(name: str) -> None:
    model = model_of(CASES[name])
    compressor = made(CASES[name].compressor, model)
    others = [in_a_session(shaken(model, seed), compressor)[0] for seed in range(4)]
    want, _ = in_a_session(model, compressor)
    for other in others:
        assert_same(other, want, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations_meet_no_near_tie(name: str) -> None:
    model = model_of(CONVERSATIONS[name])
    compressor = made(CONVERSATIONS[name].compressor, model)
    want, *others = (conversations(one, compressor)[0] for one in (model, *(shaken(model, n) for n in range(4))))
    for other in others:
        assert_same(other, want, 1e-4)


@pytest.mark.parametrize("name", ["rkv", "schedule", "temperature", "llama", "hybrid"])
def test_float32_is_close_to_float64_and_no_closer(name: str) -> None:
    """2e-5 holds between two ways on one CPU, and is nothing to ask of two devices: there both may be this far off."""
    case = CASES[name]
    model, params = model_of(case), SamplingParams(**{**PARAMS, **case.params})
    rollout = RolloutSampler(model, made(case.compressor, model), num_slots=4).generate(PROMPTS, params)
    with torch.no_grad():
        exact = replay_logprobs(deepcopy(model).double(), rollout, temperature=params.temperature)  # type: ignore[call-arg]
    error = float((exact - rollout.sampler_logprobs)[rollout.completion_mask].abs().max())
    assert 2e-6 < error < 2.5e-5
