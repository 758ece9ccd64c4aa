"""One sampler used many times: what it keeps, what it frees, and who may not disturb whom."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs
from transformers import PreTrainedModel

from sparse_rl_lightning.budgets import Adaptive
from sparse_rl_lightning.cache import slots as cache
from sparse_rl_lightning.compressors import H2O, Compressor, FullKV, RandomEviction, SnapKV, StreamingLLM
from sparse_rl_lightning.records import NEVER, Rollout
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams
from sparse_rl_lightning.rollout.engine import prefill, scheduler
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 9, 40, 1)]
SMALL = {"budget": 12, "buffer": 5, "num_sinks": 2, "window": 4}
PARAMS = SamplingParams(num_generations=2, max_completion_length=30, seed=5)


def model(**kwargs: Any) -> PreTrainedModel:
    return tiny_model(initializer_range=0.2, **kwargs)


def assert_same(a: Rollout, b: Rollout) -> None:
    assert torch.equal(a.sequences, b.sequences)
    assert torch.equal(a.evictions.death, b.evictions.death)
    assert_same_logprobs(a.sampler_logprobs, b.sampler_logprobs)


def test_the_old_pool_is_free_before_the_new_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = RolloutSampler(model(), FullKV())
    sampler.generate([[3]], SamplingParams(max_completion_length=4))
    old = weakref.ref(sampler.cache)
    alive = []
    before = cache.SlotCache.__init__

    def look(self: Any, *args: Any) -> None:
        alive.append(old() is not None and old() is not self)
        before(self, *args)

    monkeypatch.setattr(cache.SlotCache, "__init__", look)
    sampler.generate([[3]], SamplingParams(max_completion_length=40))
    assert alive == [False]


@pytest.mark.parametrize("decoder", ["native", "transformers"])
def test_what_is_released_is_free_at_once(decoder: Any) -> None:
    """CUDA's allocator does not wait for Python to look for cycles."""
    sampler = RolloutSampler(model(), SnapKV(**SMALL), decoder=decoder)
    gc.collect()
    gc.disable()
    try:
        sampler.generate(PROMPTS, PARAMS)
        engine = sampler.engine
        held = [weakref.ref(one) for one in (engine, engine.decoder, engine.cache)]
        del engine
        sampler.release()
        assert [one() for one in held] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("validates_first", [False, True])
def test_training_and_validation_in_turn_keep_pool_and_weights(validates_first: bool) -> None:
    sampler = RolloutSampler(model(), SnapKV(**SMALL))
    train, validate = PARAMS, SamplingParams(max_completion_length=60, temperature=0)
    turns = [(PROMPTS, train), (PROMPTS[:2], validate)][:: -1 if validates_first else 1]
    for prompts, params in turns:
        sampler.generate(prompts, params)
    pool, decoder = sampler.cache, sampler.engine.decoder
    for prompts, params in turns * 2:
        sampler.generate(prompts, params)
        assert sampler.cache is pool
        assert sampler.engine.decoder is decoder


def test_a_lowered_budget_holds_in_slots_that_were_larger() -> None:
    policy, compressor = model(), SnapKV(**SMALL, compress_prompt=False)
    sampler = RolloutSampler(policy, compressor)
    for steps in (2, 0):
        compressor.raise_budget(steps)
        assert_same(sampler.generate(PROMPTS, PARAMS), RolloutSampler(policy, compressor).generate(PROMPTS, PARAMS))


def test_one_sampler_serves_all_compressors_and_precisions() -> None:
    policy = model()
    used = RolloutSampler(policy, FullKV())
    compressors: list[Compressor] = [
        H2O(**SMALL), SnapKV(**SMALL, budget_rule=Adaptive(floor=5)), StreamingLLM(**SMALL), FullKV(), H2O(**SMALL),
    ]  # fmt: skip
    for compressor in compressors:
        used.compressor = compressor
        with torch.autocast("cpu", torch.bfloat16):
            rounded = used.generate(PROMPTS, PARAMS)
        assert used.cache.key_pool.dtype == torch.bfloat16
        assert_same(used.generate(PROMPTS, PARAMS), RolloutSampler(policy, compressor).generate(PROMPTS, PARAMS))
        assert not torch.equal(rounded.sampler_logprobs, used.generate(PROMPTS, PARAMS).sampler_logprobs)


def test_a_hook_that_comes_later_is_called() -> None:
    policy = model()
    sampler = RolloutSampler(policy, FullKV())
    plain = sampler.generate(PROMPTS, PARAMS)
    handle = policy.get_decoder().layers[0].mlp.down_proj.register_forward_hook(lambda m, args, out: out + 0.5)
    assert not torch.equal(plain.sampler_logprobs[:, :9], sampler.generate(PROMPTS, PARAMS).sampler_logprobs[:, :9])
    handle.remove()
    assert_same(plain, sampler.generate(PROMPTS, PARAMS))
    handle = policy.get_decoder().layers[0].mlp.register_forward_hook(lambda m, args, out: out + 0.5)
    assert not torch.equal(plain.sampler_logprobs[:, :9], sampler.generate(PROMPTS, PARAMS).sampler_logprobs[:, :9])
    handle.remove()
    policy.get_decoder().layers[0].self_attn.register_forward_hook(lambda m, args, out: out)
    with pytest.warns(UserWarning, match="Forward hooks of Qwen2Attention are not called"):
        sampler.generate(PROMPTS, PARAMS)


