"""What the rollout engine offers beside plain generation, and that none of it changes a sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs
from rollout_cases import put_back
from rollouts import PARAMS, PROMPTS, SMALL, assert_replayed, assert_same, roll_out
from rollouts import small_model as model
from transformers import PreTrainedModel

from sparse_rl_lightning.compressors import RKV, Compressor, FullKV, RandomEviction, SnapKV
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams, replay_logprobs
from sparse_rl_lightning.testing import character_tokenizer


@pytest.mark.parametrize("compressor", [SnapKV(**SMALL), RandomEviction(**SMALL)], ids=type)
def test_two_hundred_prompts_of_mixed_lengths(compressor: Compressor) -> None:
    policy, generator = model(), torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 60, (200,), generator=generator).tolist()
    prompts = [torch.randint(2, 128, (n,), generator=generator).tolist() for n in lengths]
    params = SamplingParams(max_completion_length=24, seed=2)
    few = RolloutSampler(policy, compressor, 13, max_prefill_tokens=50).generate(prompts, params)
    many = RolloutSampler(policy, compressor, 200).generate(prompts, params)
    differ = ((few.sequences != many.sequences).any(dim=1)).nonzero().flatten().tolist()
    assert not differ, f"sequences {differ} depend on the batch"
    assert few.kv.peak_bytes * 200 == many.kv.peak_bytes * 13


def test_most_likely_tokens_are_those_of_a_plain_forward_pass() -> None:
    policy = model()
    params = SamplingParams(max_completion_length=12, seed=1, top_logprobs=5, temperature=0.7)
    rollout = roll_out(policy, params=params)
    assert rollout.topk_ids.shape == (*rollout.sequences.shape, 5)
    for row in range(len(rollout)):
        own = rollout.completion_mask[row].nonzero().flatten()
        logits = policy(rollout.sequences[row : row + 1, : int(own[-1]) + 1]).logits[0].float() / 0.7
        want = logits.log_softmax(-1).topk(5)
        assert_same_logprobs(rollout.topk_logprobs[row, own], want.values[own - 1])
        assert (rollout.topk_ids[row, own] == want.indices[own - 1]).all()
    assert (rollout.topk_logprobs[~rollout.completion_mask] == 0).all()
    plain = roll_out(policy)
    assert plain.topk_ids is plain.topk_logprobs is None


TOKENIZER = character_tokenizer()


def encode(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def test_stop_strings_cut_after_the_token_that_completes_one() -> None:
    policy = model(vocab_size=len(TOKENIZER), eos_token_id=None)
    prompts = [encode("what is 7 * 6?"), encode("hello")]
    free = SamplingParams(num_generations=3, max_completion_length=80, seed=2)
    whole = RolloutSampler(policy, SnapKV(**SMALL), end_token_ids=[]).generate(prompts, free)
    drawn = [s[m].tolist() for s, m in zip(whole.sequences, whole.completion_mask, strict=True)]
    # the text after every token: a token is not always a character
    texts = [[TOKENIZER.decode(tokens[: n + 1]) for n in range(len(tokens))] for tokens in drawn]
    stops = (texts[0][-1][30:33], texts[4][-1][10:12])  # what two of the sequences are known to say
    params = SamplingParams(num_generations=3, max_completion_length=80, seed=2, stop_strings=stops)
    cut = RolloutSampler(policy, SnapKV(**SMALL), end_token_ids=[], tokenizer=TOKENIZER).generate(prompts, params)
    for row, prefixes in enumerate(texts):
        ends = [n + 1 for n, text in enumerate(prefixes) if any(stop in text for stop in stops)]
        want = min(ends, default=80)
        assert int(cut.completion_lengths[row]) == want
        assert bool(cut.finished[row]) == bool(ends)
        length = int(cut.prompt_lengths[row]) + want
        assert (cut.sequences[row, :length] == whole.sequences[row, :length]).all()
    assert cut.finished[0]
    assert cut.finished[4]
    with pytest.raises(ValueError, match="the sampler has no tokenizer"):
        RolloutSampler(policy, FullKV()).generate(prompts, params)
    with pytest.raises(ValueError, match="stop_strings must be a list of texts that are not empty"):
        SamplingParams(stop_strings=("a", ""))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupted_sampler_can_be_used_again(error: type[BaseException]) -> None:
    policy = model().train()
    interrupted = RolloutSampler(policy, SnapKV(**SMALL), 3)
    want = roll_out(policy, SnapKV(**SMALL), 3)

    def stop(progress: Any) -> None:
        if progress.step == 9:
            raise error

    with pytest.raises(error):
        interrupted.generate(PROMPTS, PARAMS, progress=stop)
    assert policy.training
    assert torch.is_grad_enabled()
    pool = interrupted.cache.key_pool.data_ptr()
    assert_same(want, interrupted.generate(PROMPTS, PARAMS))
    assert interrupted.cache.key_pool.data_ptr() == pool


def test_new_weights_are_sampled_from() -> None:
    """Weights are packed for decoding on the CPU: a later call must not see the old ones."""
    policy, params = model(), SamplingParams(max_completion_length=20, seed=1)
    used = RolloutSampler(policy, FullKV())
    before = used.generate(PROMPTS, params)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.9)
    after, fresh = used.generate(PROMPTS, params), roll_out(policy, params=params)
    assert not torch.equal(before.sampler_logprobs, after.sampler_logprobs)
    assert_same(after, fresh)
    policy.get_decoder().layers[0].mlp.up_proj = torch.nn.Linear(64, 256, bias=False)  # as adapters do
    assert_same(used.generate(PROMPTS, params), roll_out(policy, params=params))


def test_modules_that_are_more_than_a_product_are_called() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    policy = model()
    policy.get_decoder().layers[1].self_attn.v_proj = Doubled(64, 32)
    policy.get_decoder().layers[0].mlp.down_proj.register_forward_hook(lambda module, args, out: out + 0.1)
    assert_replayed(policy, roll_out(policy))


def test_keys_and_values_in_another_type() -> None:
    policy = model(eos_token_id=None)
    wide, half = (RolloutSampler(policy, SnapKV(**SMALL), kv_dtype=kind) for kind in (None, "bfloat16"))
    a, b = (s.generate(PROMPTS, PARAMS) for s in (wide, half))
    assert 2 * b.kv.peak_bytes == a.kv.peak_bytes
    assert half.cache.key_pool.dtype == torch.bfloat16
    noise = (replay_logprobs(policy, b) - b.sampler_logprobs).abs()[b.completion_mask]
    assert 1e-5 < float(noise.median()) < 0.05
    with pytest.raises(ValueError, match=r"kv_dtype must be one of .*got 'int8'"):
        RolloutSampler(policy, FullKV(), kv_dtype="int8")


def test_a_memory_limit_chooses_the_slots() -> None:
    policy = model(eos_token_id=None)
    free = RolloutSampler(policy, SnapKV(**SMALL))
    want = free.generate(PROMPTS, PARAMS)
    assert free.cache.size.num_slots == 10
    assert free.memory_plan is None
    tight = RolloutSampler(policy, SnapKV(**SMALL), memory_limit=5 * want.kv.peak_bytes // 10 * 2)
    assert_same(want, tight.generate(PROMPTS, PARAMS))
    plan = tight.memory_plan
    assert 1 <= plan.num_slots < 10
    assert tight.cache.size.num_slots == plan.num_slots
    assert plan.total_bytes <= plan.limit < plan.total_bytes + plan.bytes_per_slot * (8 if plan.num_slots > 7 else 1)
    with pytest.raises(ValueError, match="Not even one slot fits"):
        RolloutSampler(policy, SnapKV(**SMALL), memory_limit=1000).generate(PROMPTS, PARAMS)


def test_what_random_eviction_keeps_of_a_prompt_follows_from_the_seed_and_the_prompt() -> None:
    """In one slot after the other, which were another prompt's before; the samples of a prompt share it."""
    sampler = RolloutSampler(model(), RandomEviction(**SMALL), num_slots=3)
    prompts = [list(range(5, 45)), list(range(6, 46)), list(range(5, 45))]

    def gone(own: list[list[int]], seed: int) -> list[list[bool]]:
        params = SamplingParams(num_generations=2, max_completion_length=1, seed=seed)
        evictions = sampler.generate(own, params).evictions
        return [(evictions.death[:, row, :, :40] == 40).flatten().tolist() for row in range(2 * len(own))]

    first, same, other, _, again, _ = gone(prompts, 1)
    assert 0 < sum(first) < len(first)
    assert first == same == again
    assert first != other
    assert first == gone(prompts[:1], 1)[0]
    assert first != gone(prompts[:1], 2)[0]


