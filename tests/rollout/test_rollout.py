"""DESIGN properties 1 to 4 of the rollout engine: equal to generate, replayable, batch-independent, bounded memory."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from closeness import assert_same_logprobs

from sparse_rl_lightning.compressors import RKV, Compressor, FullKV, RandomEviction, SnapKV, StreamingLLM
from sparse_rl_lightning.records import NEVER, Rollout
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.testing import ARCHITECTURES, tiny_model

PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 9, 40, 1)]
SMALL = {"budget": 12, "buffer": 5, "num_sinks": 2, "window": 4}
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


def model(architecture: str = "qwen2", **kwargs: object) -> torch.nn.Module:
    return tiny_model(architecture, initializer_range=0.2, **kwargs)


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
    rollout = RolloutSampler(policy, compressor, num_slots=3).generate(
        PROMPTS, SamplingParams(max_completion_length=24, temperature=0)
    )
    for row, prompt in enumerate(PROMPTS):
        want = policy.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=24, do_sample=False
        )[0]
        got = rollout.sequences[row, : len(prompt) + int(rollout.completion_lengths[row])]
        assert got.tolist() == want.tolist()
        assert bool(rollout.finished[row]) == (want[-1].item() == 1)
        logprobs = rollout.sampler_logprobs[row][rollout.completion_mask[row]]
        assert_same_logprobs(logprobs, plain_logprobs(policy, rollout, row, 1.0))
    assert (rollout.evictions.death == NEVER).all()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("compressor", EVICTING, ids=IDS)
def test_replay_is_exact(architecture: str, compressor: Compressor) -> None:
    policy = model(architecture, eos_token_id=None)
    params = SamplingParams(num_generations=2, max_completion_length=40, temperature=0.9, seed=3)
    rollout = RolloutSampler(policy, compressor, num_slots=4).generate(PROMPTS, params)
    replayed = replay_logprobs(policy, rollout, temperature=0.9)
    assert_same_logprobs(replayed, rollout.sampler_logprobs)
    dense = torch.cat([plain_logprobs(policy, rollout, row, 0.9) for row in range(len(rollout))])
    sparse = rollout.sampler_logprobs[rollout.completion_mask]
    assert (dense - sparse).abs().max() > 1e-2, "nothing that matters was evicted: the test would prove nothing"
    replayed.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.parameters())


@pytest.mark.thinned(3)
@pytest.mark.parametrize("compressor", [FullKV(), *EVICTING], ids=["full", *IDS])
def test_sequence_is_the_same_in_any_batch_slot_and_order(compressor: Compressor) -> None:
    policy = model()
    params = SamplingParams(num_generations=3, max_completion_length=30, temperature=1.0, seed=11)
    whole = RolloutSampler(policy, compressor).generate(PROMPTS, params)
    for num_slots in (1, 2, 5, 7):  # refills in many orders, groups split over admissions
        again = RolloutSampler(policy, compressor, num_slots=num_slots).generate(PROMPTS, params)
        assert_same(whole, again)
    alone_params = SamplingParams(num_generations=1, max_completion_length=30, temperature=1.0, seed=11)
    for prompt, sample in itertools.product(range(len(PROMPTS)), range(3)):
        number = 3 * prompt + sample
        alone = RolloutSampler(policy, compressor).generate([PROMPTS[prompt]], alone_params, sequence_ids=[number])
        assert_same(whole[torch.tensor([number])], alone)


def assert_same(a: Rollout, b: Rollout) -> None:
    """Equal tokens and deaths, log-probs to float noise (the seeds used meet no near-tie)."""
    width = min(a.sequences.shape[1], b.sequences.shape[1])
    assert (a.completion_lengths == b.completion_lengths).all()
    assert (a.sequences[:, :width] == b.sequences[:, :width]).all()
    assert (a.evictions.death[..., :width] == b.evictions.death[..., :width]).all()
    assert_same_logprobs(a.sampler_logprobs[:, :width], b.sampler_logprobs[:, :width])


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


def test_usage_counts_entries() -> None:
    """One prompt of 4, capacity 8, budget 6: lengths read are 5, 6, 7, 8, then 7, 8, 7, 8 ... and 4 + 1.. dense."""
    policy = model(eos_token_id=None)
    sampler = RolloutSampler(policy, StreamingLLM(budget=6, buffer=2, num_sinks=1, window=2))
    rollout = sampler.generate([[3, 4, 5, 6]], SamplingParams(max_completion_length=9, seed=1))
    assert rollout.kv.full.tolist() == [12.0]  # 4 + 9 - 1: the last token is never fed
    assert rollout.kv.stored_integral.tolist() == [5 + 6 + 7 + 8 + 7 + 8 + 7 + 8]
    assert rollout.kv.full_integral.tolist() == [5 + 6 + 7 + 8 + 9 + 10 + 11 + 12]
    assert rollout.kv.stored.tolist() == [6.0]
    assert rollout.kv.saving_final == pytest.approx(0.5)


def test_deaths_follow_the_rule() -> None:
    """StreamingLLM's survivors are known: sinks and the most recent entries, at the trigger steps of the slot."""
    policy = model(eos_token_id=None)
    sampler = RolloutSampler(policy, StreamingLLM(budget=6, buffer=2, num_sinks=1, window=2))
    rollout = sampler.generate([[3, 4, 5, 6]], SamplingParams(max_completion_length=9, seed=1))
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