def test_the_pool_goes_back_after_errors_too() -> None:
    sampler = RolloutSampler(model(), SnapKV(**SMALL), 3, keep_pool=False)

    def stop(progress: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sampler.generate(PROMPTS, PARAMS, progress=stop)
    assert sampler.cache is None


def test_a_pool_that_is_left_over_neither_saves_nor_costs() -> None:
    sampler = RolloutSampler(model(), FullKV())
    for length in (40, 5):
        usage = sampler.generate([list(range(5, 5 + length))], SamplingParams(max_completion_length=4)).kv
        assert usage is not None
        assert usage.peak_bytes == usage.full_peak_bytes


def test_staging_is_counted_and_only_waiting_prompts_are_copied() -> None:
    """Two layers, two heads of 16 numbers, float32: a prompt token takes 512 bytes, of which a pack stages a layer."""
    prompts = [[3] * 8, [4] * 24]
    params = SamplingParams(num_generations=2, max_completion_length=4)
    roomy = RolloutSampler(model(), FullKV()).generate(prompts, params)
    assert roomy.kv.prefill_peak_bytes == 32 * 512 // 2
    tight = RolloutSampler(model(), FullKV(), num_slots=3).generate(prompts, params)
    assert tight.kv.prefill_peak_bytes == 32 * 512 // 2 + 24 * 512  # the second prompt waits for its second slot
    chunked = RolloutSampler(model(), FullKV(), max_prefill_tokens=8).generate(prompts, params)
    assert chunked.kv.prefill_peak_bytes == 24 * 512  # all layers of the longest prompt


def test_a_long_prompt_s_staging_is_freed_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = weakref.WeakSet[Any]()

    class Watched(prefill._Chunks):
        def __init__(self, *arguments: Any) -> None:
            assert not alive
            super().__init__(*arguments)
            alive.add(self)

    monkeypatch.setattr(prefill, "_Chunks", Watched)
    sampler = RolloutSampler(model(), FullKV(), max_prefill_tokens=8)
    sampler.generate([[3] * 20, [4] * 24, [5] * 9], SamplingParams(max_completion_length=2))
    assert not alive


@pytest.mark.parametrize("compressor", [SnapKV(**SMALL), H2O(**SMALL, budget_rule=Adaptive(floor=4))], ids=type)
def test_looking_seldom_changes_nothing_with_stop_strings_and_sessions(
    compressor: Compressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = character_tokenizer()
    policy = model(vocab_size=len(tokenizer))
    prompts = [tokenizer(text)["input_ids"] for text in ("what is 7 * 6?", "hello", "once upon a time there was one")]
    params = SamplingParams(
        num_generations=3, max_completion_length=40, min_completion_length=4, seed=2, stop_strings=("a", "Q~")
    )
    sampler = RolloutSampler(policy, compressor, 4, tokenizer=tokenizer)
    want = sampler.generate(prompts, params)
    monkeypatch.setattr(scheduler, "CHECK_EVERY", {"cpu": 8})
    assert_same(want, RolloutSampler(policy, compressor, 4, tokenizer=tokenizer).generate(prompts, params))
    session = RolloutSession(sampler, params, max_prompt_length=30)
    numbers = session.add(prompts, range(9))
    while session.num_unfinished:
        session.advance(max_steps=3)
    assert_same(want, session.take(numbers))


def test_prompts_in_waiting_are_read_again_with_new_weights() -> None:
    policy = model(eos_token_id=None)
    params = SamplingParams(num_generations=2, max_completion_length=6, seed=1)
    session = RolloutSession(RolloutSampler(policy, FullKV(), 1), params, 40)
    numbers = session.add(PROMPTS[3:4], range(2))
    session.advance(max_steps=2)  # the prompt is read, its second sample waits
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.9)
    session.advance()
    second = session.take(numbers)[torch.tensor([1])]
    fresh = RolloutSampler(policy, FullKV()).generate(PROMPTS[3:4], params)[torch.tensor([1])]
    assert_same(second, fresh)


def test_a_session_refuses_what_it_cannot_do() -> None:
    session = RolloutSession(RolloutSampler(model(), SnapKV(**SMALL), 3), PARAMS, 40)
    session.add(PROMPTS, range(10))
    with pytest.raises(ValueError, match="There is no prompt to take"):
        session.take(session.complete)
    session.advance(max_steps=2)
    complete = session.complete
    with pytest.raises(ValueError, match=r"can be taken, these have not: \[4\]"):
        session.take([*complete, 4])
    assert session.complete == complete

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    session.engine.cache.compact = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        session.advance()
    with pytest.raises(ValueError, match="interrupted in the middle of a step"):
        session.advance()


def test_chance_treats_prompt_and_completion_alike() -> None:
    """A prompt that was compressed before its samples began keeps its lots afterwards."""
    policy = tiny_model(eos_token_id=None)
    sampler = RolloutSampler(policy, RandomEviction(budget=50, buffer=10, num_sinks=0, window=1))
    rollout = sampler.generate([[3] * 200], SamplingParams(num_generations=4, max_completion_length=201, seed=1))
    alive = (rollout.evictions.death == NEVER).float()
    prompt, completion = float(alive[..., :200].mean()), float(alive[..., 200:390].mean())
    assert prompt == pytest.approx(completion, rel=0.35)