def test_the_pool_can_be_given_back() -> None:
    policy = model()
    returning = RolloutSampler(policy, SnapKV(**SMALL), keep_pool=False)
    first = returning.generate(PROMPTS, PARAMS)
    assert returning.cache is None
    assert_same(first, returning.generate(PROMPTS, PARAMS))


each_compressor = pytest.mark.parametrize("compressor", [FullKV(), SnapKV(**SMALL), RKV(**SMALL)], ids=type)


def start(policy: PreTrainedModel, compressor: Compressor, num_slots: int = 4) -> RolloutSession:
    return RolloutSession(RolloutSampler(policy, compressor, num_slots), PARAMS, max_prompt_length=40)


def change(policy: PreTrainedModel, factor: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(factor)


@each_compressor
def test_without_an_update_pieces_make_the_whole(compressor: Compressor) -> None:
    policy = model()
    want = RolloutSampler(policy, compressor).generate(PROMPTS, PARAMS)
    session = start(policy, compressor)
    numbers = [*session.add(PROMPTS[:2], range(4)), *session.add(PROMPTS[2:], range(4, 10))]
    counts = []
    while session.num_unfinished:
        session.advance(max_steps=6)
        counts.append(len(session.complete))
    assert 0 in counts, "no call stopped in the middle of all groups"
    assert counts == sorted(counts)
    assert_same(want, session.take(numbers))
    assert session.complete == []


def test_the_sampler_tells_the_plan_of_a_session_that_takes_its_slots() -> None:
    sampler = RolloutSampler(model(), SnapKV(**SMALL), memory_limit=100_000)
    session = RolloutSession(sampler, PARAMS, max_prompt_length=40, num_sequences=10)
    plan = session.memory_plan
    assert plan is not None
    assert 1 <= plan.num_slots < 10
    assert sampler.memory_plan is plan
    assert session.scheduler.num_slots == plan.num_slots


def test_versions_begin_anew_in_the_slots_of_an_earlier_session() -> None:
    sampler = RolloutSampler(model(), SnapKV(**SMALL))
    for _ in range(2):
        session = RolloutSession(sampler, PARAMS, max_prompt_length=40, num_sequences=4)
        numbers = session.add(PROMPTS[:2], range(4))
        assert session.version == 0
        session.advance()
        rollout = session.take(numbers)
        assert rollout.policy_versions is not None
        assert rollout.policy_versions[rollout.completion_mask].unique().tolist() == [1]


def test_groups_come_out_when_they_are_complete_and_others_go_on() -> None:
    policy = model()
    session = start(policy, SnapKV(**SMALL))
    session.add(PROMPTS, range(10))
    taken: dict[int, Rollout] = {}
    while session.num_unfinished or session.complete:
        session.advance(max_steps=5)
        for number in session.complete:
            taken[number] = session.take([number])
            assert len(taken[number]) == 2
    whole = RolloutSampler(policy, SnapKV(**SMALL)).generate(PROMPTS, PARAMS)
    for number, rollout in taken.items():
        width = rollout.sequences.shape[1]
        assert torch.equal(rollout.sequences, whole.sequences[2 * number : 2 * number + 2, :width])
    assert sorted(taken) == [0, 1, 2, 3, 4]


def test_every_token_knows_its_version_and_replay_refuses_mixed_sequences() -> None:
    policy = model()
    session = start(policy, SnapKV(**SMALL), num_slots=3)
    numbers = session.add(PROMPTS, range(10))
    while session.num_unfinished:
        session.advance(max_steps=32)  # more than a completion has tokens: the first ones end under the first version
        change(policy, 0.97)
    rollout = session.take(numbers)
    versions = [v[m].tolist() for v, m in zip(rollout.policy_versions, rollout.completion_mask, strict=True)]
    assert all(row == sorted(row) for row in versions)
    assert (rollout.policy_versions[~rollout.completion_mask] == 0).all()
    mixed = [row for row, own in enumerate(versions) if len(set(own)) > 1]
    assert mixed
    with pytest.raises(ValueError, match=rf"Sequences \[{mixed[0]}.*drawn by several versions"):
        replay_logprobs(policy, rollout)
    first = [row for row, own in enumerate(versions) if set(own) == {1}]
    assert first
    fresh = model()  # the weights that drew version 1
    part = rollout[torch.tensor(first)]
    assert_same_logprobs(replay_logprobs(fresh, part), part.sampler_logprobs)


@each_compressor
@pytest.mark.parametrize("num_slots", [3, 10])
def test_slots_that_are_put_back_go_on_as_if_nothing_had_happened(compressor: Compressor, num_slots: int) -> None:
    policy = model()
    session, moved = start(policy, compressor, num_slots), start(policy, compressor, num_slots)
    for each in (session, moved):
        numbers = each.add(PROMPTS, range(10))
        each.advance(max_steps=13)
    put_back(moved)
    for each in (session, moved):
        each.advance()
    assert_same(session.take(numbers), moved.take(numbers))


def test_a_version_begins_with_new_weights_where_nothing_else_is_said() -> None:
    """Whole rollouts take the weights at every call; conversations keep those they began with."""

    def versions(turns: bool, *new_weights: bool | None) -> list[int]:
        params = replace(PARAMS, max_completion_length=8, num_generations=1)
        session = RolloutSession(RolloutSampler(model(), FullKV(), 2), params, 40, turns=turns)
        session.add([[3, 4, 5]], range(1))
        found = []
        for one in new_weights:
            session.advance(1, new_weights=one)
            found.append(session._logs.version.unique().item())
        return found

    assert versions(False, None, None, False, None) == [1, 2, 2, 3]
    assert versions(True, None, None, True) == [1, 1, 2]


def test_mistakes_are_named() -> None:
    policy = model()
    with pytest.raises(ValueError, match="set num_slots"):
        RolloutSession(RolloutSampler(policy, FullKV()), PARAMS, 10)
    session = RolloutSession(RolloutSampler(policy, FullKV(), 2), PARAMS, 10)
    with pytest.raises(ValueError, match="made for max_prompt_length=10"):
        session.add([[3] * 11], range(2))
    with pytest.raises(ValueError, match="must name 2 sequences, got 3"):
        session.add([[3]], range(3))
