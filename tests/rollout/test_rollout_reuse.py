"""One sampler used many times, also in inference mode: what it keeps, what it frees, and who may not disturb whom."""

from __future__ import annotations

import gc
import os
import random
import weakref
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_cases import put_back
from rollouts import CHECK_EVERY, PARAMS, PROMPTS, SMALL, assert_same, roll_out
from rollouts import small_model as model

from sparse_rl_lightning.budgets import Adaptive
from sparse_rl_lightning.cache import slots as cache
from sparse_rl_lightning.compressors import H2O, RKV, Compressor, FullKV, RandomEviction, SnapKV, StreamingLLM
from sparse_rl_lightning.ops import window_importance
from sparse_rl_lightning.records import NEVER, Rollout
from sparse_rl_lightning.rollout import Progress, RolloutSampler, RolloutSession, SamplingParams
from sparse_rl_lightning.rollout.engine import prefill
from sparse_rl_lightning.rollout.teacher_forcing import forced_rollout
from sparse_rl_lightning.testing import character_tokenizer, tiny_model


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
        assert_same(sampler.generate(PROMPTS, PARAMS), roll_out(policy, compressor))


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
        assert_same(used.generate(PROMPTS, PARAMS), roll_out(policy, compressor))
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
    monkeypatch.setattr(CHECK_EVERY, {"cpu": 8})
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


SHORT = SamplingParams(max_completion_length=12, seed=1)


def test_the_pool_stays_when_shorter_prompts_are_stored_whole() -> None:
    sampler = RolloutSampler(model(), RKV(**SMALL, compress_prompt=False))
    caches = set()
    for length in (40, 39, 20):
        sampler.generate([[3] * length], SHORT)
        caches.add(id(sampler.cache))
    assert len(caches) == 1


def test_another_compressor_gets_its_queries() -> None:
    policy = model(eos_token_id=None)
    swapped = RolloutSampler(policy, StreamingLLM(**SMALL))
    swapped.generate([list(range(3, 30))], SHORT)
    swapped.compressor = SnapKV(**SMALL)
    fresh = RolloutSampler(policy, SnapKV(**SMALL))
    a, b = (s.generate([list(range(3, 30))], SHORT).evictions.death for s in (swapped, fresh))
    assert (a == b).all()


def test_peak_bytes_speak_of_the_same_slots_after_reuse() -> None:
    for compressor, entries, full_entries in ((FullKV(), 52, 52), (RKV(**SMALL), 17, 1 + 4)):
        sampler = RolloutSampler(model(), compressor)
        sampler.generate([[3] * 40] * 8, SHORT)
        usage = sampler.generate([[3]], SamplingParams(max_completion_length=4)).kv
        per_entry = 2 * 2 * 2 * 16 * 4  # layers, heads, key and value, head dimension, bytes
        assert usage.peak_bytes == 8 * entries * per_entry
        assert usage.full_peak_bytes == 8 * full_entries * per_entry


# ---------------------------------------------------------------- inference mode


TWO = [[3, 4, 5], list(range(3, 23))]
DRAWN = SamplingParams(num_generations=2, max_completion_length=12, seed=1)
GREEDY = SamplingParams(num_generations=2, max_completion_length=12, temperature=0.0)


@pytest.mark.parametrize("compressor", [RKV(**SMALL), H2O(**SMALL)], ids=lambda c: type(c).__name__)
def test_a_sampler_serves_calls_in_and_out_of_inference_mode_in_any_order(compressor: Compressor) -> None:
    policy = model(eos_token_id=None)
    want = {p.temperature: RolloutSampler(policy, compressor).generate(TWO, p) for p in (DRAWN, GREEDY)}
    for first, second in product([False, True], repeat=2):
        sampler, memory = RolloutSampler(policy, compressor), set()
        for inside, params in ((first, DRAWN), (second, GREEDY), (first, GREEDY), (second, DRAWN), (first, DRAWN)):
            with torch.inference_mode() if inside else nullcontext():
                rollout = sampler.generate(TWO, params)
            assert torch.equal(rollout.sequences, want[params.temperature].sequences)
            assert not rollout.sampler_logprobs.is_inference()
            memory.add(sampler.cache.key_pool.data_ptr())
        assert len(memory) == 1