def test_sampler_is_reused_between_calls_and_pools_stay() -> None:
    policy = model()
    sampler = RolloutSampler(policy, RKV(**SMALL), num_slots=4)
    params = SamplingParams(num_generations=2, max_completion_length=20, seed=5)
    first = sampler.generate(PROMPTS, params)
    address = sampler.cache.key_pool.data_ptr()
    sampler.generate(PROMPTS[:2], SamplingParams(max_completion_length=10, seed=6))
    second = sampler.generate(PROMPTS, params)
    assert sampler.cache.key_pool.data_ptr() == address
    assert_same(first, second)


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
    RolloutSampler(model(), FullKV(), num_slots=2).generate(
        PROMPTS, SamplingParams(max_completion_length=6), progress=seen.append
    )
    assert seen[-1].finished == seen[-1].total == len(PROMPTS)
    assert seen[-1].active == 0
    assert all(a.tokens <= b.tokens for a, b in itertools.pairwise(seen))


def test_slices_and_state_round_trip() -> None:
    rollout = RolloutSampler(model(), RKV(**SMALL)).generate(PROMPTS, SamplingParams(max_completion_length=6))
    part = Rollout.from_state(rollout[1:3].state())
    assert len(part) == 2
    assert (part.evictions.death == rollout.evictions.death[:, 1:3]).all()
    assert (part.kv.stored == rollout.kv.stored[1:3]).all()


@pytest.mark.parametrize(
    ("prompts", "match"),
    [
        ([], "prompts is empty"),
        ([[1], []], "prompt 1 is empty"),
        ([[1], [2] * 500], r"prompt 1 has 500 tokens.*context of 512"),
    ],
)
def test_bad_prompts_are_refused(prompts: list[list[int]], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RolloutSampler(model(), FullKV()).generate(prompts, SamplingParams(max_completion_length=20))


def test_a_slot_that_evicts_nothing_is_warned_about_once() -> None:
    sampler = RolloutSampler(model(), RKV(budget=40, buffer=10))
    with pytest.warns(UserWarning, match=r"buffer, 50 tokens, .*\(50 tokens\) whole: nothing will be evicted"):
        sampler.generate([[1] * 40], SamplingParams(max_completion_length=10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.generate([[1] * 40], SamplingParams(max_completion_length=10))
        RolloutSampler(model(), RKV(budget=40, buffer=10)).generate(
            [[1] * 40], SamplingParams(max_completion_length=11)
        )
        RolloutSampler(model(), FullKV()).generate([[1] * 40], SamplingParams(max_completion_length=10))
