"""DESIGN properties 1 to 4 of the rollout engine: equal to generate, replayable, batch-independent, bounded memory."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from closeness import assert_same_logprobs
from rollouts import CHECK_EVERY, PROMPTS, SMALL, assert_generated, assert_replayed, assert_same, roll_out
from rollouts import small_model as model

from sparse_rl_lightning.compressors import RKV, Compressor, FullKV, RandomEviction, SnapKV, StreamingLLM
from sparse_rl_lightning.records import NEVER, Rollout
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.testing import ARCHITECTURES

EVICTING: list[Compressor] = [
    StreamingLLM(**SMALL),
    SnapKV(**SMALL),
    SnapKV(**SMALL, variant="original", pooling="avg", kernel_size=5),
    RKV(**SMALL),
    RandomEviction(**SMALL),
    RKV(budget=12, buffer=5, num_sinks=0, window=4, compress_prompt=False),
    SnapKV(budget=20, buffer=1, num_sinks=3, window=2),
]
IDS = [f"{index}-{type(c).__name__}" for index, c in enumerate(EVICTING)]


def plain_logprobs(policy: torch.nn.Module, rollout: Rollout, row: int, temperature: float) -> torch.Tensor:
    """Log-probabilities of one sequence by an ordinary forward pass of the unpadded ids."""
    length = int(rollout.prompt_lengths[row] + rollout.completion_lengths[row])
    ids = rollout.sequences[row : row + 1, :length]
    logits = policy(ids).logits[0, :-1].float() / temperature
    logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    return logprobs[int(rollout.prompt_lengths[row]) - 1 :]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("compressor", [FullKV(), RKV(budget=64, buffer=16)], ids=["full", "rkv"])
def test_large_budget_equals_generate(architecture: str, compressor: Compressor) -> None:
    policy = model(architecture)
    rollout = roll_out(policy, compressor, 3, params=SamplingParams(max_completion_length=24, temperature=0))
    assert_generated(policy, rollout, 24)
    for row, mask in enumerate(rollout.completion_mask):
        assert_same_logprobs(rollout.sampler_logprobs[row][mask], plain_logprobs(policy, rollout, row, 1.0))
    assert (rollout.evictions.death == NEVER).all()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("compressor", EVICTING, ids=IDS)
def test_replay_is_exact(architecture: str, compressor: Compressor) -> None:
    policy = model(architecture, eos_token_id=None)
    params = SamplingParams(num_generations=2, max_completion_length=40, temperature=0.9, seed=3)
    rollout = roll_out(policy, compressor, 4, params=params)
    replayed = assert_replayed(policy, rollout, 0.9)
    dense = torch.cat([plain_logprobs(policy, rollout, row, 0.9) for row in range(len(rollout))])
    sparse = rollout.sampler_logprobs[rollout.completion_mask]
    assert (dense - sparse).abs().max() > 1e-2, "nothing that matters was evicted: the test would prove nothing"
    replayed.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.parameters())


@pytest.mark.thinned(3)
@pytest.mark.parametrize("compressor", [FullKV(), *EVICTING], ids=["full", *IDS])
def test_sequence_is_the_same_in_any_batch_slot_order_and_chunk(
    compressor: Compressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And however seldom the host looks at the device: what slots do meanwhile must leave no trace."""
    policy = model()
    params = SamplingParams(num_generations=3, max_completion_length=30, temperature=1.0, seed=11)
    whole = roll_out(policy, compressor, params=params)
    assert set(whole.finished.tolist()) == {True, False}, "both ways to end must occur"
    for num_slots, chunk, look in ((1, 1, 1), (2, 7, 1), (5, 16, 7), (7, 1000, 1)):  # groups split over admissions
        monkeypatch.setattr(CHECK_EVERY, {"cpu": look})
        assert_same(whole, roll_out(policy, compressor, num_slots, params=params, max_prefill_tokens=chunk))
    alone = SamplingParams(num_generations=1, max_completion_length=30, temperature=1.0, seed=11)
    for number in (0, 4, 8, 11, 13):
        sampler = RolloutSampler(policy, compressor)
        single = sampler.generate([PROMPTS[number // 3]], alone, sequence_ids=[number])
        assert_same(whole[torch.tensor([number])].trimmed(), single)


def test_what_a_callback_hangs_on_a_rollout_stays_there() -> None:
    rollout = roll_out(model(), EVICTING[0], params=SamplingParams(max_completion_length=4))
    rollout.note = "seen"  # type: ignore[attr-defined]
    for copied in (rollout[torch.tensor([0])], rollout.trimmed(), rollout.to("cpu")):
        assert not hasattr(copied, "note")
    assert "note" not in rollout.state()


@pytest.mark.parametrize("compressor", EVICTING, ids=IDS)
def test_memory_is_bounded_and_counted(compressor: Compressor) -> None:
    policy = model(eos_token_id=None)
    peaks = []
    for length in (20, 60):
        sampler = RolloutSampler(policy, compressor, num_slots=4)
        rollout = sampler.generate(PROMPTS, SamplingParams(max_completion_length=length, seed=1))
        peaks.append(rollout.kv.peak_bytes)
        layers, heads, head_dim = 2, 2, 16
        capacity = compressor.budget + compressor.buffer
        if not compressor.compress_prompt:
            capacity = max(compressor.budget, 40) + compressor.buffer
        assert rollout.kv.peak_bytes == layers * 4 * heads * capacity * 2 * head_dim * 4
        pools = sampler.cache.key_pool, sampler.cache.value_pool
        assert rollout.kv.peak_bytes == sum(p.untyped_storage().nbytes() for p in pools)
        assert rollout.kv.full_peak_bytes == layers * 4 * heads * (40 + length) * 2 * head_dim * 4
        assert (rollout.kv.stored <= capacity).all()
    assert peaks[0] == peaks[1]


def test_usage_counts_entries_and_deaths_follow_the_rule() -> None:
    """One prompt of 4, capacity 8, budget 6: lengths read are 5, 6, 7, 8, then 7, 8, 7, 8 ... and 4 + 1.. dense.

    StreamingLLM's survivors are known: sinks and the most recent entries, at the trigger steps of the slot.
    """
    sampler = RolloutSampler(model(eos_token_id=None), StreamingLLM(budget=6, buffer=2, num_sinks=1, window=2))
    rollout = sampler.generate([[3, 4, 5, 6]], SamplingParams(max_completion_length=9, seed=1))
    assert rollout.kv.full.tolist() == [12.0]  # 4 + 9 - 1: the last token is never fed
    assert rollout.kv.stored_integral.tolist() == [5 + 6 + 7 + 8 + 7 + 8 + 7 + 8]
    assert rollout.kv.full_integral.tolist() == [5 + 6 + 7 + 8 + 9 + 10 + 11 + 12]
    assert rollout.kv.stored.tolist() == [6.0]
    assert rollout.kv.saving_final == pytest.approx(0.5)
    # full with 8 entries when token 7 was appended: 1, 2 die at 8; then at 10 the entries 3, 4; then at 12: 5, 6
    want = [NEVER, 8, 8, 10, 10, 12, 12] + [NEVER] * 6
    assert rollout.evictions.death[0, 0, 0].tolist() == want
    assert (rollout.evictions.death == rollout.evictions.death[:1, :, :1]).all()


def test_prompt_compression_dies_at_the_prompts_end() -> None:
    policy = model(eos_token_id=None)
    sampler = RolloutSampler(policy, StreamingLLM(budget=6, buffer=2, num_sinks=1, window=2))
    rollout = sampler.generate([list(range(3, 13))], SamplingParams(max_completion_length=2, seed=1))
    assert rollout.evictions.death[0, 0, 0].tolist() == [NEVER] + [10] * 4 + [NEVER] * 7
    kept = RolloutSampler(policy, StreamingLLM(budget=6, buffer=2, num_sinks=1, window=2, compress_prompt=False))
    rollout = kept.generate([list(range(3, 13))], SamplingParams(max_completion_length=4, seed=1))
    assert rollout.evictions.death[0, 0, 0].tolist() == [NEVER] + [12] * 6 + [NEVER] * 7


def test_prompt_exactly_as_long_as_the_slot_is_compressed() -> None:
    policy = model(eos_token_id=None)
    for length, compressed in ((7, False), (8, True)):
        sampler = RolloutSampler(policy, StreamingLLM(budget=6, buffer=2, num_sinks=1, window=2))
        rollout = sampler.generate([list(range(3, 3 + length))], SamplingParams(max_completion_length=1, seed=1))
        assert bool((rollout.evictions.death[0, 0, 0] == length).any()) == compressed


def test_a_prompt_stored_whole_is_compressed_like_any_other_after_its_first_time() -> None:
    """Limit 12 = prompt 10 + buffer 2 at first, then 8 = budget 6 + buffer 2: every second token evicts two entries."""
    compressor = StreamingLLM(budget=6, buffer=2, num_sinks=1, window=2, compress_prompt=False)
    sampler = RolloutSampler(model(eos_token_id=None), compressor)
    rollout = sampler.generate([list(range(3, 13))], SamplingParams(max_completion_length=9, seed=1))
    want = [NEVER, *[12] * 6, *[14] * 2, *[16] * 2, *[18] * 2, *[NEVER] * 6]
    assert rollout.evictions.death[0, 0, 0].tolist() == want
    assert rollout.kv.stored.tolist() == [6.0]


def test_the_model_is_left_as_it_was() -> None:
    policy = model()
    policy.train()
    policy.model.layers[0].eval()
    before = policy.config._attn_implementation
    sampler = RolloutSampler(policy, RKV(**SMALL))
    with pytest.raises(ZeroDivisionError):
        sampler.generate(PROMPTS, SamplingParams(max_completion_length=5), progress=lambda p: p.total / 0)
    assert policy.training
    assert not policy.model.layers[0].training
    assert policy.config._attn_implementation == before
    assert torch.is_grad_enabled()
    assert len(sampler.generate(PROMPTS, SamplingParams(max_completion_length=5))) == len(PROMPTS)


def test_several_end_tokens_and_lengths() -> None:
    policy = model(vocab_size=16)
    prompts = [[5, 6, 7]]
    params = SamplingParams(num_generations=64, max_completion_length=12, min_completion_length=4, seed=2)
    rollout = RolloutSampler(policy, FullKV(), end_token_ids=[1, 9]).generate(prompts, params)
    lengths = rollout.completion_lengths
    assert lengths.min() >= 4
    assert lengths.max() <= 12
    last = rollout.sequences.gather(1, (rollout.prompt_lengths + lengths - 1)[:, None]).squeeze(1)
    ends = torch.isin(last, torch.tensor([1, 9]))
    assert (ends == rollout.finished).all()
    assert set(last[ends].tolist()) == {1, 9}
    inner = rollout.completion_mask.clone()
    inner.scatter_(1, (rollout.prompt_lengths + lengths - 1)[:, None], False)
    assert not torch.isin(rollout.sequences[inner], torch.tensor([1, 9])).any()
    assert rollout.behavior_logprobs is not None  # forbidding the end token changes the distribution drawn from
    early = rollout.behavior_logprobs[:, 3:7] - rollout.sampler_logprobs[:, 3:7]
    assert (early[rollout.completion_mask[:, 3:7]] >= -1e-6).all()


def test_progress_reports_the_run() -> None:
    seen = []
    params = SamplingParams(max_completion_length=6)
    RolloutSampler(model(), FullKV(), num_slots=2).generate(PROMPTS, params, progress=seen.append)
    assert seen[-1].finished == seen[-1].total == len(PROMPTS)
    assert seen[-1].active == 0
    assert all(a.tokens <= b.tokens for a, b in itertools.pairwise(seen))


def test_slices_and_state_round_trip() -> None:
    rollout = RolloutSampler(model(), RKV(**SMALL)).generate(PROMPTS, SamplingParams(max_completion_length=6))
    part = Rollout.from_state(rollout[1:3].state())
    assert len(part) == 2
    assert (part.evictions.death == rollout.evictions.death[:, 1:3]).all()
    assert (part.kv.stored == rollout.kv.stored[1:3]).all()


def test_a_slot_that_evicts_nothing_is_warned_about_once() -> None:
    sampler = RolloutSampler(model(), RKV(budget=40, buffer=10))
    with pytest.warns(UserWarning, match=r"buffer, 50 tokens, .*\(50 tokens\) whole: nothing will be evicted"):
        sampler.generate([[1] * 40], SamplingParams(max_completion_length=10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.generate([[1] * 40], SamplingParams(max_completion_length=10))
        longer = SamplingParams(max_completion_length=11)
        RolloutSampler(model(), RKV(budget=40, buffer=10)).generate([[1] * 40], longer)
        RolloutSampler(model(), FullKV()).generate([[1] * 40], SamplingParams(max_completion_length=10))