def test_sessions_and_forced_texts_go_on_in_and_out_of_inference_mode() -> None:
    policy, method = model(eos_token_id=None), H2O(**SMALL)
    sampler = RolloutSampler(policy, method, 3)
    whole = sampler.generate(TWO, DRAWN)
    with torch.inference_mode():
        forced = forced_rollout(policy, whole, method)
        session = RolloutSession(sampler, DRAWN, 30)
        session.add(TWO, range(4))
        session.advance(max_steps=3)
    assert torch.equal(forced.evictions.death, whole.evictions.death)
    session.advance(max_steps=3)
    with torch.inference_mode():
        put_back(session)
    session.advance(max_steps=3)
    with torch.inference_mode():
        session.advance()
    assert torch.equal(session.take(session.complete).sequences, whole.sequences)


def test_weights_may_be_made_in_inference_mode() -> None:
    with torch.inference_mode():
        policy = model(eos_token_id=None)
    plain = model(eos_token_id=None)
    a, b = (RolloutSampler(model, RKV(**SMALL)).generate(TWO, DRAWN) for model in (policy, plain))
    assert torch.equal(a.sequences, b.sequences)


# ---------------------------------------------------------------- soak


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
ROLLOUTS, WARM_UP, EVERY = 500, 100, 50


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prompts_of(index: int) -> list[list[int]]:
    """Six prompts of one to forty tokens."""
    draw = random.Random(index)
    return [draw.choices(range(3, 128), k=draw.randint(1, 40)) for _ in range(6)]


class Interrupted(Exception):
    """As from a callback of the user's."""


def interrupt(progress: Progress) -> None:
    if progress.step == 7:
        raise Interrupted


def drawn(sampler: RolloutSampler, index: int) -> Rollout:
    """A rollout of 18 sequences in 5 slots; now and then an interrupted one before it."""
    params = SamplingParams(num_generations=3, max_completion_length=16, seed=index)
    if index % 10 == 3:
        with pytest.raises(Interrupted):
            sampler.generate(prompts_of(index + 1), params, progress=interrupt)
    return sampler.generate(prompts_of(index), params)


@needs_proc
def test_an_op_keeps_none_of_the_texts_it_was_given() -> None:
    """The conversion of torch 2.13 loses a copy of every text argument: three times 49 bytes a call."""
    keys, lengths, positions = torch.zeros(1, 1, 4, 8), torch.full((1, 1), 4), torch.arange(4).view(1, 1, 4)
    queries, query_positions = torch.zeros(1, 2, 3, 8), torch.arange(3)[None]

    def many(calls: int) -> int:
        for _ in range(calls):
            window_importance(
                queries, query_positions, keys, lengths, positions, 1.0, window=1, exclude_window=True,
                group_reduction="max", query_reduction="mean", pooling="max", kernel_size=3,
            )  # fmt: skip
        return resident()

    many(2000)
    before = many(2000)
    assert many(20_000) - before < 1_000_000


@pytest.mark.slow
@needs_proc
def test_500_rollouts_leave_nothing_behind() -> None:
    sampler = RolloutSampler(
        tiny_model(initializer_range=0.2), SnapKV(budget=10, buffer=4, num_sinks=1, window=3), num_slots=5,
        end_token_ids=range(1, 9),
    )  # fmt: skip
    memory, objects, finished, evicted = [], [], 0, 0
    for index in range(ROLLOUTS):
        rollout = drawn(sampler, index)
        finished += int(rollout.finished.sum())
        evicted += int((rollout.evictions.death < NEVER).any(dim=3).sum())
        del rollout
        if index + 1 >= WARM_UP and (index + 1) % EVERY == 0:
            gc.collect()
            memory.append(resident())
            objects.append(len(gc.get_objects()))
    assert 0.2 * 18 * ROLLOUTS < finished < 0.9 * 18 * ROLLOUTS, "sequences should end by tokens and by length"
    assert evicted > ROLLOUTS
    assert max(memory) <= 1.02 * memory[0], memory
    assert max(objects) - objects[0] <= 20, objects
